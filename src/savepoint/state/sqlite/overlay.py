"""The page store in Python, on apsw's VFS classes: what `cowvfs.c` does, for machines that cannot compile it.

Slower (each page read takes the interpreter lock, a fork copies the table of changed pages) and otherwise the same: the tests run on both.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
from types import TracebackType
from typing import Any

import apsw

from savepoint.state.errors import StateError
from savepoint.state.sqlite.pages import HOST_FULL, PAGE_QUOTA, TEMP_QUOTA, VolumeStats

_DEVICE = apsw.SQLITE_IOCAP_ATOMIC | apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE | apsw.SQLITE_IOCAP_SAFE_APPEND | apsw.SQLITE_IOCAP_SEQUENTIAL
_JOURNALS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL
_alive = {"volumes": 0, "images": 0, "bases": 0, "pages": 0, "memory": 0, "budget": 0}


def _count(what: str, step: int) -> None:
    _alive[what] += step


def _fits(bytes_: int) -> bool:
    return not _alive["budget"] or _alive["memory"] + bytes_ <= _alive["budget"]


class _Account:
    """Who pays for a page: the volume that made it."""

    __slots__ = ("pages",)

    def __init__(self) -> None:
        self.pages = 0


class _Page:
    __slots__ = ("__weakref__", "data", "payer")

    def __init__(self, data: bytes, payer: _Account) -> None:
        self.data, self.payer = data, payer
        payer.pages += 1
        _count("pages", 1)
        _count("memory", len(data))

    def __del__(self) -> None:
        self.payer.pages -= 1
        _count("pages", -1)
        _count("memory", -len(self.data))


class _Base:
    __slots__ = ("__weakref__", "map", "page_size", "size")

    def __init__(self, source: str | int, page_size: int) -> None:
        descriptor = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.size, self.page_size = len(self.map), page_size
        _count("bases", 1)
        weakref.finalize(self, _count, "bases", -1).atexit = False

    def page(self, number: int, limit: int) -> bytes:
        """What the first `limit` bytes of the base show as page `number`."""
        start = number * self.page_size
        return self.map[start : min(start + self.page_size, limit)].ljust(self.page_size, b"\0")


class _Tree:
    """size: bytes of the file. limit: bytes of the base that still show (a truncated file never shows them again)."""

    __slots__ = ("base", "limit", "pages", "size")

    def __init__(self, base: _Base, size: int, limit: int, pages: dict[int, _Page]) -> None:
        self.base, self.size, self.limit, self.pages = base, size, limit, pages

    def copy(self) -> _Tree:
        return _Tree(self.base, self.size, self.limit, dict(self.pages))

    def page(self, number: int) -> bytes:
        own = self.pages.get(number)
        return own.data if own else self.base.page(number, self.limit)


class OverlayImage:
    __slots__ = ("__weakref__", "tree")

    def __init__(self, tree: _Tree) -> None:
        self.tree = tree
        _count("images", 1)
        weakref.finalize(self, _count, "images", -1).atexit = False

    @property
    def size(self) -> int:
        return self.tree.size

    def differs(self, other: OverlayImage) -> int:
        ours, theirs = self.tree.pages, other.tree.pages
        return sum(ours.get(n) is not theirs.get(n) for n in ours.keys() | theirs.keys())

    def delta(self, since: OverlayImage | None = None) -> bytes:
        if since is not None:
            return self._changed(since.tree)
        tree, base, parts = self.tree, self.tree.base, []
        count, hidden = -(-tree.size // base.page_size), tree.limit // base.page_size
        for number in sorted({n for n in tree.pages if n < hidden} | set(range(hidden, count))):
            data = tree.page(number)
            if number * base.page_size >= base.size or data != base.page(number, base.size):
                parts.append(struct.pack("=q", number) + data)
        return b"".join(parts)

    def _changed(self, since: _Tree) -> bytes:
        tree, size = self.tree, self.tree.base.page_size
        both = min(tree.limit, since.limit, since.size) // size  # below this, a bare page is the base's in both
        numbers = {n for n in tree.pages.keys() | since.pages.keys() if tree.pages.get(n) is not since.pages.get(n)}
        count = -(-tree.size // size)
        if (tree.size, tree.limit) != (since.size, since.limit):
            numbers |= {n for n in range(both, count) if tree.pages.get(n) is None or tree.pages.get(n) is not since.pages.get(n)}
        return b"".join(struct.pack("=q", number) + tree.page(number) for number in sorted(numbers) if number < count)


class _MainFile:
    """The session's database. Duck-typed: apsw calls the x-methods that are there."""

    def __init__(self, volume: OverlayVolume) -> None:
        self.volume = volume

    def xRead(self, amount: int, offset: int) -> bytes:
        tree, size = self.volume.tree, self.volume.tree.base.page_size
        end, parts = min(offset + amount, tree.size), []
        while offset < end:
            number, start = divmod(offset, size)
            part = tree.page(number)[start : start + end - offset]
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def xWrite(self, data: bytes, offset: int) -> None:
        tree, size, end = self.volume.tree, self.volume.tree.base.page_size, offset + len(data)
        data = bytes(data)
        while data:
            number, start = divmod(offset, size)
            part, data = data[: size - start], data[size - start :]
            whole = part if len(part) == size else tree.page(number)[:start] + part + tree.page(number)[start + len(part) :]
            self.volume.write_page(number, whole)
            offset += len(part)
        tree.size = max(tree.size, end)

    def xTruncate(self, size: int) -> None:
        tree = self.volume.tree
        first = -(-size // tree.base.page_size)
        self.volume.writes += size < tree.size
        for number in [n for n in tree.pages if n >= first]:
            del tree.pages[number]
        tree.size, tree.limit = size, min(tree.limit, size)

    def xFileSize(self) -> int:
        return self.volume.tree.size

    def xClose(self) -> None:
        self.volume.main_open = False

    def xSync(self, flags: int) -> None: ...
    def xLock(self, level: int) -> None: ...
    def xUnlock(self, level: int) -> None: ...
    def xCheckReservedLock(self) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 512  # the smallest journal header

    def xDeviceCharacteristics(self) -> int:
        return _DEVICE

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False


class _Memory(_MainFile):
    """A rollback journal or a temporary file, in memory, on the session's account."""

    def __init__(self, volume: OverlayVolume, journal: bool) -> None:
        super().__init__(volume)
        self.data, self.journal = bytearray(), journal

    def _replaying(self, now: bool) -> None:
        if self.journal:
            self.volume.replaying = now

    def xRead(self, amount: int, offset: int) -> bytes:
        self._replaying(True)  # SQLite reads a journal for no other reason
        return bytes(self.data[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        self._replaying(False)
        grow = offset + len(data) - len(self.data)
        if grow > 0:
            self.volume.take_temp(grow)
            self.data.extend(bytes(grow))
        self.data[offset : offset + len(data)] = data

    def xTruncate(self, size: int) -> None:
        self._replaying(False)
        self.volume.give_temp(max(0, len(self.data) - size))
        del self.data[size:]

    def xFileSize(self) -> int:
        return len(self.data)

    def xClose(self) -> None:
        self.xTruncate(0)


class _VolumeVFS(apsw.VFS):
    """One VFS per volume: it opens its own volume once, journals, and nameless temporary files; nothing else."""

    def __init__(self, name: str, volume: OverlayVolume) -> None:
        super().__init__(name, "")
        self._volume = weakref.ref(volume)  # the volume owns its VFS; an open file owns the volume

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        volume = self._volume()
        if volume is None:
            raise apsw.CantOpenError("the session is closed")
        if flags[0] & apsw.SQLITE_OPEN_MAIN_DB:
            if volume.main_open:
                raise apsw.CantOpenError("a session opens its own database, once")
            volume.main_open = True
            flags[1] = flags[0]
            return _MainFile(volume)
        journal = bool(flags[0] & _JOURNALS)
        if name is not None and not journal:
            raise apsw.CantOpenError("a session opens no file by name")
        flags[1] = flags[0]
        return _Memory(volume, journal)

    def xCurrentTimeInt64(self) -> int:
        volume = self._volume()
        return volume.clock_ms if volume is not None and volume.clock_ms else int(super().xCurrentTimeInt64())

    def xFullPathname(self, name: str) -> str:
        return name

    def xAccess(self, path: str, flags: int) -> bool:
        return False

    def xDelete(self, name: str, sync: bool) -> None: ...

    def excepthook(self, etype: type[BaseException] | None, evalue: BaseException | None, etraceback: TracebackType | None) -> bool:
        return True  # refusals are answers, not accidents: nothing to print


class OverlayVolume:
    def __init__(self, origin: OverlayImage, contents: OverlayImage | None, max_pages: int, max_temp: int, clock_ms: int) -> None:
        self.name = "savepoint-" + secrets.token_hex(16)
        self.origin, self.tree = origin, (contents or origin).tree.copy()
        self.account, self.max_pages, self.max_temp = _Account(), max_pages, max_temp
        self.temp, self.refused, self.replaying, self.main_open = 0, 0, False, False
        self.clock_ms, self.writes = clock_ms, 0
        self._vfs: _VolumeVFS | None = None
        self._closed = False
        _count("volumes", 1)

    def register(self, on: bool) -> None:
        if on and self._vfs is None:
            self._vfs = _VolumeVFS(self.name, self)
        elif not on and self._vfs is not None:
            if self.main_open:
                raise StateError("register: the connection is open")
            self._vfs.unregister()
            self._vfs = None

    def take_temp(self, grow: int) -> None:
        if self.temp + grow > self.max_temp:
            self.refused |= TEMP_QUOTA
            raise apsw.FullError("temporary space")
        if not _fits(grow):
            self.refused |= HOST_FULL
            raise apsw.FullError("memory")
        self.temp += grow
        _count("memory", grow)

    def give_temp(self, bytes_: int) -> None:
        self.temp -= bytes_
        _count("memory", -bytes_)

    def write_page(self, number: int, data: bytes) -> None:
        """The order of the questions is the policy: unchanged, back to the image, back to the base, own."""
        tree, pages = self.tree, self.tree.pages
        if tree.page(number) == data:
            return
        self.writes += 1
        began = self.origin.tree.pages.get(number)
        if began and began.data == data:
            pages[number] = began
        elif number in pages and tree.base.page(number, tree.limit) == data:
            del pages[number]
        else:
            self._own(number, data)

    def _own(self, number: int, data: bytes) -> None:
        pages, full = self.tree.pages, self.account.pages >= self.max_pages
        before = pages.pop(number, None)
        kept = None if before is None else weakref.ref(before)
        del before  # frees the page, and its room, unless a snapshot keeps it
        still = None if kept is None else kept()
        if full and not self.replaying and (kept is None or still is not None):
            if still is not None:
                pages[number] = still
            self.refused |= PAGE_QUOTA
            raise apsw.FullError("delta")
        if not self.replaying and not _fits(len(data)):
            self.refused |= HOST_FULL
            if still is not None:
                pages[number] = still
            raise apsw.FullError("memory")
        pages[number] = _Page(data, self.account)

    def apply(self, pages: memoryview, size: int) -> None:
        page = self.tree.base.page_size
        if self.main_open:
            raise StateError("applying a delta: the connection is open")
        if len(pages) % (8 + page) or size < 0:
            raise StateError("applying a delta: it is malformed")
        file = _MainFile(self)
        try:
            for number, data in struct.iter_unpack(f"=q{page}s", pages):
                if not 0 <= number < -(-size // page):
                    raise StateError("applying a delta: it has a page beyond its end")
                file.xWrite(data, number * page)
        except apsw.FullError:
            raise StateError("applying a delta: no space left") from None
        file.xTruncate(size)

    def freeze(self) -> OverlayImage:
        return OverlayImage(self.tree.copy())

    def restore(self, image: OverlayImage | None) -> None:
        image = image or self.origin
        if self.main_open:
            raise StateError("restore: the connection is open")
        if image.tree.base is not self.tree.base:
            raise StateError("restore: an image of another base")
        self.tree = image.tree.copy()
        self.writes += 1

    def begin(self) -> None:
        self.refused, self.replaying = 0, False

    def stats(self) -> VolumeStats:
        ours, began = self.tree, self.origin.tree
        delta = sum(ours.pages.get(n) is not began.pages.get(n) for n in ours.pages.keys() | began.pages.keys())
        same = (ours.size, ours.limit) == (began.size, began.limit)
        return VolumeStats(ours.size, delta, self.account.pages, self.temp, self.refused, same, self.writes)

    def close(self) -> None:
        if not self._closed:
            if self.main_open:
                raise StateError("close: the connection is open")
            self.register(False)
            self._closed = True
            self.tree.pages.clear()
            _count("volumes", -1)


class OverlayStore:
    kind = "python"

    def open_base(self, source: str | int, page_size: int) -> OverlayImage:
        base = _Base(source, page_size)
        return OverlayImage(_Tree(base, base.size, base.size, {}))

    def volume(self, origin: OverlayImage, contents: OverlayImage | None, max_pages: int, max_temp: int, clock_ms: int = 0) -> OverlayVolume:
        return OverlayVolume(origin, contents, max_pages, max_temp, clock_ms)

    def budget(self, memory_bytes: int, spill: int, spill_bytes: int) -> None:
        """There is no spill file here: what goes beyond the memory is refused."""
        _alive["budget"] = memory_bytes

    def usage(self) -> tuple[int, int]:
        return _alive["memory"], 0

    def live(self) -> dict[str, int]:
        return {what: _alive[what] for what in ("pages", "volumes", "images", "bases")}
