"""The SQLite backend: imports bases, derives task images, leases sessions."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import apsw

from savepoint.state.errors import SetupError, StateError
from savepoint.state.image import BaseImage, default_store, import_file
from savepoint.state.session import Quota
from savepoint.state.sqlite import build, vfs
from savepoint.state.sqlite.session import Session
from savepoint.state.sqlite.split import split_statements


class SqliteBackend:
    """Immutable images and leased sessions of one process. Close it, or use it as a context manager."""

    def __init__(self, store: str | Path | None = None) -> None:
        self.store = Path(store) if store is not None else default_store()
        self.pages = vfs.page_store()
        self._images: weakref.WeakValueDictionary[tuple[str, tuple[str, ...]], BaseImage] = weakref.WeakValueDictionary()
        self._recent: list[BaseImage] = []
        self._sessions: set[Session] = set()

    def import_base(self, path: str | Path) -> BaseImage:
        file, digest = import_file(Path(path), self.store)
        image = self._images.get((digest, ()))
        if image is None:
            with file.open("rb") as header:
                size = int.from_bytes(header.read(18)[16:18], "big")
            page = 65536 if size == 1 else size
            image = BaseImage(digest, file, file.stat().st_size, page, (), self.pages.open_base(str(file), page))
            self._images[digest, ()] = image
        return image

    def derive(self, base: BaseImage, setup: Sequence[str]) -> BaseImage:
        key = (base.digest, tuple(setup))
        image = self._images.get(key)
        if image is None:
            image = self._derive(base, tuple(setup))
            self._images[key] = image
        self._recent.append(image)
        del self._recent[:-512]
        return image

    def _derive(self, base: BaseImage, setup: tuple[str, ...]) -> BaseImage:
        with Session(self, base, owner="derive", quota=Quota(delta_bytes=1 << 34)) as session:
            for text in setup:
                for statement in split_statements(text):
                    result = session.execute(statement, deadline_s=60)
                    if result.status != "ok":
                        raise SetupError(f"set-up {statement!r}: {result.error}")
            if session.in_transaction:
                raise SetupError("set-up leaves a transaction open")
            stats = session.stats()
            snapshot = session.checkpoint("derived")
            digest = session.digest()
        return BaseImage(digest, base.path, stats.size, base.page_size, (*base.setup, *setup), snapshot.contents)

    def lease(self, image: BaseImage, *, owner: str, quota: Quota | None = None, ttl_s: float | None = None, seed: int = 0) -> Session:
        session = Session(self, image, owner=owner, quota=quota or Quota(), ttl_s=ttl_s)
        self._sessions.add(session)
        return session

    def forget(self, session: Session) -> None:
        self._sessions.discard(session)

    def close(self) -> None:
        for session in list(self._sessions):
            session.close()

    def __enter__(self) -> SqliteBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_backend(kind: str = "sqlite", *, store: str | Path | None = None, workers: int = 0) -> SqliteBackend:
    if kind != "sqlite":
        raise StateError(f"unknown backend {kind!r}: there is sqlite")
    if workers:
        raise StateError("workers: sessions are in-process for now; workers must be 0")
    return SqliteBackend(store)


def doctor(store: str | Path | None = None) -> list[tuple[str, bool, str]]:
    """(what, whether it works, detail) of everything that the state layer needs."""
    folder = Path(store) if store is not None else default_store()
    status, command, header = vfs.status(), build.compiler(), build.has_header()
    where = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(where).free
    return [
        ("apsw", True, f"{apsw.apsw_version()}, SQLite {apsw.sqlite_lib_version()}"),
        ("compiler", command is not None, " ".join(command) if command else "none on PATH (cc, gcc, clang or $CC)"),
        ("sqlite3ext.h", bool(header), "found" if header else "not found: install SQLite's headers (libsqlite3-dev)"),
        ("vfs", status["vfs"] is not None, f"{status['vfs'] or 'none'}: {status['why']}"),
        ("store", os.access(where, os.W_OK), f"{folder}, {free / 2**30:.1f} GiB free"),
    ]
