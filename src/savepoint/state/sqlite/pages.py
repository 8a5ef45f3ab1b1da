"""What a copy-on-write page store offers, whoever implements it: the C VFS (`native`) or the Python one (`overlay`).

A `Volume` is one session's private file: an immutable base, seen through a small table of changed pages. An `Image` is a frozen volume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

PAGE_QUOTA, TEMP_QUOTA, HOST_FULL = 1, 2, 4  # bits of VolumeStats.refused; the same in cowvfs.c


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """size: bytes of the file. delta_pages: pages that differ from the image it began with. held_pages: pages that it pays for,
    those that only its snapshots keep included. temp_bytes: journals, TEMP tables and sorters now. refused: which limits
    refused a write since `begin()`. same_size: whether the file has the size of the image it began with."""

    size: int
    delta_pages: int
    held_pages: int
    temp_bytes: int
    refused: int
    same_size: bool


class Image(Protocol):
    """Immutable contents of a file. Freed when nothing refers to it."""

    @property
    def size(self) -> int: ...

    def delta(self) -> bytes:
        """Pages that differ from the base file, ascending, each as a native int64 number and its bytes."""


class Volume(Protocol):
    """One session's file. `name` is the SQLite VFS through which one connection at a time opens it."""

    @property
    def name(self) -> str: ...

    def freeze(self) -> Image:
        """The contents now, immutable. No transaction may be open on the connection."""

    def restore(self, image: Image | None) -> None:
        """Go back to `image` (None: the one the volume began with). The connection must be closed: it caches pages."""

    def begin(self) -> None:
        """A new statement begins: forget what was refused."""

    def stats(self) -> VolumeStats: ...

    def close(self) -> None: ...


class PageStore(Protocol):
    """Makes images and volumes. One per process and kind."""

    @property
    def kind(self) -> str: ...

    def open_base(self, source: str | int, page_size: int) -> Image:
        """A file by its path, or by an open descriptor, which may be closed then; mapped read-only."""

    def volume(self, origin: Image, contents: Image | None, max_pages: int, max_temp: int) -> Volume:
        """A volume that shows `contents` (None: `origin`) and whose reset goes back to `origin`."""

    def live(self) -> dict[str, int]:
        """How many pages, volumes, images and bases exist in this process: what a leak test looks at."""
