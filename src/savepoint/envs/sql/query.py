"""Queries as small typed values, and their SQL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from savepoint.envs.sql.renames import Rename
from savepoint.envs.sql.schema import Column, literal, quote

Operator = Literal[">", "<", ">=", "="]

AGGREGATES = {"SUM": "total", "AVG": "average", "MAX": "highest", "MIN": "lowest"}


class Ref(NamedTuple):
    """A column of a table."""

    table: str
    column: str

    @classmethod
    def of(cls, column: Column) -> Ref:
        return cls(column.table, column.name)


@dataclass(frozen=True, slots=True)
class Condition:
    """`column operator value`. Dates have only `<` (before) and `>=` (since), so that times of that day leave no doubt."""

    ref: Ref
    operator: Operator
    value: int | float | str
    is_date: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """`JOIN right.table ON left = right`, where left is a column of the query's own table."""

    left: Ref
    right: Ref


@dataclass(frozen=True, slots=True)
class Query:
    """A SELECT over one table or two. `aggregate` is (function, column), the column None for COUNT(*); it comes after the columns of `select`.

    `order` is (column, descending). Renames and bugs make other queries out of one; `sql()` writes it.
    """

    form: str
    table: str
    select: tuple[Ref, ...] = ()
    aggregate: tuple[str, Ref | None] | None = None
    where: Condition | None = None
    group: Ref | None = None
    order: tuple[Ref, bool] | None = None
    limit: int | None = None
    distinct: bool = False
    join: Join | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        return (self.table,) if self.join is None else (self.table, self.join.right.table)

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The columns that the query uses, in the order in which a reader meets them, each once."""
        aggregated = self.aggregate[1] if self.aggregate else None
        keys = (self.join.left, self.join.right) if self.join else ()
        found = (*self.select, aggregated, *keys, self.where and self.where.ref, self.group, self.order and self.order[0])
        return tuple(dict.fromkeys(ref for ref in found if ref))

    def sql(self, limit: int | None = None) -> str:
        """The statement; `limit` in place of the query's own."""
        return render(self if limit is None else replace(self, limit=limit))

    def renamed(self, rename: Rename) -> Query:
        """The same query in the names after a migration."""
        if rename.column is None:
            query = self.with_refs(lambda ref: Ref(rename.new, ref.column) if ref.table == rename.table else ref)
            return replace(query, table=rename.new) if query.table == rename.table else query
        old = Ref(rename.table, rename.column)
        return self.with_refs(lambda ref: Ref(rename.table, rename.new) if ref == old else ref)

    def with_refs(self, change: Callable[[Ref], Ref]) -> Query:
        """The query with every column exchanged by `change`."""
        return replace(
            self,
            select=tuple(map(change, self.select)),
            aggregate=self.aggregate and (self.aggregate[0], self.aggregate[1] and change(self.aggregate[1])),
            where=self.where and replace(self.where, ref=change(self.where.ref)),
            group=self.group and change(self.group),
            order=self.order and (change(self.order[0]), self.order[1]),
            join=self.join and Join(change(self.join.left), change(self.join.right)),
        )


def render(query: Query) -> str:
    """A query as SQL. Columns are qualified only where two tables are joined."""

    def name(ref: Ref) -> str:
        return quote(ref.column) if query.join is None else f"{quote(ref.table)}.{quote(ref.column)}"

    wanted = [name(ref) for ref in query.select]
    if query.aggregate:
        function, ref = query.aggregate
        wanted.append(f"{function}({'*' if ref is None else name(ref)})")
    text = f"SELECT {'DISTINCT ' if query.distinct else ''}{', '.join(wanted)} FROM {quote(query.table)}"
    if query.join:
        text += f" JOIN {quote(query.join.right.table)} ON {name(query.join.left)} = {name(query.join.right)}"
    if query.where:
        text += f" WHERE {name(query.where.ref)} {query.where.operator} {literal(query.where.value)}"
    if query.group:
        text += f" GROUP BY {name(query.group)}"
    if query.order:
        text += f" ORDER BY {name(query.order[0])} {'DESC' if query.order[1] else 'ASC'}"
    return text if query.limit is None else f"{text} LIMIT {query.limit}"
