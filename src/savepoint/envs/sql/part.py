"""The part of a schema that questions are asked about: all of a small one, or what a small policy can learn of a larger one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from savepoint.envs.sql.schema import Column, Reference, Schema, Table, is_plain
from savepoint.errors import UserError

MIN_ROWS = 8
SLOW_ROWS = 20_000
COLUMNS_A_TABLE = 5
FEWEST_TABLES = 3


@dataclass(frozen=True, slots=True)
class PartTable:
    """A picked table: the columns that questions use, and the names of all that it has (a look at the table shows them all)."""

    name: str
    columns: tuple[Column, ...]
    rows: int
    all_columns: tuple[str, ...]
    primary: str | None

    def having(self, *roles: str) -> tuple[Column, ...]:
        """The used columns of these roles."""
        return tuple(column for column in self.columns if column.role in roles)

    @property
    def numbers(self) -> tuple[Column, ...]:
        return self.having("number")


@dataclass(frozen=True, slots=True)
class Part:
    """The picked tables, the references among them, and why each other table was left out."""

    tables: tuple[PartTable, ...]
    references: tuple[Reference, ...]
    left_out: Mapping[str, str]

    @property
    def columns(self) -> int:
        """Columns that questions use, of all tables together."""
        return sum(len(table.columns) for table in self.tables)

    def table(self, name: str) -> PartTable:
        return next(table for table in self.tables if table.name == name)

    def describe(self) -> str:
        """What was picked and what was left out, in a few lines for people."""
        lines = [f"questions use {len(self.tables)} table{'s' * (len(self.tables) != 1)} and {self.columns} columns:"]
        lines += [f"  {table.name} ({', '.join(column.name for column in table.columns)})" for table in self.tables]
        reasons = sorted(self.left_out.items(), key=lambda item: item[1])
        lines += [f"left out ({reason}): {', '.join(name for name, _ in group)}" for reason, group in groupby(reasons, key=lambda item: item[1])]
        return "\n".join(lines)


def pick(schema: Schema, max_tables: int = 5, max_columns: int = 25, *, simple: bool = True) -> Part:
    """The best part of a schema within `max_tables` and `max_columns` (used columns, of all tables together).

    simple: what a small policy learns: at most five columns a table, no dates, and tables that have both numbers and something to group by (others only
    until there are three). Not simple: every usable table, and those that others refer to for a name. UserError when no table is usable.
    """
    candidates: list[PartTable] = []
    left_out = dict.fromkeys(schema.unread, "cannot be read")
    referred = {r.to_table for r in schema.references if r.table != r.to_table}
    for table in schema.tables:
        columns = _usable(table, simple)
        look_up = not simple and table.name in referred and any(column.role in ("name", "word") for column in columns)
        if table.rows < (2 if look_up else MIN_ROWS):
            left_out[table.name] = f"fewer than {MIN_ROWS} rows"
        elif not (look_up or _askable(columns)):
            left_out[table.name] = "too few columns of numbers or words"
        else:
            candidates.append(PartTable(table.name, columns, table.rows, tuple(column.name for column in table.columns), table.primary))
    picked: list[PartTable] = []
    for candidate in sorted(candidates, key=_rank):
        room = max_columns - sum(len(t.columns) for t in picked)
        columns = candidate.columns[:room]
        if len(picked) == max_tables or (len(columns) < len(candidate.columns) and not _askable(columns)):
            left_out[candidate.name] = f"over {max_tables} tables or {max_columns} columns"
        elif simple and not _rich(candidate) and len(picked) >= FEWEST_TABLES:
            left_out[candidate.name] = "hard to learn: no numbers, nothing to group by, or very many rows"
        else:
            picked.append(replace(candidate, columns=columns))
    if not any(_askable(table.columns) for table in picked):
        seen = "; ".join(f"{name}: {reason}" for name, reason in sorted(left_out.items())[:3])
        raise UserError(f"no table that questions can be asked about{f' ({seen})' if seen else ''}")
    order = {table.name: position for position, table in enumerate(schema.tables)}
    picked.sort(key=lambda table: order[table.name])
    used = {table.name for table in picked}
    references = tuple(r for r in schema.references if r.table in used and r.to_table in used and r.table != r.to_table)
    return Part(tuple(picked), references, left_out)


def _usable(table: Table, simple: bool) -> tuple[Column, ...]:
    """The columns to ask about, the most useful first. Keys only where a table offers too little else, and mostly NULL only where any column goes."""
    by_role: dict[str, list[Column]] = {}
    for column in sorted(table.columns, key=lambda column: (not is_plain(column.name), column.role == "number" and column.exact)):
        if column.filled >= 0.5 or not simple:
            by_role.setdefault(column.role, []).append(column)
    words, numbers, names = (by_role.get(role, []) for role in ("word", "number", "name"))
    chosen = [*words[:1], *numbers[:2], *names[:1], *words[1:2], *numbers[2:3]]
    keys = [column for column in by_role.get("key", []) if column.exact or not simple]
    if not simple:
        chosen += [*by_role.get("date", []), *words[2:], *numbers[3:], *names[1:]]
    if len(chosen) < 3 or not any(column.groups for column in chosen):
        chosen = [*chosen[: COLUMNS_A_TABLE - 1], *keys[:1], *chosen[COLUMNS_A_TABLE - 1 :]]
    return tuple(chosen[:COLUMNS_A_TABLE] if simple else chosen)


def _askable(columns: Sequence[Column]) -> bool:
    """Whether a table's columns make questions of its own: one to ask for, and one to put a condition on."""
    return len(columns) >= 2 and any(column.conditions for column in columns)


def _rich(table: PartTable) -> bool:
    """Numbers to compute with, something to group by, and few enough rows that a query takes about a millisecond."""
    return bool(table.numbers) and any(column.groups for column in table.columns) and table.rows <= SLOW_ROWS


def _rank(table: PartTable) -> tuple[bool, bool, float, int]:
    """Best first: rich tables, plain names, a large share of columns that questions use, few rows."""
    plain = is_plain(table.name) and all(is_plain(column.name) for column in table.columns)
    return not _rich(table), not plain, -len(table.columns) / len(table.all_columns), table.rows
