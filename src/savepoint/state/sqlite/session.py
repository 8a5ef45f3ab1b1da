"""A leased session: one connection on a private copy-on-write volume, for as long as the lease lasts."""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import apsw

from savepoint.errors import UserError
from savepoint.state.errors import StateError
from savepoint.state.image import BaseImage
from savepoint.state.session import ExecResult, Quota, ResetProof, SessionStats, Snapshot
from savepoint.state.sqlite.connection import Connection
from savepoint.state.sqlite.digest import logical_digest, page_digest
from savepoint.state.sqlite.execute import Execution, Limits
from savepoint.state.sqlite.pack import Pack, pack, unpack
from savepoint.state.sqlite.pages import Image, PageStore, Volume
from savepoint.state.sqlite.split import split_statements
from savepoint.state.watchdog import Alarm, watchdog

if TYPE_CHECKING:
    from savepoint.state.sqlite.backend import SqliteBackend

_COPY_BLOCK = 1 << 20
# A reset's digest is computed anew from the pages of the image while there are at most so many bytes of them.
_REHASH_BYTES = 1 << 20


class _Lease:
    """What a session holds and must give back: its volume, its connection, its alarm. Outlives the session that leaked."""

    def __init__(self, volume: Volume, quota: Quota, columns: int) -> None:
        self.volume, self.quota, self.columns = volume, quota, columns
        self.alarm: Alarm | None = None
        self.connection: Connection | None = Connection(volume, quota, columns)

    def reopen(self, contents: Image | None) -> Connection:
        """The volume goes back to `contents`, and a fresh connection opens on it: the old one caches pages."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.volume.restore(contents)
        self.connection = Connection(self.volume, self.quota, self.columns)
        return self.connection

    def rewrite(self, packed: Pack, image: BaseImage) -> Connection:
        """The volume shows what was packed, and a fresh connection opens on it."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        packed.write(self.volume, image.whole())
        self.connection = Connection(self.volume, self.quota, self.columns)
        return self.connection

    def release(self) -> None:
        if self.alarm is not None:
            watchdog.disarm(self.alarm)
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.volume.close()


