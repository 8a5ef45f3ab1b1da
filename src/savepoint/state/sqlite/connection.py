"""One hardened connection on a volume: what it may do, how long it may take, and what it has counted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import apsw

from savepoint.state.session import Quota
from savepoint.state.sqlite.dice import Dice
from savepoint.state.sqlite.pages import Volume
from savepoint.state.sqlite.policy import CONNECTION_SETTINGS, Policy, harden

FILE = "database"  # the name that PRAGMA database_list shows: it names nothing, since a volume's VFS opens no other file
_HEAP = (apsw.SQLITE_DBSTATUS_CACHE_USED, apsw.SQLITE_DBSTATUS_SCHEMA_USED, apsw.SQLITE_DBSTATUS_STMT_USED)
STEPS = 250_000  # SQLite instructions between two looks at the clock, some milliseconds; the watchdog's interrupt is exact


class Connection:
    """An apsw connection with an authorizer, limits, and callbacks that are installed once.

    vm_steps: instructions of the statements that have ended.
    rolled_back: a transaction was rolled back by something else than a ROLLBACK statement since `begin()`.
    """

    def __init__(self, volume: Volume, quota: Quota, columns: int, dice: Dice, committed: Callable[[], bool]) -> None:
        self.policy = Policy()
        self.vm_steps, self.rolled_back = 0, False
        self.running = self.stopped = False  # whether a call is under way; whether `stop` ended it
        self._changing = threading.Lock()
        self.finishing: str | None = None  # the BEGIN, COMMIT or ROLLBACK that is running
        # No SQLITE_OPEN_URI: with it, a file name could name another VFS.
        self._volume = volume
        volume.register(True)
        self.raw = apsw.Connection(FILE, vfs=volume.name, flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=0)
        dice.install(self.raw)
        harden(self.raw, quota, self.policy, columns)
        self.budget, self.heap, self.spent = quota.vm_steps, quota.heap_bytes, ""  # spent: the quota that stopped the call
        self._ticks = 0  # of the statement that is running
        self._tick = STEPS if self.budget is None else max(100, min(STEPS, self.budget // 64))
        self.raw.set_progress_handler(self._stops, self._tick)
        self.raw.set_rollback_hook(self._on_rollback)
        self.raw.set_commit_hook(committed)
        self.raw.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._on_end)

    def begin(self, deadline: float, readonly: bool) -> None:
        """A call begins, to end by `deadline` (time.monotonic()): forget what the last one left."""
        with self._changing:
            self.policy.begin(deadline, readonly)
            self.vm_steps, self.rolled_back, self.finishing, self.stopped, self.running = 0, False, None, False, True
            self._ticks, self.spent = 0, ""

    def end(self) -> None:
        """The call has ended: what the state layer asks of the connection now is under no deadline."""
        with self._changing:
            self.policy.begin(math.inf, False)
            self.running = False

    def stop(self) -> None:
        """End the call under way, from another thread: whatever statement of it runs or would be next. Nothing happens when there is none."""
        with self._changing:
            if self.running:
                self.stopped = True
                self.policy.deadline = -math.inf
                self.raw.interrupt()

    @property
    def is_late(self) -> bool:
        """Whether the deadline of the call has passed."""
        return time.monotonic() >= self.policy.deadline

    @property
    def in_transaction(self) -> bool:
        return not self.raw.get_autocommit()

    def temporary(self) -> str | None:
        """The name of something that lives in this connection alone and that a copy of the database would lose, or None."""
        if not self.policy.made_temporary:
            return None
        found = self.raw.execute("SELECT name FROM temp.sqlite_schema LIMIT 1").fetchone()
        if found:
            return f"TEMP object {found[0]!r}"
        attached = [name for name in self.raw.db_names() if name not in ("main", "temp")]
        return f"attached database {attached[0]!r}" if attached else None

    def settings(self) -> dict[str, str]:
        """Settings of the connection (`PRAGMA foreign_keys = 1`, ...) that SQL has changed, with their values now."""
        changed = self.policy.settings
        # case_sensitive_like cannot be read back; the others can, and inside a transaction some ignore what they are told.
        return {name: changed[name] if name == "case_sensitive_like" else str(self.raw.pragma(name)) for name in changed}

    def apply(self, settings: dict[str, str]) -> None:
        for name, value in settings.items():
            if name in CONNECTION_SETTINGS:
                self.raw.execute(f"PRAGMA {name} = {apsw.format_sql_value(value)}").fetchall()

    def close(self) -> None:
        """Close, whatever is open: statements, transactions, TEMP objects go."""
        self.raw.close(True)
        self._volume.register(False)

    def over_budget(self) -> bool:
        """Whether the call has used up its steps or its heap: a count of instructions and bytes, the same on every machine."""
        if self.budget is not None and self.vm_steps + self._ticks * self._tick > self.budget:
            self.spent = f"vm_steps={self.budget}"
        elif self.heap is not None and sum(self.raw.status(what)[0] for what in _HEAP) > self.heap:
            self.spent = f"heap_bytes={self.heap}"
        return bool(self.spent)

    def _stops(self) -> bool:
        self._ticks += 1
        return self.is_late or self.over_budget()

    def _on_rollback(self) -> None:
        self.rolled_back = self.rolled_back or self.finishing != "ROLLBACK"

    def _on_end(self, profile: dict[str, Any]) -> None:
        self._ticks = 0
        self.vm_steps += profile["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]
