"""The database under the drafts: what can be grouped, counted, compared and joined there, and draws of it by chance."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TypeVar

from savepoint.envs.sql.part import Part, PartTable
from savepoint.envs.sql.schema import Column, QueryFailed, Run, Schema, SqlValue, Table, literal, quote

T = TypeVar("T")

MOST_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Term:
    """A condition as SQL (columns under an alias where one was asked for), as words, and the column that it is about."""

    sql: str
    text: str
    column: str


@dataclass(frozen=True, slots=True)
class Link:
    """A reference from a child table to the primary key of a parent that has something to show: `child.key` → `parent.primary`, named by `label`."""

    child: Table
    key: str
    parent: PartTable
    primary: str
    label: str


class Ground:
    """The tables of a part, with draws by chance. `run` gives the rows of a query on the untouched database; counts are kept."""

    def __init__(self, part: Part, schema: Schema, run: Run) -> None:
        self.part, self.schema, self.run = part, schema, run
        self._tables = {table.name: table for table in schema.tables}
        self._kept: dict[str, tuple[tuple[SqlValue, ...], ...]] = {}

    def rows(self, sql: str) -> tuple[tuple[SqlValue, ...], ...]:
        """Rows of a query of ours, asked once; none where it fails."""
        if sql not in self._kept:
            try:
                self._kept[sql] = tuple(tuple(row) for row in self.run(sql))
            except QueryFailed:
                self._kept[sql] = ()
        return self._kept[sql]

    def count(self, table: str, condition: str = "1") -> int:
        """How many rows of a table meet a condition."""
        found = self.rows(f"SELECT COUNT(*) FROM {quote(table)} WHERE {condition}")
        return int(found[0][0]) if found and isinstance(found[0][0], int) else 0

    def table(self, name: str) -> Table:
        """The whole table, with the columns that no question uses."""
        return self._tables[name]

    @cached_property
    def keyed(self) -> tuple[PartTable, ...]:
        """Tables whose rows have a number of their own."""
        return tuple(t for t in self.part.tables if t.primary is not None and self._whole_keys(t))

    def _whole_keys(self, table: PartTable) -> bool:
        found = self.rows(f"SELECT COUNT(*) FROM {quote(table.name)} WHERE typeof({quote(table.primary or '')}) <> 'integer'")
        return found == ((0,),)

    def choose_table(self, rng: Random, fits: Callable[[PartTable], object], *, keyed: bool = False) -> PartTable | None:
        """A table of those that fit, None where none does."""
        able = [table for table in (self.keyed if keyed else self.part.tables) if fits(table)]
        return able[rng.randrange(len(able))] if able else None

    def term(self, columns: Sequence[Column], rng: Random, *, alias: str = "", avoid: Container[str] = ()) -> Term | None:
        """A condition on one of the columns: over or under a figure, exactly a word, before or since a day."""
        able = [c for c in columns if c.conditions and c.role in ("number", "word", "date") and c.name not in avoid]
        if not able:
            return None
        column = pick_one(able, rng)
        value = pick_one(column.figures, rng)
        name = f"{alias}{quote(column.name)}"
        if column.role == "word":
            return Term(f"{name} = {literal(value)}", f"{column.name} {literal(value)}", column.name)
        low = rng.random() < 0.5
        if column.role == "date":
            return Term(f"{name} {'<' if low else '>='} {literal(value)}", f"{column.name} {'before' if low else 'on or after'} {value}", column.name)
        return Term(f"{name} {'<' if low else '>'} {value}", f"{column.name} {'under' if low else 'over'} {value}", column.name)

    def narrow(
        self, table: PartTable, rng: Random, low: int, high: int = MOST_ROWS, *, avoid: Container[str] = (), whole: float = 0.35, alias: str = ""
    ) -> Term | None:
        """A condition that `low` to `high` rows meet; an empty one (all rows) for a `whole` share of draws where they are few enough."""
        if low <= table.rows <= high and rng.random() < whole:
            return Term("", "", "")
        for _ in range(6):
            term = self.term(table.columns, rng, alias=alias, avoid=avoid)
            if term is None:
                return None
            if low <= self.count(table.name, term.sql.replace(alias, "") if alias else term.sql) <= high:
                return term
        return None

    def groups(self, table: PartTable) -> list[Column]:
        """Columns without NULLs whose values rows can be grouped by."""
        return [c for c in table.columns if (c.groups or (c.role == "key" and c.distinct <= 0.5)) and self._full(c)]

    def figures(self, table: PartTable, *, additive: bool = False) -> list[Column]:
        """Columns of numbers without NULLs."""
        return [c for c in table.numbers if self._full(c) and (c.additive or not additive)]

    def days(self, table: PartTable) -> list[Column]:
        """Columns of dates without NULLs."""
        return [c for c in table.having("date") if self._full(c)]

    def shown(self, table: PartTable) -> list[Column]:
        """Columns that a result may show."""
        return [c for c in table.columns if c.role in ("name", "word", "number", "date")]

    def holes(self, table: PartTable) -> list[Column]:
        """Readable columns with some NULLs."""
        return [c for c in table.columns if c.role in ("name", "word", "date", "number") and 0 < c.filled < 1]

    def _full(self, column: Column) -> bool:
        return column.filled == 1 and self.count(column.table, f"{quote(column.name)} IS NULL") == 0

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """References whose parent can be shown by a name, and whose child refers to it by one column only."""
        pairs = [(r.table, r.to_table) for r in self.schema.references]
        shown = {t.name: t for t in self.keyed}
        out = []
        for r in self.schema.references:
            parent, child = shown.get(r.to_table), self._tables.get(r.table)
            if parent is None or child is None or child.rows < 8 or pairs.count((r.table, r.to_table)) > 1:
                continue
            names = parent.having("name", "word")
            if names and r.to_column == parent.primary and r.table != r.to_table:
                out.append(Link(child, r.column, parent, r.to_column, names[0].name))
        return tuple(out)

    def choose_link(self, rng: Random, fits: Callable[[Link], object] = lambda link: True) -> Link | None:
        """A link of those that fit, None where none does."""
        able = [link for link in self.links if fits(link)]
        return able[rng.randrange(len(able))] if able else None

    def free_name(self, base: str, rng: Random, words: Sequence[str]) -> str:
        """A name for a new table that nothing in the database has: `words` are tried after `base`."""
        taken = {name.lower() for name in (*self._tables, *self.schema.views)}
        options = [name for name in (f"{base}_{word}".lower() if base else word for word in words) if name not in taken]
        return quote(pick_one(options, rng)) if options else quote(f"{base}_{words[0]}_{len(taken)}")

    @cached_property
    def overlaps(self) -> tuple[tuple[Column, Column], ...]:
        """Pairs of readable columns of different tables that share values, the most frequent first in each."""
        readable = [c for t in self.part.tables for c in t.columns if c.role in ("word", "name") and t.rows <= 5000][:40]
        pairs = [(a, b) for a in readable for b in readable if a.table != b.table]
        return tuple((a, b) for a, b in pairs if self._shares(a, b))

    def _shares(self, a: Column, b: Column) -> bool:
        values = f"SELECT {quote(a.name)} FROM {quote(a.table)} INTERSECT SELECT {quote(b.name)} FROM {quote(b.table)}"
        found = self.rows(f"SELECT COUNT(*) FROM ({values})")
        return bool(found) and isinstance(found[0][0], int) and found[0][0] >= 3


def pick_one(items: Sequence[T], rng: Random) -> T:
    """One of the items, by one draw."""
    return items[rng.randrange(len(items))]


def where(*conditions: str) -> str:
    """A WHERE clause of the conditions that are there, with a blank before it; nothing for none."""
    there = [condition for condition in conditions if condition]
    return f" WHERE {' AND '.join(there)}" if there else ""


def with_terms(*terms: Term | None) -> str:
    """` with …` for the terms that say something; nothing for none."""
    texts = [term.text for term in terms if term and term.text]
    return f" with {' and '.join(texts)}" if texts else ""


def told(*terms: Term | None) -> tuple[tuple[str, str], ...]:
    """The conditions that a question may give a name to."""
    return tuple((term.text, term.sql) for term in terms if term and term.text)