class Session:
    """A private database over an immutable image. One connection for its whole life, so TEMP objects, open transactions and pragmas persist.

        with backend.lease(image, owner="rollout-17") as session:
            session.execute("UPDATE Track SET rating = 5")
            snapshot = session.checkpoint("rated")
            session.execute("DROP TABLE Track")
            session.restore(snapshot)

    `execute` answers an agent's mistakes with an `ExecResult`; StateError is for the caller's own, and for a lease whose time is up.
    Usable from any thread, by one at a time. `restore` and `reset` open the connection anew: TEMP objects and open transactions end there.
    """

    def __init__(
        self, backend: SqliteBackend, image: BaseImage, *, owner: str, quota: Quota, ttl_s: float | None, seed: int, contents: Image | None = None
    ) -> None:
        self.image, self.owner, self.quota, self.ttl_s, self.seed = image, owner, quota, ttl_s, seed
        self.generation = 0
        self._backend, self._executions, self._ended = backend, 0, ""
        self._lock = threading.RLock()
        pages: PageStore = backend.pages
        volume = pages.volume(image.pages(), contents, -(-quota.delta_bytes // image.page_size), quota.temp_bytes)
        try:
            self._lease = _Lease(volume, quota, image.columns)
        except BaseException:
            volume.close()
            raise
        self._give_back = weakref.finalize(self, self._lease.release)
        self._give_back.atexit = False
        if ttl_s is not None:
            expire = weakref.WeakMethod(self._expire)
            self._lease.alarm = watchdog.arm(time.monotonic() + ttl_s, lambda: (method := expire()) and method())

    # ------------------------------------------------------------------ SQL

    def execute(self, sql: str, *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False) -> ExecResult:
        """Run a statement or a script, up to the first statement that fails. Never raises for what the SQL does.

        deadline_s: seconds for the whole call. max_rows, max_bytes: the result is cut there, and says so; later statements still run.
        readonly: every statement that could write, by DML, DDL or pragma, is "denied". ValueError for limits that are none.
        """
        limits = Limits(deadline_s, max_rows, max_bytes, readonly)
        with self._lock:
            connection = self._live()
            self._executions += 1
            return Execution(connection, self._lease.volume, self.quota, limits).run(sql)

    def statements(self, sql: str) -> list[str]:
        """The statements of a script, cut where SQLite cuts them."""
        return split_statements(sql)

    def interrupt(self) -> None:
        """Stop the call that another thread has under way; it answers "timeout". Nothing happens when there is none."""
        connection = self._lease.connection
        if connection is not None:
            connection.stop()

    @property
    def in_transaction(self) -> bool:
        with self._lock:
            return self._live().in_transaction

    def temporary(self) -> str | None:
        """What lives in the connection alone and would be lost with it: the first TEMP object or attached database, in words; else None."""
        with self._lock:
            return self._live().temporary()

    @property
    def creates_tables(self) -> bool:
        """Whether a CREATE TABLE was prepared on this connection."""
        return self._live().policy.creates_tables

    @property
    def closed(self) -> bool:
        return self._lease.connection is None

    # ------------------------------------------------------------------ state

    def checkpoint(self, label: str = "") -> Snapshot:
        """The contents now, in constant time. The connection goes on as it is. StateError inside a transaction: half of one is no state."""
        with self._lock:
            settings = self._settled("checkpoint").settings()
            stats = self._lease.volume.stats()
            return Snapshot(label, self.image.base_digest, stats.size, stats.delta_pages, settings, self._lease.volume.freeze())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of any session on the same imported file. StateError for one of another file."""
        if snapshot.base_digest != self.image.base_digest:
            raise StateError(f"snapshot {snapshot.label!r} is of base {snapshot.base_digest}, this session of base {self.image.base_digest}")
        with self._lock:
            self._live()
            self._lease.reopen(snapshot.contents).apply(snapshot.settings)
            self.generation += 1

    def fork(self, n: int = 1) -> list[Session]:
        """`n` independent sessions with the same contents, connection settings, quota and time to live.

        StateError inside a transaction, and while TEMP objects or attached databases exist: a fork would lose them without a word.
        """
        with self._lock:
            connection = self._settled("fork")
            lost = connection.temporary()
            if lost is not None:
                raise StateError(f"fork: the {lost} belongs to this connection and would be lost; drop it first")
            contents, settings = self._lease.volume.freeze(), connection.settings()
            forks: list[Session] = []
            try:
                for number in range(n):
                    forks.append(self._backend._open_fork(self, contents, f"{self.owner}/fork-{number}"))
                    forks[-1]._live().apply(settings)
            except BaseException:
                for fork in forks:
                    fork.close()
                raise
            return forks

    def reset(self) -> ResetProof:
        """Drop everything the session did, and prove it: no page differs from the image, its size and digest are the image's."""
        with self._lock:
            self._live()
            volume = self._lease.volume
            before = volume.stats().delta_pages
            self._lease.reopen(None)
            self.generation += 1
            after = volume.stats()
            digest_ok = self.image.unchanged() and self._proven_digest() == self.image.digest
            return ResetProof(self.image.digest, before, after.delta_pages, after.same_size, digest_ok, self.generation)

    def digest(self, level: Literal["page", "logical"] = "page") -> str:
        """ "page": of the file, the image's own while nothing differs; the same for equal files over one base. "logical": of definitions and rows;
        equal contents have equal digests, however they came to be. StateError inside a transaction."""
        if level not in ("page", "logical"):
            raise ValueError(f"level must be 'page' or 'logical', not {level!r}")
        with self._lock:
            self._settled("digest")
            if level == "logical":
                return self._logical_digest()
            stats = self._lease.volume.stats()
            return self.image.digest if stats.delta_pages == 0 and stats.same_size else self._page_digest(self._lease.volume.freeze())

    def delta(self) -> bytes:
        """The pages that differ from the imported file, ascending: of each its number from 0, a native int64, and its bytes."""
        with self._lock:
            self._settled("delta")
            return self._lease.volume.freeze().delta()

    def export(self, path: str | Path) -> None:
        """Write the contents as an ordinary database file. UserError when the file exists (nothing is overwritten) or cannot be written."""
        with self._lock:
            self._settled("export")
            contents = self._lease.volume.freeze()
        path = Path(path)
        try:
            with path.open("xb") as file:
                try:
                    self._write(file, contents)
                except BaseException:
                    path.unlink()
                    raise
        except FileExistsError:
            raise UserError(f"{path}: exists already; export writes a new file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None

    @property
    def version(self) -> tuple[Any, ...]:
        """Changes when the contents or the connection's settings do (and then only, but for a restore or a reset)."""
        with self._lock:
            connection = self._live()
            return self._lease.volume.stats().writes, tuple(connection.settings().items())

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._live()
            return self._lease.volume.stats().held_pages * self.image.page_size

    def unmovable(self) -> str | None:
        """What would be lost if the contents went on in another connection; None: nothing."""
        with self._lock:
            return "an open transaction" if self._live().in_transaction else self.temporary()

    def pack(self) -> bytes:
        """The contents and the connection's settings as bytes, for `unpack` of any session on the same imported file. StateError in a transaction."""
        with self._lock:
            connection = self._settled("pack")
            extras = {"settings": connection.settings(), "rowid": connection.raw.last_insert_rowid()}
            return pack(self._lease.volume.freeze(), self.image.page_size, self.image.base_digest, extras)

    def unpack(self, data: bytes) -> None:
        """Go on with the contents that `pack` gave, here or in another process. StateError, and nothing changed, for damaged or foreign ones."""
        with self._lock:
            self._live()
            found = unpack(data)
            found.check(self.image.base_digest)
            self._lease.rewrite(found, self.image)
            connection = self._live()
            connection.apply(found.extras["settings"])
            connection.raw.set_last_insert_rowid(found.extras["rowid"])
            self.generation += 1

    def stats(self) -> SessionStats:
        with self._lock:
            self._live()
            stats, page = self._lease.volume.stats(), self.image.page_size
            return SessionStats(stats.delta_pages, stats.delta_pages * page, stats.held_pages * page, stats.temp_bytes, stats.size, self._executions)

    def close(self) -> None:
        """Give the session back. Its snapshots and forks live on. Closing twice is nothing."""
        with self._lock:
            self._give_back()
            self._ended = self._ended or "is closed"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _live(self) -> Connection:
        connection = self._lease.connection
        if connection is None:
            raise StateError(f"the session of {self.owner!r} {self._ended or 'could not be opened again'}")
        return connection

    def _settled(self, what: str) -> Connection:
        connection = self._live()
        if connection.in_transaction:
            raise StateError(f"{what}: a transaction is open; COMMIT or ROLLBACK first")
        return connection

    def _expire(self) -> None:
        """Called by the watchdog when the time is up: ends the call under way, then the session. Called again until it can."""
        if self._lock.acquire(blocking=False):
            try:
                self._ended = f"ended: its lease of {self.ttl_s:g} s is over"
                self.close()
            finally:
                self._lock.release()
        else:
            self.interrupt()

    def _page_digest(self, contents: Image) -> str:
        return page_digest(self.image.base_digest, self.image.base_size, contents.size, contents.delta())

    def _proven_digest(self) -> str:
        """The digest of what is there after a reset: from the pages themselves, unless the image's own are many; those it shares, by identity."""
        stats = self._lease.volume.stats()
        if stats.delta_pages == 0 and stats.same_size and self.image.delta_bytes > _REHASH_BYTES:
            return self.image.digest
        return self._page_digest(self._lease.volume.freeze())

    def _logical_digest(self) -> str:
        """Through a connection of its own, which no setting and no TEMP object of the session reaches."""
        volume = self._backend.pages.volume(self._lease.volume.freeze(), None, 0, 1 << 40)
        try:
            volume.register(True)
            connection = apsw.Connection("database", vfs=volume.name, flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=0)
            try:
                return logical_digest(connection)
            finally:
                connection.close(True)
        finally:
            volume.close()

    def _write(self, file: BinaryIO, contents: Image) -> None:
        """Base first, then the pages that differ, then the size."""
        page, left = self.image.page_size, contents.size
        with self.image.path.open("rb") as base:
            while left > 0 and (block := base.read(min(_COPY_BLOCK, left))):
                file.write(block)
                left -= len(block)
        delta = contents.delta()
        for at in range(0, len(delta), 8 + page):
            (number,) = struct.unpack_from("=q", delta, at)
            file.seek(number * page)
            file.write(memoryview(delta)[at + 8 : at + 8 + page])
        file.truncate(contents.size)
        file.flush()
        os.fsync(file.fileno())
