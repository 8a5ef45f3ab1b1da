"""Forms of query: each draws one over a part of a schema by chance, or gives None where the part cannot have the form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from random import Random

from savepoint.envs.sql.part import Part, PartTable
from savepoint.envs.sql.query import AGGREGATES, Condition, Join, Operator, Query, Ref
from savepoint.envs.sql.schema import Column

_TOLD = ("number", "date", "name", "word")


def _choose(tables: Sequence[PartTable], rng: Random) -> PartTable | None:
    return tables[rng.randrange(len(tables))] if tables else None


def _one(columns: Sequence[Column], rng: Random, avoid: str | None = None) -> Column:
    """One of the columns, not the one called `avoid` where there is a choice."""
    free = [column for column in columns if column.name != avoid] or columns
    return free[rng.randrange(len(free))]


def _where(table: PartTable, rng: Random, *, always: bool = False, avoid: Container[str] = ()) -> Condition | None:
    """A condition on a column of the table, in two queries of three unless `always`; words are asked about in two conditions of five."""
    columns = [column for column in table.columns if column.conditions and column.name not in avoid]
    if not columns or not (always or rng.random() < 2 / 3):
        return None
    words = [column for column in columns if column.role == "word"]
    other = [column for column in columns if column.role != "word"]
    column = _one(words if words and (not other or rng.random() < 0.4) else other, rng)
    value = column.figures[rng.randrange(len(column.figures))]
    operator: Operator = "="
    if column.role == "number":
        operator = rng.choice([">", "<", "="] if column.exact else [">", "<"])
    elif column.role == "date":
        operator = rng.choice(["<", ">="])
    return Condition(Ref.of(column), operator, value, column.role == "date")


def _aggregate(column: Column, rng: Random) -> tuple[str, Ref]:
    return rng.choice(list(AGGREGATES) if column.additive else ["MAX", "MIN"]), Ref.of(column)


def _list(part: Part, rng: Random) -> Query | None:
    table = _choose([t for t in part.tables if any(c.conditions for c in t.columns)], rng)
    if table is None:
        return None
    where = _where(table, rng, always=True)
    wanted = _one(table.columns, rng, avoid=where.ref.column if where else None)
    return Query("list", table.name, (Ref.of(wanted),), where=where)


def _distinct(part: Part, rng: Random) -> Query | None:
    table = _choose([t for t in part.tables if any(c.groups for c in t.columns)], rng)
    if table is None:
        return None
    wanted = _one([c for c in table.columns if c.groups], rng)
    where = _where(table, rng, avoid=(wanted.name,))
    return Query("distinct", table.name, (Ref.of(wanted),), where=where, distinct=True)


def _count(part: Part, rng: Random) -> Query | None:
    table = _choose([t for t in part.tables if any(c.conditions for c in t.columns)], rng)
    if table is None:
        return None
    groups = [c for c in table.columns if c.groups]
    group = _one(groups, rng) if groups and rng.random() < 0.5 else None
    where = _where(table, rng, always=group is None, avoid=(group.name,) if group else ())
    key = Ref.of(group) if group else None
    return Query("count", table.name, (key,) if key else (), ("COUNT", None), where, key)


def _aggregated(part: Part, rng: Random) -> Query | None:
    table = _choose([t for t in part.tables if t.numbers], rng)
    if table is None:
        return None
    column = _one(table.numbers, rng)
    where = _where(table, rng, avoid=(column.name,))
    return Query("aggregate", table.name, (), _aggregate(column, rng), where)


def _grouped(part: Part, rng: Random) -> Query | None:
    table = _choose([t for t in part.tables if any(g != n for g in t.columns if g.groups for n in t.numbers)], rng)
    if table is None:
        return None
    group = _one([g for g in table.columns if g.groups and any(n != g for n in table.numbers)], rng)
    column = _one([n for n in table.numbers if n != group], rng)
    where = _where(table, rng, avoid=(group.name,))
    return Query("group", table.name, (Ref.of(group),), _aggregate(column, rng), where, Ref.of(group))


def _top(part: Part, rng: Random) -> Query | None:
    tables = [t for t in part.tables if any(c.distinct >= 0.2 for c in t.numbers)]
    table = _choose(tables, rng)
    if table is None:
        return None
    order = _one([c for c in table.numbers if c.distinct >= 0.2], rng)
    wanted = _one([c for c in table.columns if c != order], rng)
    where = _where(table, rng, avoid=(order.name,))
    return Query("top", table.name, (Ref.of(wanted), Ref.of(order)), None, where, None, (Ref.of(order), rng.random() < 0.5), rng.randint(1, 5))


def _joined(part: Part, rng: Random) -> tuple[PartTable, PartTable, Join, Condition | None] | None:
    """A reference to join along, the only one between its tables, and a condition on the referring table whose column has no namesake in the other."""
    between = Counter((r.table, r.to_table) for r in part.references)
    able = [
        r for r in part.references
        if between[r.table, r.to_table] == 1 and part.table(r.table).having(*_TOLD) and part.table(r.to_table).having("word", "name")
    ]  # fmt: skip
    if not able:
        return None
    reference = able[rng.randrange(len(able))]
    own, other = part.table(reference.table), part.table(reference.to_table)
    where = _where(own, rng, always=own.rows > 1000, avoid=other.all_columns)
    return own, other, Join(Ref(reference.table, reference.column), Ref(reference.to_table, reference.to_column)), where


def _join_list(part: Part, rng: Random) -> Query | None:
    joined = _joined(part, rng)
    if joined is None:
        return None
    own, other, join, where = joined
    mine = _one(own.having(*_TOLD), rng)
    return Query("join_list", own.name, (Ref.of(_one(other.having("word", "name"), rng)), Ref.of(mine)), where=where, join=join)


def _join_group(part: Part, rng: Random) -> Query | None:
    able = replace(part, references=tuple(r for r in part.references if part.table(r.table).numbers))
    joined = _joined(able, rng)
    if joined is None:
        return None
    own, other, join, where = joined
    group = Ref.of(_one(other.having("word") or other.having("name"), rng))
    return Query("join_group", own.name, (group,), _aggregate(_one(own.numbers, rng), rng), where, group, join=join)


FORMS: dict[str, Callable[[Part, Random], Query | None]] = {
    "list": _list, "distinct": _distinct, "count": _count, "aggregate": _aggregated, "group": _grouped, "top": _top,
    "join_list": _join_list, "join_group": _join_group,
}  # fmt: skip
