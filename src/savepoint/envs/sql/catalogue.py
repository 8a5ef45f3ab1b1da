"""What a prompt can say about a database: its catalogue, a few rows of each table, and what people wrote about its columns."""

from __future__ import annotations

from dataclasses import dataclass

from savepoint.envs.sql.descriptions import Descriptions
from savepoint.envs.sql.schema import quote
from savepoint.state import AnySession, ExecResult

_DEADLINE_S = 5.0
_ROWS_READ = 20
_BYTES_READ = 1 << 18


@dataclass(frozen=True, slots=True)
class ColumnEntry:
    """A column. target: what it refers to, `table.column` (`table` where the key names no column), or None. primary: it is in the primary key."""

    name: str
    type: str
    primary: bool
    target: str | None
    description: str = ""
    values: str = ""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A table or a view. sql: its definition; extras: definitions of its indexes and triggers. sample: its first rows, or why there are none."""

    name: str
    kind: str
    sql: str
    columns: tuple[ColumnEntry, ...]
    extras: tuple[str, ...]
    sample: ExecResult


def read_catalogue(session: AnySession, descriptions: Descriptions, rows: int) -> tuple[TableEntry, ...]:
    """Tables and views of a session's database in the order of its catalogue, with at most `rows` rows of each table. StateError where even that fails."""
    entries = [tuple("" if value is None else str(value) for value in row) for row in _run(session, _CATALOGUE).rows]
    extras: dict[str, list[str]] = {}
    for kind, _, table, sql in entries:
        if kind in ("index", "trigger"):
            extras.setdefault(table.lower(), []).append(sql)
    return tuple(
        TableEntry(name, kind, sql, _columns(session, name, descriptions), tuple(extras.get(name.lower(), ())), _sample(session, name, kind, rows))
        for kind, name, _, sql in entries
        if kind in ("table", "view")
    )


_CATALOGUE = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid"


def _columns(session: AnySession, table: str, descriptions: Descriptions) -> tuple[ColumnEntry, ...]:
    said = descriptions.get(table.lower(), {})
    targets = {
        str(row[3]).lower(): f"{row[2]!s}.{row[4]!s}" if row[4] else str(row[2]) for row in _run(session, f"PRAGMA foreign_key_list({quote(table)})").rows
    }
    out = []
    for _, name, kind, _, _, primary in (row[:6] for row in _run(session, f"PRAGMA table_info({quote(table)})").rows):
        about = said.get(str(name).lower())
        out.append(ColumnEntry(str(name), str(kind), bool(primary), targets.get(str(name).lower()), about.text if about else "", about.values if about else ""))
    return tuple(out)


def _sample(session: AnySession, table: str, kind: str, rows: int) -> ExecResult:
    """The first rows. A view may cost anything, and its rows are its tables': it is not sampled."""
    if kind == "view" or not rows:
        return ExecResult("ok")
    return _run(session, f"SELECT * FROM {quote(table)} LIMIT {min(rows, _ROWS_READ)}")


def _run(session: AnySession, sql: str) -> ExecResult:
    return session.execute(sql, deadline_s=_DEADLINE_S, max_rows=100_000, max_bytes=_BYTES_READ if sql.startswith("SELECT *") else 64 << 20)
