"""Contents of a session as an ordinary database file."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path
from typing import BinaryIO

from savepoint.errors import UserError
from savepoint.state.image import BaseImage

_COPY_BLOCK = 1 << 20


def write_database(path: Path, image: BaseImage, size: int, delta: bytes) -> None:
    """Write the imported file with the pages of `delta` (as `Image.delta` gives them), `size` bytes. It is there whole or not at all.

    UserError when the file exists (nothing is overwritten, so never a base) or cannot be written.
    """
    try:
        if path.exists():
            raise FileExistsError
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}-", dir=path.parent, delete=False) as file:
            try:
                _write(file, image, size, delta)  # type: ignore[arg-type]
                os.link(file.name, path)  # unlike a rename, this fails where the file has come to be meanwhile
            finally:
                Path(file.name).unlink()
    except FileExistsError:
        raise UserError(f"{path}: exists already; export writes a new file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _write(file: BinaryIO, image: BaseImage, size: int, delta: bytes) -> None:
    """Base first, then the pages that differ, then the size."""
    page, left = image.page_size, size
    with image.path.open("rb") as base:
        while left > 0 and (block := base.read(min(_COPY_BLOCK, left))):
            file.write(block)
            left -= len(block)
    for at in range(0, len(delta), 8 + page):
        (number,) = struct.unpack_from("=q", delta, at)
        file.seek(number * page)
        file.write(memoryview(delta)[at + 8 : at + 8 + page])
    file.truncate(size)
    os.fchmod(file.fileno(), 0o644)
    file.flush()
    os.fsync(file.fileno())
