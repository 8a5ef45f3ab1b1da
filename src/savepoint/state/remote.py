"""A session whose SQL runs in a worker process: the same methods as `Session`, for threads here and for coroutines in `aio`.

What may be lost with a process is kept small: after each call that changed the database its delta is shipped to the trainer, and a session
whose worker dies goes on in another from there. What no delta can carry (an open transaction, a TEMP object) is lost with the process, and
then the answer is "infra": ours, never the agent's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from savepoint.state.client import WorkerDied
from savepoint.state.errors import Lost, StaleLease, StateError
from savepoint.state.history import Call
from savepoint.state.placed import Placed, RemoteSnapshot, Shipped
from savepoint.state.records import Node
from savepoint.state.session import ExecResult, ExecStatus, Quota, ResetProof, SessionStats, Snapshot
from savepoint.state.sqlite.diff import TableDiff
from savepoint.state.sqlite.execute import Limits
from savepoint.state.sqlite.export import write_database
from savepoint.state.sqlite.pack import unpack
from savepoint.state.sqlite.split import split_statements
from savepoint.state.steps import Steps, finish

# Beyond its deadline, how long a call may take before its process is killed: SQLite stops by itself within milliseconds unless one
# instruction of it runs for long, and on a crowded machine the process has to get its turn first.
GRACE_S = 3.0


class RemoteSession(Placed):
    """A leased session in a worker process; see `Session` for what its methods do. Any thread may call, one call runs at a time.

    StaleLease when the lease has ended or another handle has taken it over (`hand_over`). StateError for what the caller may not do, and where
    a worker died with what it alone held.
    """

    # ------------------------------------------------------------------ SQL

    def execute(self, sql: str, *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False) -> ExecResult:
        return finish(self.execute_steps(sql, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly))

    def execute_steps(
        self, sql: str, *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False
    ) -> Steps[ExecResult]:
        """`execute` as steps. Never fails for what the SQL does, nor for what happens to the process meanwhile."""
        Limits(deadline_s, max_rows, max_bytes, readonly)
        result: ExecResult = yield from self._execute(sql, deadline_s, max_rows, max_bytes, readonly)
        self._history.add(sql, result)
        return result

    def _execute(self, sql: str, deadline_s: float, max_rows: int, max_bytes: int, readonly: bool) -> Steps[ExecResult]:
        arguments = (sql, deadline_s, max_rows, max_bytes, readonly)
        deaths = 0
        with (yield from self._my_turn()):
            while True:
                try:
                    answer, rows = yield from self._ask("execute", *arguments, kill_after_s=deadline_s + GRACE_S, alone=deaths > 0)
                    return self._executed(answer, rows)
                except WorkerDied as death:
                    deaths += death.sent
                    if death.overran:
                        return self._killed("timeout", f"deadline_s={deadline_s:g}", "nothing could interrupt the statement, so its process was killed")
                    if deaths > 1 and death.alone:
                        return self._killed("sql_error", None, f"the statement ended its process twice ({death.reason})")
                    self._moved(death.reason)
                except StaleLease:
                    self._lease.check(self._token)  # says how it ended
                    raise
                except StateError as error:
                    return ExecResult("infra", error=str(error))

    def execute_all(
        self, scripts: Sequence[str], *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False
    ) -> list[ExecResult]:
        return finish(self.execute_all_steps(scripts, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly))

    def execute_all_steps(
        self, scripts: Sequence[str], *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False
    ) -> Steps[list[ExecResult]]:
        """`execute_all` as steps: one message for all of them. If the process dies meanwhile, they run again one by one, to tell which was at fault; so they
        do from the start where that death would lose something."""
        Limits(deadline_s, max_rows, max_bytes, readonly)
        at_once = None
        if self._fragile is None:
            at_once = yield from self._execute_all(scripts, deadline_s, max_rows, max_bytes, readonly)
        results = at_once or []
        for sql in scripts if at_once is None else ():
            results.append((yield from self._execute(sql, deadline_s, max_rows, max_bytes, readonly)))
            if results[-1].status == "timeout":
                break
        for sql, result in zip(scripts, results, strict=False):
            self._history.add(sql, result)
        return results

    def _execute_all(self, scripts: Sequence[str], deadline_s: float, max_rows: int, max_bytes: int, readonly: bool) -> Steps[list[ExecResult] | None]:
        """All of them at once; None where that came to nothing, and nothing is left of it."""
        with (yield from self._my_turn()):
            try:
                kill_after_s = len(scripts) * deadline_s + GRACE_S
                answer, rows = yield from self._ask("execute_all", tuple(scripts), deadline_s, max_rows, max_bytes, readonly, kill_after_s=kill_after_s)
            except WorkerDied as death:
                self._moved(death.reason)
                return None
            except StaleLease:
                self._lease.check(self._token)
                raise
            except StateError:
                return None
            counted, trail = answer
            self._absorb(trail)
            taken = iter(rows)
            return [replace(result, rows=tuple(islice(taken, count))) for result, count in counted]

    def statements(self, sql: str) -> list[str]:
        """The statements of a script, cut where SQLite cuts them."""
        return split_statements(sql)

    @property
    def in_transaction(self) -> bool:
        """As of the last call."""
        return self._in_transaction

    @property
    def ttl_s(self) -> float | None:
        return self._lease.ttl_s

    @property
    def quota(self) -> Quota:
        return self.options["quota"]

    @property
    def closed(self) -> bool:
        return bool(self._lease.ended) or self._token != self._lease.token

    # ------------------------------------------------------------------ state

    def checkpoint(self, label: str = "", *, keep: bool = False, ttl_s: float | None = None) -> Snapshot:
        return finish(self.checkpoint_steps(label, keep=keep, ttl_s=ttl_s))

    def checkpoint_steps(self, label: str = "", *, keep: bool = False, ttl_s: float | None = None) -> Steps[Snapshot]:
        with (yield from self._my_turn()):
            number, forest = self._backend.number(), self._backend.forest
            above = forest.above(self._node)
            taken = yield from self._repeated("checkpoint", lambda: self._checkpoint(number, label, above))
            self._lease.check(self._token)
            base_digest, size, pages, settings, changed = taken
            shipped = self._shipped if self._fragile is None else None
            node = Node("snapshot", label, self.owner, pages, changed * self.image.page_size)
            kept = RemoteSnapshot(self._slot, self._epoch, number, shipped)
            snapshot = Snapshot(label, base_digest, size, pages, settings, kept, self.image, node)
            forest.add(self._node, snapshot, keep=keep, ttl_s=ttl_s)
            self._stands = self._changes
            return snapshot

    def _checkpoint(self, number: int, label: str, above: Snapshot | None) -> Steps[Any]:
        kept: RemoteSnapshot | None = above.contents if above is not None else None
        since = kept.number if kept is not None and kept.there and (kept.slot, kept.epoch) == (self._slot, self._epoch) else None
        return (yield from self._once("checkpoint", number, label, since))

    def restore(self, snapshot: Snapshot) -> None:
        finish(self.restore_steps(snapshot))

    def restore_steps(self, snapshot: Snapshot) -> Steps[None]:
        if snapshot.base_digest != self.image.base_digest:
            raise StateError(f"snapshot {snapshot.label!r} is of base {snapshot.base_digest}, this session of base {self.image.base_digest}")
        kept: RemoteSnapshot = snapshot.held()
        with (yield from self._my_turn()):
            target = self._backend.forest.place(snapshot, self.image)
            self._backend.forest.admits(self._node, target)
            lost, self._lost = self._lost, ""
            try:
                yield from self._repeated("restore", lambda: self._restore(snapshot.label, kept))
            except BaseException:
                if lost:  # else it would go on as its image, without a word
                    self._lost, self._epoch = lost, -1
                raise
            if kept.shipped is not None:
                self._shipped, self._fragile = kept.shipped, None
            self.generation += 1
            self._stand(target)

    def _restore(self, label: str, kept: RemoteSnapshot) -> Steps[None]:
        yield from self._opened()
        if (kept.slot, kept.epoch) == (self._slot, self._epoch):
            yield from self._once("restore", kept.number, kept.shipped is not None)
            return
        shipped = yield from self._shipped_of(label, kept)
        yield from self._once("adopt", shipped.parts)

    def fork(self, n: int = 1, *, label: str = "") -> list[RemoteSession]:
        return finish(self.fork_steps(n, label=label))

    def fork_steps(self, n: int = 1, *, label: str = "") -> Steps[list[RemoteSession]]:
        with (yield from self._my_turn()):
            backend, forks, changes = self._backend, list[RemoteSession](), self._changes
            point = backend.forest.fork_point(self._node, changed=self.changed)
            self._stands = changes
            try:
                for i in range(n):
                    name = f"{label}-{i}" if label and n > 1 else label
                    lease = yield from backend.admit_steps(f"{self.origin_owner}/{name or f'fork-{i}'}", self.ttl_s)
                    forks.append(backend.new_session(self._slot, lease, self.image, self.options, point, name, self.origin_owner))
                yield from self._repeated("fork", lambda: self._fork(forks))
            except BaseException:
                for fork in forks:
                    fork.close()
                raise
            finally:
                backend.forest.unpin(point)
            for fork in forks:
                fork._epoch = fork._asked[0] = self._epoch
                fork._shipped, fork._fragile = self._shipped, self._fragile
                self._backend.arm(fork)
            return forks

    def _with_snapshots(self, name: str, *arguments: Any) -> Steps[Any]:
        """A call some of whose arguments are snapshots: they are named by their numbers in this session's worker, and brought there first."""
        yield from self._opened()
        numbers: list[Any] = []
        for argument in arguments:
            numbers.append((yield from self._local(argument)) if isinstance(argument, Snapshot) else argument)
        return (yield from self._once(name, *numbers))

    def _local(self, snapshot: Snapshot) -> Steps[int]:
        if snapshot.base_digest != self.image.base_digest:
            raise StateError(f"snapshot {snapshot.label!r} is of base {snapshot.base_digest}, this session of base {self.image.base_digest}")
        kept: RemoteSnapshot = snapshot.held()
        if (kept.slot, kept.epoch) == (self._slot, self._epoch):
            return kept.number
        number = self._backend.number()
        shipped = yield from self._shipped_of(snapshot.label, kept)
        yield from self._once("adopt_snapshot", number, shipped.parts, snapshot.settings)
        return number

    def _shipped_of(self, label: str, kept: RemoteSnapshot) -> Steps[Shipped]:
        """A snapshot's contents as the trainer holds them, or gets them from the worker that does."""
        if kept.shipped is None:
            if kept.lost is not None:
                raise Lost(f"snapshot {label!r} was lost with the worker process that held it: {kept.slot.last_death}")
            kept.shipped = Shipped(part=(yield from kept.slot.ask("pack", kept.number)))
        return kept.shipped

    def _opened(self) -> Steps[None]:
        """Have it open before a call whose arguments depend on where that is."""
        if self._epoch != self._slot.epoch or not self._slot.alive:
            yield from self._once("session", "stats", ())

    def _fork(self, forks: list[RemoteSession]) -> Steps[None]:
        yield from self._opened()
        for fork in forks:
            fork._asked[0] = self._epoch
        yield from self._once("fork", tuple(fork._number for fork in forks))

    def reset(self) -> ResetProof:
        return finish(self.reset_steps())

    def reset_steps(self) -> Steps[ResetProof]:
        with (yield from self._my_turn()):
            if self._lost:  # nothing of it is left anywhere: it begins anew
                self._lost, self._epoch, self._shipped = "", -1, Shipped()
            proof: ResetProof = yield from self._service("reset")
            self._shipped, self._fragile = Shipped(), None
            self.generation += 1
            self._stand(self._backend.forest.root(self.image))
            return replace(proof, digest_ok=proof.digest_ok and self.image.unchanged(), generation=self.generation)

    def digest(self, level: Literal["page", "logical"] = "page") -> str:
        return finish(self.service_steps("digest", level))

    def temporary(self) -> str | None:
        return finish(self.service_steps("temporary"))

    def stats(self) -> SessionStats:
        return finish(self.stats_steps())

    def stats_steps(self) -> Steps[SessionStats]:
        """Every answer brings them along, so this asks the worker only before the first call."""
        with (yield from self._my_turn()):
            if self._stats is None or self._lost:
                yield from self._service("session", "stats", ())
            assert self._stats is not None
            return self._stats

    def park(self) -> None:
        finish(self.park_steps())

    def park_steps(self) -> Steps[None]:
        with (yield from self._my_turn()):
            yield from self._service("session", "park", ())
            assert self._stats is not None
            self._backend.book.charge(self._lease, self._stats.held_bytes, parked=True)

    @property
    def parked(self) -> bool:
        """As of the last call: whether a connection is kept for it anywhere."""
        return self._lease.parked or self._epoch < 0

    @property
    def history(self) -> tuple[Call, ...]:
        return self._history.calls()

    def delta(self, since: Snapshot | None = None) -> bytes:
        return finish(self.delta_steps(since))

    def delta_steps(self, since: Snapshot | None = None) -> Steps[bytes]:
        with (yield from self._my_turn()):
            return (yield from self._repeated("delta", lambda: self._with_snapshots("delta", since)))

    def diff(self, before: Snapshot | None = None, after: Snapshot | None = None, *, samples: int = 3) -> tuple[TableDiff, ...]:
        return finish(self.diff_steps(before, after, samples=samples))

    def diff_steps(self, before: Snapshot | None = None, after: Snapshot | None = None, *, samples: int = 3) -> Steps[tuple[TableDiff, ...]]:
        with (yield from self._my_turn()):
            return (yield from self._repeated("diff", lambda: self._with_snapshots("diff", before, after, samples)))

    def apply(self, *deltas: bytes) -> None:
        finish(self.apply_steps(*deltas))

    def apply_steps(self, *deltas: bytes) -> Steps[None]:
        for delta in deltas:
            unpack(delta).check(self.image.base_digest)
        with (yield from self._my_turn()):
            yield from self._service("apply", deltas)
            self.generation += 1
            self._backend.forest.move(self._node, self._backend.forest.root(self.image))

    def export(self, path: str | Path) -> None:
        whole = unpack(self.delta())
        write_database(Path(path), self.image, whole.size, bytes(whole.pages))

    def renew(self, ttl_s: float | None) -> None:
        """The lease ends `ttl_s` seconds from now (None: never)."""
        self._lease.check(self._token)
        self._backend.book.renew(self._lease, ttl_s)

    def hand_over(self, owner: str) -> RemoteSession:
        """The session under a new owner and a new handle. This handle is stale from now on: whatever it still has under way cannot reach the session."""
        return finish(self.hand_over_steps(owner))

    def hand_over_steps(self, owner: str) -> Steps[RemoteSession]:
        with (yield from self._my_turn()):
            self._lease.token += 1
            self._lease.owner = owner
            self._give_back.detach()
            heir = RemoteSession(self._backend, self._slot, self._lease, self.image, self.options, origin_owner=self.origin_owner, heir_of=self)
            heir._give_back.detach()
            self._slot.count(-1)
            self._backend.forest.hand_over(self._node, heir, owner)
            heir._stands = self._stands
            heir._history, heir._stats = self._history, self._stats
            heir._epoch, heir._asked, heir._shipped = self._epoch, self._asked, self._shipped
            heir._fragile, heir._in_transaction, heir._lost, heir.generation = self._fragile, self._in_transaction, self._lost, self.generation
            heir._give_back = heir._abandoned_when_dropped()
            self._backend.arm(heir)
            return heir

    @property
    def changed(self) -> bool:
        """As of the last call."""
        return self._changes != self._stands

    @property
    def pages_now(self) -> int | None:
        """As of the last call."""
        return self._stats.delta_pages if self._stats is not None else 0

    @property
    def lost(self) -> str | None:
        """Why it cannot go on: what its dead worker alone held. None: it can."""
        return self._lost or None

    def expire(self, how: str) -> None:
        """End the lease now. how: completes "the session of 'x' ..."."""
        self._end(how, expired=True)

    def close(self) -> None:
        """Give the session back. Its snapshots and forks live on. Closing twice is nothing; closing a handle that was taken over is nothing too."""
        if self._token == self._lease.token:
            self._end("is closed")

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def service_steps(self, name: str, *arguments: Any) -> Steps[Any]:
        """A call of one of the session's own methods that runs no SQL of the agent, as steps."""
        with (yield from self._my_turn()):
            return (yield from self._service("session", name, arguments))

    # ------------------------------------------------------------------ inside

    def _end(self, how: str, *, expired: bool = False) -> None:
        self._give_back.detach()
        self._backend.forest.discard(self._node)
        if self._backend.book.end(self._lease, how, expired=expired):
            self._slot.count(-1)
            self._slot.tell(self._asked[0], "close", self._number)

    def _expire(self) -> None:
        self._end(f"ended: its lease of {self.ttl_s:g} s is over", expired=True)

    @property
    def _changes(self) -> int:
        return self._stats.changes if self._stats is not None else 0

    def _stand(self, node: Node) -> None:
        """It is the state of `node` from now on."""
        self._backend.forest.move(self._node, node)
        self._stands = self._changes

    def _executed(self, answer: Any, rows: list[Any]) -> ExecResult:
        result, trail = answer
        self._absorb(trail)
        return replace(result, rows=tuple(rows)) if rows else result

    def _killed(self, status: ExecStatus, quota: str | None, words: str) -> ExecResult:
        """The agent's own statement ended the process: it is undone, with the transaction it ran in, and the session goes on from before."""
        was_open, gone = self._in_transaction, self._fragile
        words += "; what it did is undone"
        if gone is not None and not self._unshipped:
            self._fragile = None
            words += f", and {gone} is gone"
        self._moved(words)
        return ExecResult(status, error=words, quota=quota, transaction_lost=was_open)
