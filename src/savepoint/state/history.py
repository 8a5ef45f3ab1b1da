"""What was asked of a session, with what it cost: for a person who looks at a trajectory, and for budgets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from savepoint.state.session import ExecResult, ExecStatus

KEPT = 256  # calls; what was asked earlier is counted and no longer listed
_SHOWN = 2000  # characters of the SQL of a call


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `execute`. sql: its beginning. rows: given. statements: that ran to their end. The rest is as in ExecResult."""

    sql: str
    status: ExecStatus
    error: str | None
    quota: str | None
    statements: int
    rows: int
    rowcount: int
    vm_steps: int
    wall_ms: float
    delta_pages: int


class History:
    """The last calls of a session."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=KEPT)

    def add(self, sql: str, result: ExecResult) -> None:
        self._calls.append(
            Call(
                sql if len(sql) <= _SHOWN else f"{sql[:_SHOWN]}... ({len(sql) - _SHOWN} characters more)", result.status, result.error, result.quota,
                result.statements, len(result.rows), result.rowcount, result.vm_steps, result.wall_ms, result.delta_pages,
            )
        )  # fmt: skip


    def calls(self) -> tuple[Call, ...]:
        return tuple(self._calls)
