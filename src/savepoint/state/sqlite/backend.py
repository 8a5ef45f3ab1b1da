"""The SQLite backend: imports bases, derives task images, leases sessions."""

from __future__ import annotations

import os
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import apsw

from savepoint.state.errors import SetupError, StateError
from savepoint.state.image import BaseImage, default_store, import_file, page_size_of, widest_table
from savepoint.state.session import Quota
from savepoint.state.sqlite import build, vfs
from savepoint.state.sqlite.session import Session
from savepoint.state.sqlite.split import split_statements

_KEPT = 512  # derived images kept for want of another owner: tasks of one step come again soon


class SqliteBackend:
    """Immutable images and leased sessions of one process. Close it, or use it as a context manager: every session is closed then.

    store: folder of the imported bases; None: `$SAVEPOINT_STORE`, else the user's cache.
    """

    def __init__(self, store: str | Path | None = None) -> None:
        self.store = Path(store) if store is not None else default_store()
        self.pages = vfs.page_store()
        self._images: weakref.WeakValueDictionary[tuple[str, tuple[str, ...]], BaseImage] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[tuple[str, tuple[str, ...]], BaseImage] = OrderedDict()
        self._sessions: set[Session] = set()

    def import_base(self, path: str | Path) -> BaseImage:
        """The image of a database file, copied into the store once, checked, and named by its content. UserError when it is no sound database."""
        file, digest = import_file(Path(path), self.store)
        image = self._images.get((digest, ()))
        if image is None:
            with file.open("rb") as opened:
                page = page_size_of(opened.read(18))
            image = BaseImage(digest, file, file.stat().st_size, page, columns=widest_table(file), contents=self.pages.open_base(str(file), page))
            self._images[digest, ()] = image
        return image

    def derive(self, base: BaseImage, setup: Sequence[str]) -> BaseImage:
        """`base` with set-up statements run on it, once: frozen, and kept by (base, set-up). SetupError for a statement that fails in any way."""
        key = (base.digest, tuple(setup))
        image = self._images.get(key)
        if image is None:
            image = self._images[key] = self._derive(base, tuple(setup))
        self._recent[key] = image
        self._recent.move_to_end(key)
        if len(self._recent) > _KEPT:
            self._recent.popitem(last=False)
        return image

    def _derive(self, base: BaseImage, setup: tuple[str, ...]) -> BaseImage:
        with Session(self, base, owner="derive", quota=Quota(delta_bytes=1 << 40, temp_bytes=1 << 40)) as session:
            for statement in (part for text in setup for part in split_statements(text)):
                result = session.execute(statement, deadline_s=60)
                if result.status != "ok":
                    raise SetupError(f"set-up statement {statement!r}: {result.error}")
            if session.in_transaction:
                raise SetupError("the set-up leaves a transaction open")
            digest, size, contents = session.digest(), session.stats().size, session.checkpoint("derived").contents
        return BaseImage(digest, base.path, size, base.page_size, (*base.setup, *setup), base.columns + 1, contents)

    def lease(self, image: BaseImage, *, owner: str, quota: Quota | None = None, ttl_s: float | None = None) -> Session:
        """A private session on an image, in constant time. After `ttl_s` seconds it is closed, and its next use is a StateError."""
        self.reap()
        return Session(self, image, owner=owner, quota=quota or Quota(), ttl_s=ttl_s)

    def reap(self) -> int:
        """Close the sessions whose time is up; how many."""
        late = [session for session in self._sessions if session.ttl_s is not None and session.expired]
        for session in late:
            session.close()
        return len(late)

    def keep(self, session: Session) -> None:
        """Called by a session when it opens: `close` will find it."""
        self._sessions.add(session)

    def forget(self, session: Session) -> None:
        """Called by a session when it closes."""
        self._sessions.discard(session)

    def close(self) -> None:
        """Close every session that is still open."""
        for session in list(self._sessions):
            session.close()

    def __enter__(self) -> SqliteBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_backend(kind: str = "sqlite", *, store: str | Path | None = None, workers: int = 0) -> SqliteBackend:
    """A backend of sessions on live databases. StateError for a kind that there is none of.

    store: where bases are kept. workers: 0, sessions run in this process.
    """
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
