"""One call of `Session.execute`: runs a script statement by statement, under a deadline and caps, and answers with an `ExecResult`.

apsw calls back when a statement is prepared and before it runs. That is where the clock is looked at, where a read-only call refuses,
and where a new result begins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import apsw

from savepoint.state.session import ExecResult, ExecStatus, Quota, SqlValue
from savepoint.state.sqlite.connection import Connection
from savepoint.state.sqlite.digest import decoded
from savepoint.state.sqlite.pages import HOST_FULL, PAGE_QUOTA, TEMP_QUOTA, Volume
from savepoint.state.sqlite.split import bare_statement, split_statements
from savepoint.state.watchdog import watchdog

MAX_ERROR_BYTES = 4096
_CTE = "savepoint_rows"
# Corruption that SQL can bring about: a virtual table's own format, the sqlite_sequence table.
_AGENTS_CORRUPTION = (apsw.SQLITE_CORRUPT_VTAB, apsw.SQLITE_CORRUPT_SEQUENCE)
_OURS = (apsw.NoMemError, apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.CantOpenError, apsw.ProtocolError, apsw.InternalError)
_ANSWERED = (apsw.Error, UnicodeError, ValueError, MemoryError)


class _OverLimit(Exception):
    """Something is over a limit of ours before SQLite sees it. `quota`: which, as "name=value"."""

    def __init__(self, what: str, quota: str) -> None:
        super().__init__(what)
        self.quota = quota


@dataclass(frozen=True, slots=True)
class Limits:
    """deadline_s: for the whole call. max_rows, max_bytes: of the result that is kept. Refuses nonsense when made (ValueError)."""

    deadline_s: float
    max_rows: int
    max_bytes: int
    readonly: bool

    def __post_init__(self) -> None:
        if not self.deadline_s > 0 or self.max_rows < 0 or self.max_bytes < 0:
            raise ValueError(f"deadline_s={self.deadline_s}, max_rows={self.max_rows}, max_bytes={self.max_bytes}: out of range")


class Execution:
    """A call under way. `run` is called once."""

    def __init__(self, connection: Connection, volume: Volume, quota: Quota, limits: Limits) -> None:
        self.connection, self.volume, self.quota, self.limits = connection, volume, quota, limits
        self.raw = connection.raw
        self.columns: tuple[str, ...] = ()
        self.rows: list[tuple[SqlValue, ...]] = []
        self.bytes = 0
        self.cut: int | None = 0  # rows of the current result that were seen and not kept; None: there are more, not counted
        self.cut_by: str | None = None
        self.statements = self.rowcount = 0
        self._read_to = 0  # characters of the script that the statements begun so far take up
        self._text = ""
        self._running = self._reads = self._was_open = False
        self._total = self.raw.total_changes()

    def run(self, sql: str) -> ExecResult:
        started = time.monotonic()
        deadline = started + self.limits.deadline_s
        self.connection.begin(deadline, self.limits.readonly)
        self._was_open = self.connection.in_transaction
        failure: BaseException | None = None
        alarm = watchdog.arm(deadline, self.raw.interrupt)
        try:
            if len(sql.encode("utf-8", "surrogatepass")) > self.quota.sql_length:
                raise _OverLimit("the SQL is too long", f"sql_length={self.quota.sql_length}")
            for statement in split_statements(sql):
                rest = statement
                while rest:  # at once empty, but were SQLite to see two statements in it, none would be lost
                    rest = self._run(rest)
                self._end_statement()
        except (*_ANSWERED, _OverLimit) as error:
            failure = error
        finally:
            watchdog.disarm(alarm)
        result = self._answer(failure, started)
        self.connection.end()
        failure = None  # its traceback holds this frame: together they would keep pages alive until the next garbage collection
        return result

    # ------------------------------------------------------------------ running

    def _run(self, script: str) -> str:
        """Run a statement to its end, or until its result is cut. Returns what is left to run."""
        self._read_to = 0
        cursor = self.raw.cursor()
        cursor.exec_trace = self._begin_statement
        try:
            rows = cursor.execute(script)
            while True:
                try:
                    for row in rows:
                        if not self._take(row):
                            return script[self._read_to :]
                    return ""
                except UnicodeDecodeError:  # apsw cannot give this row; the statement stands on it still
                    if self._read_again():
                        return script[self._read_to :]
        finally:
            cursor.close(True)

    def _begin_statement(self, cursor: apsw.Cursor, text: str, bindings: object) -> bool:
        self._end_statement()
        self._read_to += len(text)
        if not cursor.has_vdbe:  # nothing but a comment
            return True
        connection = self.connection
        if connection.is_late:  # an interrupt that fell between two statements has reached neither
            raise apsw.InterruptError("interrupted")
        if connection.over_budget():
            raise apsw.InterruptError("interrupted")
        self._reads = cursor.is_readonly
        if self.limits.readonly and not self._reads:
            connection.policy.denied = "a statement that writes, in a read-only call"
            raise apsw.AuthError("not authorized")
        self.volume.begin()
        connection.finishing, connection.policy.transaction = connection.policy.transaction, None
        self._running, self._text, self._was_open = True, text, connection.in_transaction
        names = tuple(name for name, *_ in cursor.get_description())
        if names:
            if sum(map(_text_bytes, names)) > self.limits.max_bytes:
                raise _OverLimit("the names of the columns are too big", f"max_bytes={self.limits.max_bytes}")
            self.columns, self.rows, self.bytes, self.cut, self.cut_by = names, [], 0, 0, None
        return True

    def _end_statement(self) -> None:
        if not self._running:
            return
        self._running = False
        self.statements += 1
        total = self.raw.total_changes()
        if total != self._total:
            self.rowcount += self.raw.changes()
            self._total = total

    def _take(self, row: tuple[Any, ...]) -> bool:
        """Keep a row, or cut the result there. False: step this statement no further (it only reads, so nothing is left undone)."""
        if not self.cut_by:
            self.bytes += _row_bytes(row)
            if len(self.rows) >= self.limits.max_rows:
                self.cut_by = f"max_rows={self.limits.max_rows}"
            elif self.bytes > self.limits.max_bytes:
                self.cut_by = f"max_bytes={self.limits.max_bytes}"
            else:
                self.rows.append(row)
                return True
        if self._reads:
            self.cut = None
            return False
        self.cut = (self.cut or 0) + 1
        return True

    def _read_again(self) -> bool:
        """Run the current query once more so that text which is no UTF-8 arrives as bytes. False: that cannot be done for this one
        (it writes, or is a pragma); the row that cannot be given counts as cut."""
        names = ", ".join(f"c{i}" for i in range(len(self.columns)))
        values = ", ".join(f"CASE typeof(c{i}) WHEN 'text' THEN CAST(c{i} AS BLOB) ELSE c{i} END, typeof(c{i}) = 'text'" for i in range(len(self.columns)))
        try:
            if not self._reads:
                raise apsw.SQLError("only a query can be run again")
            cursor = self.raw.cursor().execute(f"WITH {_CTE}({names}) AS (\n{bare_statement(self._text)}\n) SELECT {values} FROM {_CTE}")
        except (apsw.SQLError, apsw.TooBigError):
            self.cut = (self.cut or 0) + 1
            return False
        self.rows, self.bytes, self.cut, self.cut_by = [], 0, 0, None
        try:
            for pairs in cursor:
                if not self._take(decoded(pairs)):
                    break
        finally:
            cursor.close(True)
        return True

    # ------------------------------------------------------------------ answering

    def _answer(self, failure: BaseException | None, started: float) -> ExecResult:
        connection = self.connection
        stats = self.volume.stats()
        in_transaction = connection.in_transaction
        if not in_transaction:
            connection.policy.savepoints = 0
        wall_ms = (time.monotonic() - started) * 1000
        if failure is None:
            return ExecResult(
                "ok", self.columns, tuple(self.rows), self.cut != 0, self.cut, self.rowcount, None, self.cut_by,
                in_transaction, False, self.statements, stats.delta_pages, connection.vm_steps, wall_ms,
            )  # fmt: skip
        status, quota = self._classify(failure, stats.refused)
        lost = connection.rolled_back and self._was_open and not in_transaction
        return ExecResult(
            status, rowcount=self.rowcount, error=self._words(failure, status), quota=quota, in_transaction=in_transaction, transaction_lost=lost,
            statements=self.statements, delta_pages=stats.delta_pages, vm_steps=connection.vm_steps, wall_ms=wall_ms,
        )  # fmt: skip

    def _classify(self, error: BaseException, refused: int) -> tuple[ExecStatus, str | None]:
        """The status that a failure means, and the limit that was hit."""
        quota, policy = self.quota, self.connection.policy
        if self.connection.spent and isinstance(error, apsw.InterruptError):
            return ("too_big" if self.connection.spent.startswith("heap") else "timeout"), self.connection.spent
        if isinstance(error, apsw.InterruptError) or policy.late:
            return "timeout", f"deadline_s={self.limits.deadline_s:g}" if self.connection.is_late and not self.connection.stopped else None
        if isinstance(error, _OverLimit):
            return "too_big", error.quota
        if policy.denied or str(error).startswith("unsafe use of "):  # SQLite's own refusal, of such a function in a view or a trigger
            return "denied", None
        if isinstance(error, apsw.TooBigError):
            return "too_big", f"length={quota.length}"
        if isinstance(error, apsw.FullError) and refused & PAGE_QUOTA:
            return "full", f"delta_bytes={quota.delta_bytes}"
        if isinstance(error, apsw.FullError) and refused & TEMP_QUOTA:
            return "full", f"temp_bytes={quota.temp_bytes}"
        if refused & HOST_FULL or isinstance(error, MemoryError):
            return "infra", None
        if isinstance(error, _OURS) and getattr(error, "extendedresult", 0) not in _AGENTS_CORRUPTION:
            return "infra", None
        return "sql_error", None  # an exhausted AUTOINCREMENT is a FullError too: no quota refused anything

    def _words(self, error: BaseException, status: ExecStatus) -> str:
        """SQLite's words; ours where it has none, and what was denied where it does not say."""
        if isinstance(error, UnicodeError):
            return "the SQL holds a character that is not valid Unicode"
        if status == "timeout":
            return "interrupted"  # by whatever way it was stopped
        text, denied = str(error), self.connection.policy.denied
        if status == "denied" and denied and denied not in text:
            text = f"{text}: {denied}"
        data = text.encode("utf-8", "surrogateescape")
        if len(data) <= MAX_ERROR_BYTES:
            return text
        return f"{data[:MAX_ERROR_BYTES].decode('utf-8', 'ignore')} ... ({len(data) - MAX_ERROR_BYTES} bytes more)"


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def _row_bytes(row: tuple[Any, ...]) -> int:
    """Bytes of a row as it is sent on: text in UTF-8, blobs, 8 for a number or NULL."""
    size = 0
    for value in row:
        kind = type(value)
        size += _text_bytes(value) if kind is str else len(value) if kind is bytes else 8
    return size
