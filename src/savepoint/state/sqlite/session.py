"""A leased session: a private copy-on-write volume and one connection on it, for as long as the lease lasts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from savepoint.state.errors import StateError
from savepoint.state.history import Call, History
from savepoint.state.image import BaseImage
from savepoint.state.leases import Lease
from savepoint.state.records import Node
from savepoint.state.session import ExecResult, Quota, ResetProof, SessionStats, Snapshot
from savepoint.state.sqlite.aside import aside
from savepoint.state.sqlite.connection import Connection
from savepoint.state.sqlite.diff import TableDiff, differences
from savepoint.state.sqlite.digest import logical_digest, page_digest
from savepoint.state.sqlite.execute import Execution, Limits
from savepoint.state.sqlite.export import write_database
from savepoint.state.sqlite.held import MOVING, Held
from savepoint.state.sqlite.pack import pack, unpack
from savepoint.state.sqlite.pages import Image, PageStore
from savepoint.state.sqlite.split import split_statements

if TYPE_CHECKING:
    from savepoint.state.sqlite.backend import SqliteBackend

# A reset's digest is computed anew from the pages of the image while there are at most so many bytes of them.
_REHASH_BYTES = 1 << 20


class Session:
    """A private database over an immutable image. One connection for its whole life, so TEMP objects, open transactions and pragmas persist.

        with backend.lease(image, owner="rollout-17") as session:
            session.execute("UPDATE Track SET rating = 5")
            snapshot = session.checkpoint("rated")
            session.execute("DROP TABLE Track")
            session.restore(snapshot)

    `execute` answers an agent's mistakes with an `ExecResult`; StateError is for the caller's own, StaleLease for a lease that has ended.
    Usable from any thread, by one at a time. `restore` and `reset` open the connection anew: TEMP objects and open transactions end there.
    """

    __slots__ = (
        "__weakref__", "_backend", "_began", "_executions", "_give_back", "_grant", "_history", "_lease", "_lock", "_node", "_stands", "_token",
        "clock_ms", "generation", "image", "origin_owner", "quota", "seed",
    )  # fmt: skip

    def __init__(
        self, backend: SqliteBackend, image: BaseImage, lease: Lease, *, quota: Quota, seed: int, clock_ms: int, contents: Image | None = None,
        parent: Node, label: str = "", origin_owner: str | None = None,
    ) -> None:  # fmt: skip
        """contents: what it begins with (None: the image). parent: their place in the tree. origin_owner: of the session at the start of a line of forks."""
        self.image, self.quota, self.seed, self.clock_ms = image, quota, seed, clock_ms
        self.generation = 0
        self.origin_owner = origin_owner or lease.owner
        self._backend, self._grant, self._token, self._executions = backend, lease, lease.token, 0
        self._history = History()
        self._lock = threading.RLock()
        pages: PageStore = backend.pages
        book, forest = backend.book, backend.forest
        node = self._node = forest.enter(parent, self, lease.owner, label)
        try:
            volume = pages.volume(image.pages(), contents, -(-quota.delta_bytes // image.page_size), quota.temp_bytes, clock_ms)
        except BaseException:
            forest.discard(node)
            raise

        def released() -> None:
            book.end(lease, "is closed")
            forest.discard(node)

        self._lease = Held(volume, quota, image.columns, seed, released)
        self._began = self._stands = volume.stats().writes  # changes at the start, and when it was the state that its node is under
        self._give_back = weakref.finalize(self, self._lease.release)
        expire = weakref.WeakMethod(self._expire)
        book.arm(lease, lambda: (method := expire()) and method())

    @property
    def owner(self) -> str:
        return self._grant.owner

    @property
    def ttl_s(self) -> float | None:
        return self._grant.ttl_s

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
            result = Execution(connection, self._lease.volume, self.quota, limits).run(sql)
            self._history.add(sql, result)
            return result

    def execute_all(
        self, scripts: Sequence[str], *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False
    ) -> list[ExecResult]:
        """`execute` for one script after another, each with limits of its own, in one call: results in order. A failure does not end the list, a
        time-out does: it may be the last of fewer results than scripts."""
        results: list[ExecResult] = []
        for sql in scripts:
            results.append(self.execute(sql, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly))
            if results[-1].status == "timeout":
                break
        return results

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
            self._check()
            return self._lease.connection is not None and self._lease.connection.in_transaction

    def temporary(self) -> str | None:
        """What lives in the connection alone and would be lost with it: the first TEMP object or attached database, in words; else None."""
        with self._lock:
            self._check()
            return self._lease.connection.temporary() if self._lease.connection is not None else None

    @property
    def creates_tables(self) -> bool:
        """Whether a CREATE TABLE was prepared on this connection."""
        return self._live().policy.creates_tables

    @property
    def history(self) -> tuple[Call, ...]:
        """The last calls of `execute` (256 of them), with what each cost."""
        return self._history.calls()

    @property
    def closed(self) -> bool:
        return self._lease.over or self._token != self._grant.token

    # ------------------------------------------------------------------ state

    def checkpoint(self, label: str = "", *, keep: bool = False, ttl_s: float | None = None) -> Snapshot:
        """The contents now, as a node of the tree. The connection goes on as it is. StateError inside a transaction: half of one is no state.

        keep: the tree holds the snapshot though nobody else does, until it is pruned, or for `ttl_s` seconds; otherwise it lives as long as somebody
        holds it. NoRoom when a limit of its subtree has no room for it. Constant time, and that of the pages changed since the last checkpoint.
        """
        with self._lock:
            snapshot, forest = self.freeze(label), self._backend.forest
            above = forest.above(self._node)
            pages = snapshot.pages if above is None else snapshot.contents.differs(above.held())
            node = Node("snapshot", label, self.owner, snapshot.pages, pages * self.image.page_size)
            snapshot = replace(snapshot, node=node)
            forest.add(self._node, snapshot, keep=keep, ttl_s=ttl_s)
            self._stands = self._lease.volume.stats().writes
            return snapshot

    def freeze(self, label: str = "") -> Snapshot:
        """As `checkpoint`, but in no tree."""
        with self._lock:
            self._settled("checkpoint")
            stats, contents = self._lease.volume.stats(), self._lease.volume.freeze()
            return Snapshot(label, self.image.base_digest, stats.size, stats.delta_pages, self._lease.current(), contents, self.image)

    def origin(self) -> Snapshot:
        """The state of the image: what a reset goes back to."""
        return Snapshot("", self.image.base_digest, self.image.size, 0, {}, self.image.pages())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of any session on the same imported file. StateError for one of another file, or pruned."""
        if snapshot.base_digest != self.image.base_digest:
            raise StateError(f"snapshot {snapshot.label!r} is of base {snapshot.base_digest}, this session of base {self.image.base_digest}")
        contents, forest = snapshot.held(), self._backend.forest
        target = forest.place(snapshot, self.image)
        with self._lock:
            self._check()
            forest.admits(self._node, target)
            self._lease.show(contents, snapshot.settings)
            self.generation += 1
            self._stand(target)

    def fork(self, n: int = 1, *, label: str = "") -> list[Session]:
        """`n` independent sessions with the same contents, connection settings, quota, clock, random numbers to come, and time to live.

        label: of theirs in the tree; of several, with a number behind it. StateError inside a transaction, and while TEMP objects or attached databases
        exist: a fork would lose them without a word. NoRoom, and then none is left open, when the memory budget or a limit of the subtree has no room.
        """
        with self._lock:
            self._movable("fork")
            contents, settings = self._lease.volume.freeze(), self._lease.current()
            forest, writes = self._backend.forest, self._lease.volume.stats().writes
            point = forest.fork_point(self._node, changed=writes != self._stands)
            self._stands = writes
            forks: list[Session] = []
            try:
                for number in range(n):
                    name = f"{label}-{number}" if label and n > 1 else label
                    forks.append(self._backend.open_fork(self, contents, settings, point, f"{self.origin_owner}/{name or f'fork-{number}'}", name))
            except BaseException:
                for fork in forks:
                    fork.close()
                raise
            finally:
                forest.unpin(point)
            return forks

    def resume(self, settings: dict[str, str]) -> None:
        """Its connection, which is not open yet, begins with the settings of a snapshot."""
        self._lease.resume(settings)

    def reset(self) -> ResetProof:
        """Drop everything the session did, and prove it: no page differs from the image, its size and digest are the image's."""
        with self._lock:
            self._check()
            volume = self._lease.volume
            before = volume.stats().delta_pages
            self._lease.show(None, {})
            self.generation += 1
            self._stand(self._backend.forest.root(self.image))
            after = volume.stats()
            digest_ok = self.image.unchanged() and self._proven_digest() == self.image.digest
            return ResetProof(self.image.digest, before, after.delta_pages, after.same_size, digest_ok, self.generation)

    def park(self) -> None:
        """Close the connection and keep the contents: a parked session is its changed pages and little more. The next call opens it again.

        StateError inside a transaction, and while TEMP objects or attached databases exist.
        """
        with self._lock:
            self._movable("park")
            self._lease.park()
            self._backend.book.charge(self._grant, self.held_bytes, parked=True)

    @property
    def parked(self) -> bool:
        return self._lease.connection is None

    def digest(self, level: Literal["page", "logical"] = "page") -> str:
        """ "page": of the file, the image's own while nothing differs; the same for equal files over one base. "logical": of definitions and rows;
        equal contents have equal digests, however they came to be. StateError inside a transaction."""
        if level not in ("page", "logical"):
            raise ValueError(f"level must be 'page' or 'logical', not {level!r}")
        with self._lock:
            self._settled("digest")
            if level == "logical":
                with aside(self._backend.pages, self._lease.volume.freeze()) as connection:
                    return logical_digest(connection)
            stats = self._lease.volume.stats()
            return self.image.digest if stats.delta_pages == 0 and stats.same_size else self._page_digest(self._lease.volume.freeze())

    def diff(self, before: Snapshot | None = None, after: Snapshot | None = None, *, samples: int = 3) -> tuple[TableDiff, ...]:
        """Rows added, removed and changed in each table that differs. before: None is the image. after: None is now.

        samples: rows shown of each kind, at most. Rows are told by primary key or rowid; a table whose definition changed is compared as a whole.
        """
        with self._lock:
            self._settled("diff")
            first = before.held() if before is not None else self.image.pages()
            second = after.held() if after is not None else self._lease.volume.freeze()
        with aside(self._backend.pages, first) as earlier, aside(self._backend.pages, second) as later:
            return differences(earlier, later, samples)

    def delta(self, since: Snapshot | None = None) -> bytes:
        """The contents and the connection's settings as bytes, for `apply` of any session on the same imported file, here or in another process.

        since: only what changed after that snapshot. StateError inside a transaction.
        """
        with self._lock:
            self._settled("delta")
            earlier = since.held() if since is not None else None
            return pack(self._lease.volume.freeze(), self.image.page_size, self.image.base_digest, self._lease.current(), earlier)

    def apply(self, *deltas: bytes) -> None:
        """Go on with the contents that `delta` gave: a whole one, then what changed since it, in order. TEMP objects and open transactions end.

        StateError for a delta that is damaged or of another base (nothing has changed then), or beyond the quota (the session is as its image then).
        """
        found = [unpack(delta) for delta in deltas]
        for one in found:
            one.check(self.image.base_digest)
        with self._lock:
            self._check()
            if found:
                self._lease.rewrite(found, self.image.whole())
                self.generation += 1
                self._backend.forest.move(self._node, self._backend.forest.root(self.image))

    def export(self, path: str | Path) -> None:
        """Write the contents as an ordinary database file. UserError when the file exists (nothing is overwritten) or cannot be written."""
        with self._lock:
            self._settled("export")
            contents = self._lease.volume.freeze()
        write_database(Path(path), self.image, contents.size, contents.delta())

    def stats(self) -> SessionStats:
        with self._lock:
            self._check()
            stats, page = self._lease.volume.stats(), self.image.page_size
            return SessionStats(
                stats.delta_pages, stats.delta_pages * page, stats.held_pages * page, stats.temp_bytes, stats.size, self._executions,
                stats.writes - self._began,
            )  # fmt: skip

    @property
    def changed(self) -> bool:
        """Whether anything was written since it was the state that it stands on in the tree (a checkpoint, a restore, a fork, a reset)."""
        with self._lock:
            self._check()
            return self._lease.volume.stats().writes != self._stands

    @property
    def pages_now(self) -> int | None:
        """Pages in which it differs from its image; None while a call is under way, and when it has ended. Waits for nothing."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return None if self._lease.over else self._lease.volume.stats().delta_pages
        finally:
            self._lock.release()

    @property
    def lost(self) -> str | None:
        """Why it cannot go on: never, in this process."""
        return None

    @property
    def held_bytes(self) -> int:
        return self._lease.volume.stats().held_pages * self.image.page_size

    @property
    def version(self) -> tuple[Any, ...]:
        """Changes when the contents, the connection's settings or its random numbers to come do: pages written, commits, settings."""
        with self._lock:
            self._check()
            return self._lease.volume.stats().writes, self._lease.commits, self._lease.current()

    def committed_since(self, version: tuple[Any, ...]) -> bool:
        """Whether anything was committed or set since that version. What a transaction under way does is not: its pages may be written before their time,
        and row ids and random numbers move on with its statements."""
        now = self.version
        if not self.in_transaction:
            return now != version
        before, after = ({name: value for name, value in settings.items() if name not in MOVING} for settings in (version[2], now[2]))
        return (version[1], before) != (now[1], after)

    def unmovable(self) -> str | None:
        """What would be lost if the contents went on in another connection; None: nothing."""
        with self._lock:
            return "an open transaction" if self.in_transaction else self.temporary()

    # ------------------------------------------------------------------ lease

    def renew(self, ttl_s: float | None) -> None:
        """The lease ends `ttl_s` seconds from now (None: never)."""
        self._check()
        self._backend.book.renew(self._grant, ttl_s)

    def expire(self, how: str) -> None:
        """End the lease now, or as soon as the call under way has been stopped. how: completes "the session of 'x' ..."."""
        self._grant.how = how
        self._expire()
        if not self._grant.ended:
            self._backend.book.renew(self._grant, 0.0)

    def close(self) -> None:
        """Give the session back. Its snapshots and forks live on. Closing twice is nothing."""
        with self._lock:
            self._give_back()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _check(self) -> None:
        self._grant.check(self._token)
        if self._lease.over:
            raise StateError(f"the session of {self.owner!r} is closed")

    def _live(self) -> Connection:
        self._check()
        if self._lease.connection is None:
            self._lease.open()
            self._backend.book.charge(self._grant, self.held_bytes, parked=False)
        return self._lease.connection  # type: ignore[return-value]

    def _settled(self, what: str) -> None:
        if self.in_transaction:
            raise StateError(f"{what}: a transaction is open; COMMIT or ROLLBACK first")

    def _movable(self, what: str) -> None:
        self._settled(what)
        lost = self.temporary()
        if lost is not None:
            raise StateError(f"{what}: the {lost} belongs to this connection and would be lost; drop it first")

    def _expire(self) -> None:
        """Called by the watchdog when the time is up: ends the call under way, then the session. Called again until it can."""
        if self._lock.acquire(blocking=False):
            try:
                self._backend.book.end(self._grant, self._grant.how or f"ended: its lease of {self.ttl_s:g} s is over", expired=True)
                self.close()
            finally:
                self._lock.release()
        else:
            self.interrupt()

    def _stand(self, node: Node) -> None:
        """It is the state of `node` from now on."""
        self._backend.forest.move(self._node, node)
        self._stands = self._lease.volume.stats().writes

    def _page_digest(self, contents: Image) -> str:
        return page_digest(self.image.base_digest, self.image.base_size, contents.size, contents.delta())

    def _proven_digest(self) -> str:
        """The digest of what is there after a reset: from the pages themselves, unless the image's own are many; those it shares, by identity."""
        stats = self._lease.volume.stats()
        if stats.delta_pages == 0 and stats.same_size and self.image.delta_bytes > _REHASH_BYTES:
            return self.image.digest
        return self._page_digest(self._lease.volume.freeze())
