"""Images: immutable contents of a database, named by what they contain."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from savepoint.state.errors import StateError


class OpenFile:
    """A descriptor that is closed when nothing refers to it."""

    __slots__ = ("__weakref__", "descriptor")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BaseImage:
    """Immutable contents of a database: an imported file, or one with a set-up applied (`setup` is not empty then).

    digest: names the content, base included. path: the imported file in the store. size: bytes of the database. page_size: bytes.
    setup: the statements that were run on the imported file. base_digest: of the imported file. columns: of its widest table.
    delta_bytes: what the set-up changed. file: the imported file, in a process that may not open it itself.
    Leases hold what they need of an image, so it may be dropped at any time.
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
    file: OpenFile | None = field(default=None, repr=False)
    base: Any = field(default=None, repr=False)

    def pages(self) -> Any:
        """The page store's handle. StateError when the image was released, or its file in the store was touched."""
        if self.contents is None:
            raise StateError(f"image {self.digest} was released")
        if not self.unchanged():
            raise StateError(f"{self.path}: the imported file was changed or removed; delete it and import again")
        return self.contents

    @property
    def source(self) -> Path | int:
        """The imported file, as `open` takes it."""
        return self.path if self.file is None else self.file.descriptor

    @property
    def base_size(self) -> int:
        """Bytes of the imported file."""
        return self.identity[2]

    def whole(self) -> Any:
        """The page store's handle of the imported file itself, without the set-up."""
        return self.pages() if self.base is None else self.base

    def unchanged(self) -> bool:
        """Whether the imported file is the very file that was opened: its place on the disk, size and time stamp."""
        try:
            return self.identity == file_identity(self.source)
        except OSError:
            return False

    def release(self) -> None:
        """Give the pages back now rather than when nothing refers to the image."""
        object.__setattr__(self, "contents", None)


Key = tuple[str, tuple[str, ...]]  # digest of the base, statements of the set-up
# Images lately derived are kept for the next lease of the same task, within both of these.
_KEPT_IMAGES, _KEPT_BYTES = 64, 64 << 20


class ImageCache:
    """The images of a backend: each made once while somebody holds it, and for some time longer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._images: weakref.WeakValueDictionary[Key, BaseImage] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Key, BaseImage] = OrderedDict()

    def get(self, key: Key, make: Callable[[], BaseImage], *, keep: bool = False) -> BaseImage:
        """The image of `key`, made if there is none. `keep`: hold it although nobody else does."""
        with self._lock:
            image = self._images.get(key)
            if image is None or image.contents is None:
                image = self._images[key] = make()
            if keep:
                self._keep(key, image)
            return image

    def drop(self, image: BaseImage) -> None:
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept is image]:
                del self._kept[key]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def _keep(self, key: Key, image: BaseImage) -> None:
        self._kept[key] = image
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT_IMAGES or (len(self._kept) > 1 and sum(kept.delta_bytes for kept in self._kept.values()) > _KEPT_BYTES):
            self._kept.popitem(last=False)


def file_identity(file: Path | int) -> tuple[int, ...]:
    """What tells a file from another one and from itself after a change; a path, or a descriptor."""
    status = os.fstat(file) if isinstance(file, int) else file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
