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
    refused a write since `begin()`. same_size: whether the file has the size of the image it began with. writes: changes so far; equal
    numbers mean equal contents."""

    size: int
    delta_pages: int
    held_pages: int
    temp_bytes: int
    refused: int
    same_size: bool
    writes: int


class Image(Protocol):
    """Immutable contents of a file. Freed when nothing refers to it."""

    @property
    def size(self) -> int: ...

    def differs(self, other: Image) -> int:
        """Pages in which it differs from an image of the same base, by identity."""

    def delta(self, since: Image | None = None) -> bytes:
        """Pages that differ from the base file, ascending, each as a native int64 number and its bytes. With `since`, an image of the same base:
        those that may differ from it."""


class Volume(Protocol):
    """One session's file. `name` is the SQLite VFS through which one connection at a time opens it."""

    @property
    def name(self) -> str: ...

    def freeze(self) -> Image:
        """The contents now, immutable. No transaction may be open on the connection."""

    def register(self, on: bool) -> None:
        """Let SQLite find the volume by its name, or no longer: it is found while a connection opens and lives, so parked volumes cost no look-up."""

    def apply(self, pages: memoryview, size: int) -> None:
        """Write pages, as `Image.delta` gives them, and make the file `size` bytes long. The connection must be closed. StateError when they do not
        fit; the volume then shows a part of them."""

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

    def volume(self, origin: Image, contents: Image | None, max_pages: int, max_temp: int, clock_ms: int = 0) -> Volume:
        """A volume that shows `contents` (None: `origin`) and whose reset goes back to `origin`. clock_ms: what 'now' is there, in milliseconds
        of the Julian day; 0: the real time."""

    def budget(self, memory_bytes: int, spill: int, spill_bytes: int) -> None:
        """Pages and temporary files of this process may take so many bytes of memory (0: no bound); pages beyond go to the file behind the
        descriptor `spill` (-1: none), up to `spill_bytes`."""

    def usage(self) -> tuple[int, int]:
        """Bytes of pages and temporary files in memory, and of the spill file."""

    def live(self) -> dict[str, int]:
        """How many pages, volumes, images and bases exist in this process: what a leak test looks at."""
