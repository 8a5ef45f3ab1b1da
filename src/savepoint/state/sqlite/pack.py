"""Contents of a session as bytes: what moves it to another process, and what a worker ships so that its death costs nothing.

    header   magic, version, page size (u32), file size (u64), number of pages (u64), bytes of the settings (u32), digest of the base
    settings MessagePack: pragmas of the connection, last_insert_rowid
    pages    of each its number (i64) and its bytes, ascending
    seal     BLAKE2b of all of it

Everything is checked before a page is written: a damaged or foreign pack changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import msgpack

from savepoint.state.errors import StateError
from savepoint.state.sqlite.pages import Image, Volume

_MAGIC = b"SVPTDLT1"
_HEADER = struct.Struct("<8sIQQI64s")
_SEAL_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pack:
    """base_digest: the imported file that the pages belong to. size: bytes of the database. pages: as `Image.delta` gives them. extras: of the connection."""

    base_digest: str
    page_size: int
    size: int
    pages: memoryview
    extras: dict[str, Any]

    def check(self, base_digest: str) -> None:
        """StateError when it is of another base."""
        if self.base_digest != base_digest:
            raise StateError(f"a delta of base {self.base_digest} cannot be applied to base {base_digest}")

    def write(self, volume: Volume, origin: Image, base: Path | int) -> None:
        """Write the pages into a volume that shows `origin` and on which no connection is open. base: the imported file, by path or descriptor."""
        mine = dict(self._each(self.pages))
        back = [number for number, _ in self._each(memoryview(origin.delta())) if number not in mine and number * self.page_size < self.size]
        file = apsw.VFSFile(volume.name, "database", [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READWRITE, 0])
        try:
            for number, page in mine.items():
                file.xWrite(page, number * self.page_size)
            if back:  # pages that the set-up changed and the session changed back
                with open(base, "rb", closefd=not isinstance(base, int)) as original:
                    for number in back:
                        file.xWrite(os.pread(original.fileno(), self.page_size, number * self.page_size), number * self.page_size)
            file.xTruncate(self.size)
        finally:
            file.xClose()

    def _each(self, pages: memoryview) -> Iterator[tuple[int, bytes]]:
        return ((number, page) for number, page in struct.iter_unpack(f"=q{self.page_size}s", pages))


def pack(image: Image, page_size: int, base_digest: str, extras: dict[str, Any]) -> bytes:
    """The contents of an image relative to its base file, whole: O(delta) bytes."""
    pages = image.delta()
    settings = msgpack.packb(extras)
    header = _HEADER.pack(_MAGIC, page_size, image.size, len(pages) // (8 + page_size), len(settings), base_digest.encode())
    body = b"".join((header, settings, pages))
    return body + hashlib.blake2b(body, digest_size=_SEAL_BYTES).digest()


def unpack(data: bytes) -> Pack:
    """StateError, one line, when it is no pack or was damaged on the way."""
    view = memoryview(data)
    if len(view) < _HEADER.size + _SEAL_BYTES or bytes(view[:8]) != _MAGIC:
        raise StateError("not a delta of a session")
    body, seal = view[:-_SEAL_BYTES], bytes(view[-_SEAL_BYTES:])
    if hashlib.blake2b(body, digest_size=_SEAL_BYTES).digest() != seal:
        raise StateError("a delta that was damaged: its checksum does not match")
    _, page_size, size, count, settings, digest = _HEADER.unpack_from(body)
    pages = body[_HEADER.size + settings :]
    if page_size < 512 or page_size > 65536 or len(pages) != count * (8 + page_size):
        raise StateError("a delta that was damaged: its pages are not those that it announces")
    extras = msgpack.unpackb(body[_HEADER.size : _HEADER.size + settings])
    numbers = [number for number, _ in struct.iter_unpack(f"=q{page_size}s", pages)] if count else []
    if any(not 0 <= number <= (1 << 32) for number in numbers):
        raise StateError("a delta with a page that no database has")
    return Pack(digest.rstrip(b"\0").decode(), page_size, size, pages, extras)
