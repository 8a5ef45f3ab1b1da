"""The one form in which results of SQL are shown to a policy: in prompts, demonstrations, rollouts and evaluation alike."""

from __future__ import annotations

from dataclasses import dataclass

from savepoint.state import ExecResult


@dataclass(frozen=True, slots=True)
class ObservationFormat:
    """How much of a result is shown. `digits`: significant digits of a REAL. Whatever is left out is said."""

    max_rows: int = 20
    max_cell: int = 200
    max_chars: int = 4000
    digits: int = 15

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_cell, self.max_chars, self.digits) < 1:
            raise ValueError("observation: rows, cells, characters and digits must be at least 1")


def observe(result: ExecResult, form: ObservationFormat) -> str:
    """What the agent reads: `2 rows: name, age`, then the rows, then what was cut; or the error as the database words it."""
    if result.status != "ok":
        return _error(result, form)
    if not result.columns:
        changed = f", {result.rowcount} row{'s' if result.rowcount != 1 else ''} changed" if result.rowcount > 0 else ""
        return "ok" + changed + (", in a transaction" if result.in_transaction else "")
    count = len(result.rows)
    more = " or more" if result.truncated else ""
    lines = [f"{count}{more} row{'s' if count != 1 or more else ''}: {', '.join(result.columns)}"]
    used = len(lines[0])
    shown = 0
    for row in result.rows[: form.max_rows]:
        line = ", ".join(show_value(value, form) for value in row)
        used += len(line) + 1
        if used > form.max_chars and shown:
            break
        lines.append(line[: form.max_chars])
        shown += 1
    if shown < count:
        lines.append(f"... {count - shown} more")
    if result.in_transaction:
        lines.append("in a transaction")
    return "\n".join(lines)


def _error(result: ExecResult, form: ObservationFormat) -> str:
    text = f"{'denied' if result.status == 'denied' else 'error'}: {result.error or result.status}"
    if result.quota:
        text += f" (limit {result.quota})"
    if result.transaction_lost:
        text += " (the transaction was rolled back)"
    return text if len(text) <= form.max_chars else f"{text[: form.max_chars]}... {len(text) - form.max_chars} more characters"


def show_value(value: object, form: ObservationFormat) -> str:
    """One value as the agent reads it: REALs to `digits`, BLOBs as hex literals, anything longer than `max_cell` cut and said to be."""
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.{form.digits}g}"
    text = f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if len(text) <= form.max_cell else f"{text[: form.max_cell]}... {len(text) - form.max_cell} more characters"
