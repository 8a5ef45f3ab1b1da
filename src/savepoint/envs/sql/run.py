"""Running SQL for a grader: scripts on leased sessions, once, statement by statement, up to the first that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from savepoint.envs.sql.compare import Row
from savepoint.envs.sql.verdict import Outcome, Verdict
from savepoint.state import AnySession, Backend, BaseImage, ExecResult, Quota, Snapshot, split_statements

DEFAULT_NOW = "2025-01-01T00:00:00Z"
# Reading back what a run left behind is our own work, bounded by the image and the quota of the run.
_OWN_WORK_S = 120.0
_CHUNK_ROWS = 20_000
_CODE: dict[str, Outcome] = {
    "sql_error": "sql_error", "denied": "denied", "timeout": "timeout", "too_big": "too_big", "full": "too_big", "infra": "infra",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of one graded run. Nothing is cut before it is compared: over a cap, the outcome says so. deadline_s: for a whole script.

    test_memory_bytes: what a Python test may allocate.
    """

    deadline_s: float = 30.0
    max_rows: int = 200_000
    max_bytes: int = 64 << 20
    test_memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """What one script did. failure: of the first statement that failed. rows, columns, query: of the last statement that has result columns (rows: None
    without one); position: which statement that is. end: the committed contents; None after a failure, and where they are the image's and nobody asked
    for them. vm_steps, seconds: of all statements together.
    """

    statements: tuple[str, ...]
    failure: Verdict | None = None
    rows: tuple[Row, ...] | None = None
    columns: tuple[str, ...] = ()
    query: str = ""
    position: int = -1
    vm_steps: int = 0
    seconds: float = 0.0
    end: Snapshot | None = field(default=None, repr=False)


@dataclass(slots=True)
class Runner:
    """Leases sessions and runs scripts on them within the limits."""

    backend: Backend
    limits: Limits = field(default_factory=Limits)
    quota: Quota = field(default_factory=lambda: Quota(delta_bytes=256 << 20, length=16 << 20, sql_length=16 << 20, heap_bytes=256 << 20))

    def lease(self, image: BaseImage, owner: str, now: str, *, seed: int = 0) -> AnySession:
        """A session with a pinned clock; random() depends on the seed."""
        return self.backend.lease(image, owner=owner, quota=self.quota, seed=seed, clock=now)

    def run(self, session: AnySession, statements: Sequence[str], *, readonly: bool = False, keep: bool = False) -> Run:
        """Run a script (each string one or more statements) on a session. Afterwards what it did not commit is gone, and `end` is what it left.

        keep: have an `end` also where nothing was changed.
        """
        parts = tuple(part for text in statements for part in split_statements(text))
        started = time.monotonic()
        answer: tuple[int, ExecResult] | None = None
        failure, steps, seconds, changed = None, 0, 0.0, False
        for position, sql in enumerate(parts):
            left = self.limits.deadline_s - (time.monotonic() - started)
            result = session.execute(sql, deadline_s=max(left, 1e-3), max_rows=self.limits.max_rows, max_bytes=self.limits.max_bytes, readonly=readonly)
            steps += result.vm_steps
            seconds += result.wall_ms / 1000
            changed = result.in_transaction or result.delta_pages > 0
            failure = _failure(result, self.limits)
            if failure is not None:
                break
            if result.columns:
                answer = position, result
        end = _settle(session) if failure is None and (keep or changed) else None
        if failure is not None or answer is None:
            return Run(parts, failure, vm_steps=steps, seconds=seconds, end=end)
        position, result = answer
        return Run(parts, None, result.rows, result.columns, parts[position], position, steps, seconds, end)

    def ask(self, session: AnySession, sql: str, *, readonly: bool = False) -> ExecResult:
        """One statement under the limits of a graded run."""
        return session.execute(sql, deadline_s=self.limits.deadline_s, max_rows=self.limits.max_rows, max_bytes=self.limits.max_bytes, readonly=readonly)


def _failure(result: ExecResult, limits: Limits) -> Verdict | None:
    if result.status != "ok":
        return Verdict(_CODE[result.status], _shown(result.error or result.status))
    if result.truncated:
        return Verdict("too_big", f"the result is over the cap of {limits.max_rows:,} rows or {limits.max_bytes:,} bytes")
    return None


def status_failure(result: ExecResult) -> Verdict:
    """The verdict that a failed statement means."""
    return Verdict(_CODE[result.status], _shown(result.error or result.status))


def _shown(text: str) -> str:
    short = text if len(text) <= 500 else text[:500] + "…"
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


def _settle(session: AnySession) -> Snapshot:
    """The committed contents. Open transactions end here, and pragmas stay with the connection: neither is part of what was handed in."""
    if session.in_transaction:
        session.execute("ROLLBACK", deadline_s=_OWN_WORK_S)
    return replace(session.checkpoint("end"), settings={})


class OwnWorkFailed(Exception):
    """A statement of the grader's own did not run. status: "infra" is our fault; anything else is what was left to read (a column that raises)."""

    def __init__(self, status: str, error: str | None) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status


def fetch(session: AnySession, sql: str) -> tuple[Row, ...]:
    """All rows of a statement of our own. OwnWorkFailed when there are none to be had."""
    result = session.execute(sql, deadline_s=_OWN_WORK_S, max_rows=1 << 40, max_bytes=1 << 40)
    if result.status != "ok" or result.truncated:
        raise OwnWorkFailed(result.status, result.error)
    return result.rows


def fetch_in_chunks(session: AnySession, sql: str) -> Iterator[tuple[Row, ...]]:
    """As `fetch`, some thousand rows at a time, so that a large table is never held whole."""
    offset = 0
    while True:
        rows = fetch(session, f"{sql} LIMIT {_CHUNK_ROWS} OFFSET {offset}")
        yield rows
        if len(rows) < _CHUNK_ROWS:
            return
        offset += _CHUNK_ROWS
