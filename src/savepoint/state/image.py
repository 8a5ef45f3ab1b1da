"""Images: immutable contents of a database, named by what they contain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from savepoint.state.errors import StateError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BaseImage:
    """Immutable contents of a database: an imported file, or one with a set-up applied (`setup` is not empty then).

    digest: names the content, base included. path: the imported file in the store. size: bytes of the database. page_size: bytes.
    setup: the statements that were run on the imported file. base_digest: of the imported file. columns: of its widest table.
    delta_bytes: what the set-up changed. Leases hold what they need of it, so an image may be dropped at any time.
    """

    digest: str
    path: Path
    size: int
    page_size: int
    setup: tuple[str, ...] = ()
    base_digest: str = ""
    columns: int = 0
    delta_bytes: int = 0
    contents: Any = field(default=None, repr=False)
    identity: tuple[int, ...] = field(default=(), repr=False)

    def pages(self) -> Any:
        """The page store's handle. StateError when the image was released, or its file in the store was touched."""
        if self.contents is None:
            raise StateError(f"image {self.digest} was released")
        if not self.unchanged():
            raise StateError(f"{self.path}: the imported file was changed or removed; delete it and import again")
        return self.contents

    def unchanged(self) -> bool:
        """Whether the imported file is the very file that was opened: its place on the disk, size and time stamp."""
        try:
            return self.identity == file_identity(self.path)
        except OSError:
            return False

    def release(self) -> None:
        """Give the pages back now rather than when nothing refers to the image."""
        object.__setattr__(self, "contents", None)


def file_identity(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
