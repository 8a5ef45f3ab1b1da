"""The SQLite backend: imports bases, derives task images, leases sessions."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from savepoint.state.errors import SetupError, StateError
from savepoint.state.forest import Forest
from savepoint.state.image import BaseImage, ImageCache, OpenFile, file_identity
from savepoint.state.leases import RESERVE_BYTES, BackendStats, Lease, LeaseBook
from savepoint.state.records import Node
from savepoint.state.session import Quota, Snapshot
from savepoint.state.sqlite import vfs
from savepoint.state.sqlite.clock import DEFAULT_CLOCK, clock_ms
from savepoint.state.sqlite.digest import page_digest
from savepoint.state.sqlite.pack import pack, unpack
from savepoint.state.sqlite.pages import Image
from savepoint.state.sqlite.session import Session
from savepoint.state.sqlite.split import split_statements
from savepoint.state.sqlite.store import Progress, Store, default_store
from savepoint.state.steps import Steps
from savepoint.state.tree import StateTree

SETUP_DEADLINE_S = 60.0
# Set-up comes with the task and may be large; the rules of what SQL may do hold for it as well.
_SETUP_QUOTA = Quota(delta_bytes=16 << 30, temp_bytes=16 << 30, length=64 << 20, sql_length=64 << 20, columns=2000)
_WIDEST = "SELECT max(n) FROM (SELECT count(*) AS n FROM main.sqlite_schema AS m JOIN pragma_table_xinfo(m.name) WHERE m.type = 'table' GROUP BY m.name)"


class SqliteBackend:
    """Immutable images and leased sessions of one process. Close it, or use it as a context manager. Usable from several threads."""

    def __init__(self, store: str | Path | None = None, *, budget_bytes: int | None = None, lease_wait_s: float = 60.0) -> None:
        """budget_bytes: of memory that leases may be charged for together (None: no bound). lease_wait_s: how long one waits for room."""
        self.store = Store(Path(store) if store is not None else default_store())
        self.pages = vfs.page_store()
        self.book, self.lease_wait_s = LeaseBook(budget_bytes), lease_wait_s
        self.forest = Forest(hold=self.book.hold)
        self._images = ImageCache()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False

    def import_base(self, path: str | Path, *, progress: Progress | None = None) -> BaseImage:
        """Copy a database into the store, once, and open it. UserError, one line that names the file, for what is no usable database.

        The source and its neighbours are only read; a `-wal` beside it is folded into the copy. On the way, progress(what is being done,
        the share of it that is done) is called.
        """
        file, digest = self.store.add(Path(path), progress)
        self._live()
        return self._images.get((digest, ()), lambda: self._open(file, digest))

    def derive(self, base: BaseImage, setup: Sequence[str]) -> BaseImage:
        """`base` with set-up statements run on it, once, strictly: SetupError names the first that fails. The same set-up: the same image."""
        self._live()
        return self._images.get((base.digest, tuple(setup)), lambda: self._derive(base, tuple(setup)), keep=True)

    def lease(
        self, image: BaseImage | Snapshot, *, owner: str, quota: Quota | None = None, ttl_s: float | None = 3600.0, seed: int = 0,
        clock: str = DEFAULT_CLOCK, wait_s: float | None = None,
    ) -> Session:  # fmt: skip
        """A private session on an image, or on a snapshot, in constant time. It ends after `ttl_s` seconds (None: never), whoever holds it; `owner` is
        named then.

        seed: of random() and randomblob(). clock: what 'now' is, as ISO time, or "real". wait_s: seconds to wait for room in the memory budget
        (None: the backend's). StateError when the image was released or its file in the store touched; NoRoom; ValueError for times that are none.
        """
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: must be positive, or None")
        self._live()
        options: dict[str, Any] = {"quota": quota or Quota(), "seed": seed, "clock_ms": clock_ms(clock)}
        start = image
        if isinstance(start, Snapshot):
            options |= {"contents": start.held(), "settings": start.settings, "parent": self.forest.place(start, start.image)}
            start = start.image
        start.pages()
        lease = self.book.admit(owner, ttl_s, RESERVE_BYTES, self.lease_wait_s if wait_s is None else wait_s).result()
        return self._session(start, lease, **options)

    def tree(self, root: BaseImage | Snapshot) -> StateTree:
        """The states under an image or a snapshot of it: sessions, snapshots, and where they come from."""
        self._live()
        return StateTree(self.forest, root, self._digests)

    def release(self, image: BaseImage) -> None:
        """Give an image's pages back now. Sessions on it go on; no new one can be leased."""
        self._images.drop(image)
        image.release()

    def stats(self) -> BackendStats:
        return BackendStats(self.book.stats(), ())

    def manifest(self) -> dict[str, Any]:
        """What a run's manifest says of its state backend."""
        return {"backend": "sqlite", "workers": 0, "threads": 0, "sandbox_level": "none", "sandbox": "the SQL runs in the trainer's own process"}

    def close(self) -> None:
        """Close every session and drop every image."""
        self._closed = True
        self.book.close()
        self._images.clear()
        for session in list(self._sessions):
            session.close()
        self.forest.close()

    def __enter__(self) -> SqliteBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open_descriptor(self, descriptor: int, digest: str, file: Path) -> BaseImage:
        """An imported file that another process has opened for this one, which may not open files. The descriptor is the image's from now on."""
        return self._describe(descriptor, digest, file, OpenFile(descriptor))

    def pack_image(self, image: BaseImage) -> bytes:
        """A derived image as bytes, for `unpack_image` in another process."""
        return pack(image.pages(), image.page_size, image.base_digest, {})

    def unpack_image(self, base: BaseImage, setup: tuple[str, ...], digest: str, columns: int, data: bytes) -> BaseImage:
        """What `derive` made elsewhere. StateError when it is of another base, or damaged."""
        found = unpack(data)
        found.check(base.base_digest)
        volume = self.pages.volume(base.pages(), None, 1 << 40, 0)
        try:
            found.write(volume, base.whole())
            contents = volume.freeze()
        finally:
            volume.close()
        size, bytes_ = contents.size, len(found.pages)
        return replace(base, digest=digest, size=size, setup=setup, columns=columns, delta_bytes=bytes_, contents=contents, base=base.whole())

    # ------------------------------------------------------------------ inside

    def _live(self) -> None:
        if self._closed:
            raise StateError("the backend is closed")

    def open_fork(self, like: Session, contents: Image, settings: dict[str, str], parent: Node, owner: str, label: str) -> Session:
        """A session like another that begins with `contents`; `Session.fork` calls it."""
        self._live()
        lease = self.book.admit(owner, like.ttl_s, RESERVE_BYTES, self.lease_wait_s).result()
        options = {"quota": like.quota, "seed": like.seed, "clock_ms": like.clock_ms, "origin_owner": like.origin_owner}
        return self._session(like.image, lease, contents=contents, settings=settings, parent=parent, label=label, **options)

    def _session(self, image: BaseImage, lease: Lease, *, parent: Node | None = None, settings: dict[str, str] | None = None, **options: Any) -> Session:
        try:
            session = Session(self, image, lease, parent=parent or self.forest.root(image), **options)
        except BaseException:
            self.book.end(lease, "could not be opened")
            raise
        if settings:
            session.resume(settings)
        self._sessions.add(session)
        return session

    def _digests(self, snapshots: list[Snapshot]) -> Steps[list[str | None]]:
        yield from ()
        return [snapshot_digest(snapshot) for snapshot in snapshots]

    def _own(self, image: BaseImage, owner: str) -> Session:
        """A session for a purpose of ours, which no budget refuses."""
        lease = LeaseBook(None).admit(owner, None, 0, 0).result()
        parent = self.forest.root(image)
        return Session(self, image, lease, quota=_SETUP_QUOTA, seed=0, clock_ms=clock_ms(DEFAULT_CLOCK), parent=parent)

    def _open(self, file: Path, digest: str) -> BaseImage:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._describe(descriptor, digest, file, None)
        finally:
            os.close(descriptor)

    def _describe(self, descriptor: int, digest: str, file: Path, kept: OpenFile | None) -> BaseImage:
        size = int.from_bytes(os.pread(descriptor, 2, 16), "big")
        page_size = 65536 if size == 1 else size
        contents = self.pages.open_base(descriptor, page_size)
        identity = file_identity(descriptor)
        image = BaseImage(digest, file, contents.size, page_size, (), digest, 0, 0, contents, identity, kept)
        with self._own(image, "import") as session:
            columns = _widest_table(session)
        return replace(image, columns=columns)

    def _derive(self, base: BaseImage, setup: tuple[str, ...]) -> BaseImage:
        statements = [statement for text in setup for statement in split_statements(text)]
        with self._own(base, "derive") as session:
            for statement in statements:
                result = session.execute(statement, deadline_s=SETUP_DEADLINE_S)
                if result.status != "ok":
                    raise SetupError(f"set-up statement {_one_line(statement)!r}: {result.error}")
            if session.in_transaction:
                raise SetupError(f"set-up leaves a transaction open: {_one_line(statements[-1])!r}")
            temporary = session.temporary()
            if temporary:
                raise SetupError(f"set-up makes a {temporary}, which no image can hold")
            columns = _widest_table(session) if session.creates_tables else base.columns + len(statements)  # each adds one at most
            contents = session.freeze("set-up").contents
        delta = contents.delta()
        size = base.base_size
        digest = page_digest(base.base_digest, size, contents.size, delta)
        setup = (*base.setup, *setup)
        return replace(base, digest=digest, size=contents.size, setup=setup, columns=columns, delta_bytes=len(delta), contents=contents, base=base.whole())


def snapshot_digest(snapshot: Snapshot) -> str | None:
    """The page digest of a snapshot; None when it was pruned."""
    contents: Image | None = snapshot.contents
    return None if contents is None else page_digest(snapshot.base_digest, snapshot.image.base_size, contents.size, contents.delta())


def _widest_table(session: Session) -> int:
    """Columns of the widest table, or SQLite's maximum where a table cannot be looked at (an unknown virtual table)."""
    result = session.execute(_WIDEST, deadline_s=SETUP_DEADLINE_S)
    return int(result.rows[0][0] or 0) if result.status == "ok" else 2000


def _one_line(sql: str) -> str:
    text = " ".join(sql.split())
    return text if len(text) <= 200 else text[:200] + "..."
