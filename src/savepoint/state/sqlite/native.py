"""The page store in C (`cowvfs.c`), driven through ctypes and registered with apsw's copy of SQLite."""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from pathlib import Path
from typing import Any

import apsw

from savepoint.state.errors import StateError
from savepoint.state.sqlite.pages import VolumeStats

_HANDLE, _I64, _INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
_OUT = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "cow_source": (ctypes.c_char_p, []),
    "cow_base": (_INT, [ctypes.c_char_p, _INT, _OUT]),
    "cow_base_fd": (_INT, [_INT, _INT, _OUT]),
    "cow_image_free": (None, [_HANDLE]),
    "cow_image_size": (_I64, [_HANDLE]),
    "cow_image_differs": (_I64, [_HANDLE, _HANDLE]),
    "cow_image_delta": (_I64, [_HANDLE, _HANDLE, _HANDLE, _I64]),
    "cow_volume": (_INT, [_HANDLE, _HANDLE, ctypes.c_char_p, _I64, _I64, _I64, _OUT]),
    "cow_register": (_INT, [_HANDLE, _INT]),
    "cow_apply": (_INT, [_HANDLE, _HANDLE, _I64, _I64]),
    "cow_budget": (_INT, [_I64, _INT, _I64]),
    "cow_volume_free": (_INT, [_HANDLE]),
    "cow_freeze": (_INT, [_HANDLE, _OUT]),
    "cow_restore": (_INT, [_HANDLE, _HANDLE]),
    "cow_begin": (None, [_HANDLE]),
    "cow_stats": (None, [_HANDLE, ctypes.POINTER(_I64)]),
    "cow_live": (_I64, [_INT]),
}


def _declare(library: Any) -> Any:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _check(code: int, what: str) -> None:
    if code < 0:
        raise StateError(f"{what}: {os.strerror(-code)}")


class NativeImage:
    __slots__ = ("__weakref__", "_free", "handle", "library", "slow")

    def __init__(self, store: NativeStore, handle: int) -> None:
        self.handle, self.library, self.slow = handle, store.quick, store.slow
        self._free = weakref.finalize(self, store.slow.cow_image_free, handle)
        self._free.atexit = False

    @property
    def size(self) -> int:
        return int(self.library.cow_image_size(self.handle))

    def differs(self, other: NativeImage) -> int:
        return int(self.library.cow_image_differs(self.handle, other.handle))

    def delta(self, since: NativeImage | None = None) -> bytes:
        earlier = since.handle if since is not None else None
        needed = self.slow.cow_image_delta(self.handle, earlier, None, 0)
        buffer = ctypes.create_string_buffer(max(1, needed))
        self.slow.cow_image_delta(self.handle, earlier, buffer, needed)
        return buffer.raw[:needed]


class NativeVolume:
    __slots__ = ("__weakref__", "_numbers", "handle", "library", "name", "quick", "slow", "store")

    def __init__(self, store: NativeStore, handle: int, name: str) -> None:
        self.store, self.handle, self.name = store, handle, name
        self.library = self.quick = store.quick
        self.slow = store.slow
        self._numbers = (_I64 * 7)()

    def freeze(self) -> NativeImage:
        out = ctypes.c_void_p()
        _check(self.library.cow_freeze(self.handle, ctypes.byref(out)), "freeze")
        return NativeImage(self.store, out.value or 0)

    def restore(self, image: NativeImage | None) -> None:
        _check(self.slow.cow_restore(self.handle, image.handle if image else None), "restore")

    def register(self, on: bool) -> None:
        _check(self.quick.cow_register(self.handle, on), "register")

    def apply(self, pages: memoryview, size: int) -> None:
        data = bytes(pages)
        _check(self.slow.cow_apply(self.handle, data, len(data), size), "applying a delta")

    def begin(self) -> None:
        self.library.cow_begin(self.handle)

    def stats(self) -> VolumeStats:
        numbers = self._numbers
        self.library.cow_stats(self.handle, numbers)
        size, delta, held, temp, refused, same, writes = numbers
        return VolumeStats(size, delta, held, temp, refused, bool(same), writes)

    def close(self) -> None:
        if self.handle:
            _check(self.slow.cow_volume_free(self.handle), "close")
            self.handle = 0


class NativeStore:
    """Loads the library at `path`. Raises OSError or `apsw.Error` when it cannot be loaded, `StateError` when it is another version."""

    kind = "c"

    def __init__(self, path: Path, source: str) -> None:
        # apsw's SQLite is linked into apsw itself; an extension reaches exactly the library that loads it.
        boot = apsw.Connection(":memory:")
        try:
            boot.enable_load_extension(True)
            boot.load_extension(str(path), "sqlite3_cowvfs_init")
        finally:
            boot.close()
        self.quick = _declare(ctypes.PyDLL(str(path)))  # a microsecond each: cheaper than giving the interpreter lock away
        self.slow = _declare(ctypes.CDLL(str(path)))  # may take long: gives the interpreter lock away
        if self.quick.cow_source().decode() != source:
            raise StateError(f"{path}: built from another version of cowvfs.c")

    def open_base(self, source: str | int, page_size: int) -> NativeImage:
        out = ctypes.c_void_p()
        if isinstance(source, int):
            _check(self.slow.cow_base_fd(source, page_size, ctypes.byref(out)), "an imported file")
        else:
            _check(self.slow.cow_base(os.fsencode(source), page_size, ctypes.byref(out)), source)
        return NativeImage(self, out.value or 0)

    def volume(self, origin: NativeImage, contents: NativeImage | None, max_pages: int, max_temp: int, clock_ms: int = 0) -> NativeVolume:
        name, out = "savepoint-" + secrets.token_hex(16), ctypes.c_void_p()
        start = contents.handle if contents else None
        _check(self.quick.cow_volume(origin.handle, start, name.encode(), max_pages, max_temp, clock_ms, ctypes.byref(out)), "lease")
        return NativeVolume(self, out.value or 0, name)

    def budget(self, memory_bytes: int, spill: int, spill_bytes: int) -> None:
        _check(self.quick.cow_budget(memory_bytes, spill, spill_bytes), "setting a budget of memory")

    def usage(self) -> tuple[int, int]:
        return int(self.quick.cow_live(5)), int(self.quick.cow_live(6))

    def live(self) -> dict[str, int]:
        return {what: int(self.quick.cow_live(i)) for i, what in enumerate(("pages", "volumes", "images", "bases"))}
