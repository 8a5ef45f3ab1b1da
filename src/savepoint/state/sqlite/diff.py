"""What differs between two states of a database, in rows: read side by side in the order of their keys, so nothing is held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import apsw

from savepoint.state.session import SqlValue
from savepoint.state.sqlite.digest import decoded, quoted

Kind = Literal["created", "dropped", "redefined", "changed"]
Row = tuple[SqlValue, ...]


@dataclass(frozen=True, slots=True)
class TableDiff:
    """kind: "created", "dropped", "redefined" (its rows are then compared as whole rows), or "changed". key: the columns that tell rows apart; empty:
    the whole row does, and then nothing is `changed`. samples: ("added", row), ("removed", row), ("changed", row before, row after), the first few."""

    table: str
    kind: Kind
    key: tuple[str, ...]
    added: int
    removed: int
    changed: int
    samples: tuple[tuple[Any, ...], ...]

    def __str__(self) -> str:
        return f"{self.table}: {self.kind}, {self.added} added, {self.removed} removed, {self.changed} changed"


def differences(before: apsw.Connection, after: apsw.Connection, samples: int = 3) -> tuple[TableDiff, ...]:
    """Tables whose definition or rows differ, by name. Virtual tables are left out: the tables that they keep their rows in are compared."""
    old, new = _tables(before), _tables(after)
    found = (_compare(before, after, name, old.get(name), new.get(name), samples) for name in sorted(old.keys() | new.keys()))
    return tuple(diff for diff in found if diff is not None)


def _tables(connection: apsw.Connection) -> dict[str, str]:
    tables = "SELECT name, sql FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND sql NOT LIKE 'CREATE VIRTUAL%'"
    return {str(name): str(sql) for name, sql in connection.execute(tables)}


def _compare(before: apsw.Connection, after: apsw.Connection, name: str, old: str | None, new: str | None, samples: int) -> TableDiff | None:
    key = _key(before, after, name) if old == new else ()
    width = len(key)
    left = _rows(before, name, key) if old is not None else iter(())
    right = _rows(after, name, key) if new is not None else iter(())
    added = removed = changed = 0
    shown: list[tuple[Any, ...]] = []
    counts = {"added": 0, "removed": 0, "changed": 0}
    a, b = next(left, None), next(right, None)
    while a is not None or b is not None:
        order = 1 if a is None else -1 if b is None else _order(a[:width] if width else a, b[:width] if width else b)
        what: str | None = None
        entry: tuple[Any, ...] = ()
        if order < 0 and a is not None:
            what, entry, removed = "removed", ("removed", a[width:]), removed + 1
        elif order > 0 and b is not None:
            what, entry, added = "added", ("added", b[width:]), added + 1
        elif a is not None and b is not None and _sortable(a) != _sortable(b):
            what, entry, changed = "changed", ("changed", a[width:], b[width:]), changed + 1
        if what is not None and counts[what] < samples:
            counts[what] += 1
            shown.append(entry)
        if order <= 0:
            a = next(left, None)
        if order >= 0:
            b = next(right, None)
    kind: Kind = "created" if old is None else "dropped" if new is None else "changed" if old == new else "redefined"
    if kind == "changed" and not added + removed + changed:
        return None
    return TableDiff(name, kind, key, added, removed, changed, tuple(shown))


def _columns(connection: apsw.Connection, name: str) -> list[tuple[str, int]]:
    """(name, place in the primary key or 0) of the columns that `SELECT *` gives."""
    return [(str(row[1]), int(row[5])) for row in connection.execute(f"PRAGMA main.table_xinfo({quoted(name)})") if row[6] != 1]


def _key(before: apsw.Connection, after: apsw.Connection, name: str) -> tuple[str, ...]:
    """What tells the rows of a table apart: the primary key, unless it holds NULLs; else the rowid, unless columns took all its names."""
    columns = _columns(before, name)
    primary = tuple(column for column, place in sorted(columns, key=lambda entry: entry[1]) if place)
    nulls = " OR ".join(f"{quoted(column)} IS NULL" for column in primary)
    if primary and not any(c.execute(f"SELECT 1 FROM main.{quoted(name)} WHERE {nulls} LIMIT 1").fetchall() for c in (before, after)):
        return primary
    taken = {column.lower() for column, _ in columns}
    return next(((alias,) for alias in ("rowid", "_rowid_", "oid") if alias not in taken), ())


def _rows(connection: apsw.Connection, name: str, key: tuple[str, ...]) -> Iterator[Row]:
    """Key and columns of every row, text that is no UTF-8 included, in the order of the key (of the whole row, where there is none)."""
    columns = [*key, *(column for column, _ in _columns(connection, name))]
    cells = ", ".join(f"CASE typeof({c}) WHEN 'text' THEN CAST({c} AS BLOB) ELSE {c} END, typeof({c}) = 'text'" for c in map(quoted, columns))
    order = ", ".join(f"{quoted(column)} COLLATE BINARY" for column in key or columns)
    return map(decoded, connection.execute(f"SELECT {cells} FROM main.{quoted(name)} ORDER BY {order}"))


def _sortable(row: Row) -> list[tuple[int, Any]]:
    """Values in SQLite's order: NULL, numbers, text by its bytes, blobs. INTEGER and REAL of equal value are told apart only in equality."""
    return [
        (0, 0) if value is None else (2, value.encode("utf-8", "surrogateescape")) if isinstance(value, str) else (3, value) if isinstance(value, bytes)
        else (1, value)
        for value in row
    ]  # fmt: skip


def _order(a: Row, b: Row) -> int:
    x, y = _sortable(a), _sortable(b)
    return -1 if x < y else 1 if x > y else 0
