"""The schema as prompts show it, within a budget of tokens: what is cut, and in which order, is fixed, and the text itself says what was cut.

    nothing; all sample rows but one; sample rows; what values mean; what columns mean; indexes, triggers and definitions of views;
    constraints (columns with types and keys stay); types and keys (names stay); columns of the tables that matter least; their names

Each step is taken for all tables alike, and only if the text is still too long; the last two take as few tables as will do. Tables that the task
names matter most, then those that a foreign key ties to them, then the others in the order of the catalogue. The same database, task and format
give the same text, byte for byte, whichever model reads it: tokens are counted as four bytes each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from savepoint.envs.messages import bytes_over_four
from savepoint.envs.sql.catalogue import ColumnEntry, TableEntry
from savepoint.envs.sql.observation import ObservationFormat, show_value
from savepoint.envs.sql.schema import quote

SMALLEST = 64
"""No budget is smaller: the line that says what was cut always fits."""


@dataclass(frozen=True, slots=True)
class SchemaFormat:
    """How much of a schema is shown. max_tokens: of the whole text, four bytes of UTF-8 each; max_cell, max_description: characters of one."""

    max_tokens: int = 2000
    sample_rows: int = 3
    max_cell: int = 60
    max_description: int = 200

    def __post_init__(self) -> None:
        if self.max_tokens < SMALLEST or self.sample_rows < 0 or min(self.max_cell, self.max_description) < 1:
            raise ValueError(f"schema: at least {SMALLEST} tokens, no negative number of rows, and at least 1 character of a value")


@dataclass(frozen=True, slots=True)
class _Detail:
    """What is shown of every table, and the words for what is not."""

    rows: int
    values: bool = True
    descriptions: bool = True
    extras: bool = True
    form: str = "definition"
    cut: tuple[str, ...] = ()


def render_schema(tables: Sequence[TableEntry], form: SchemaFormat, task_text: str = "") -> str:
    """The schema within `form.max_tokens`. `task_text`: what the user says and ran, which decides what stays when tables must be left out."""
    steps = _details(tables, form)
    for detail in steps:
        text = _join([_table(table, detail, form) for table in tables], detail.cut)
        if _fits(text, form):
            return text
    return _fewer_tables(by_relevance(tables, task_text), steps[-1].cut, form)


def by_relevance(tables: Sequence[TableEntry], task_text: str) -> list[TableEntry]:
    """Tables that the text names, then those that a foreign key ties to one of them, then the rest; each in the order of the catalogue."""
    words = set(re.findall(r"\w+", task_text.lower()))
    lowered = task_text.lower()

    def named(name: str) -> bool:
        return name.lower() in words or (not name.isidentifier() and name.lower() in lowered)

    mentioned = {table.name.lower() for table in tables if named(table.name)}
    refers = {table.name.lower(): {column.target.split(".")[0].lower() for column in table.columns if column.target} for table in tables}
    near = {name for name, targets in refers.items() if targets & mentioned} | {target for name in mentioned for target in refers[name]}
    return sorted(tables, key=lambda table: 0 if table.name.lower() in mentioned else 1 if table.name.lower() in near else 2)


def _details(tables: Sequence[TableEntry], form: SchemaFormat) -> list[_Detail]:
    """Everything first, then each step of the cutting order on top of those before. What these tables do not have is no step."""
    steps = [_Detail(form.sample_rows)]

    def then(word: str, instead_of: str | None = None, **less: object) -> None:
        kept = tuple(said for said in steps[-1].cut if said != instead_of)
        steps.append(replace(steps[-1], cut=(*kept, word), **less))  # type: ignore[arg-type]

    columns = [column for table in tables for column in table.columns]
    rows = min(form.sample_rows, max((len(table.sample.rows) for table in tables), default=0))
    if rows > 1:
        then("sample rows but one a table", rows=1)
    if rows:
        then("sample rows", "sample rows but one a table", rows=0)
    if any(column.values for column in columns):
        then("what values mean", values=False)
    if any(column.description for column in columns):
        then("what columns mean", descriptions=False)
    if any(table.extras or table.kind == "view" for table in tables):
        then("indexes, triggers and definitions of views", extras=False)
    then("constraints", form="typed")
    then("types and keys", form="names")
    return steps


def _table(table: TableEntry, detail: _Detail, form: SchemaFormat) -> str:
    if detail.form != "definition" or (table.kind == "view" and not detail.extras):
        return _short(table, typed=detail.form != "names")
    lines = [f"{table.sql.rstrip().rstrip(';')};"]
    lines += [line for column in table.columns if (line := _described(column, detail, form))]
    lines += _sample(table, detail.rows, form)
    if detail.extras:
        lines += [f"{sql.rstrip().rstrip(';')};" for sql in table.extras]
    return "\n".join(lines)


def _short(table: TableEntry, typed: bool) -> str:
    columns = []
    for column in table.columns:
        parts = [quote(column.name)]
        if typed:
            parts += [column.type] * bool(column.type) + ["PRIMARY KEY"] * column.primary + [f"-> {column.target}"] * bool(column.target)
        columns.append(" ".join(parts))
    return f"{'view ' if table.kind == 'view' else ''}{quote(table.name)}({', '.join(columns)})"


def _described(column: ColumnEntry, detail: _Detail, form: SchemaFormat) -> str:
    said = [column.description] * (detail.descriptions and bool(column.description))
    said += [f"values: {column.values}"] * (detail.values and bool(column.values))
    return f"-- {column.name}: {'; '.join(_cut(text, form.max_description) for text in said)}" if said else ""


def _sample(table: TableEntry, rows: int, form: SchemaFormat) -> list[str]:
    if table.kind == "view" or not rows:
        return []
    if table.sample.status != "ok":
        return [f"-- its rows cannot be read: {table.sample.error or table.sample.status}"]
    shown = table.sample.rows[:rows]
    cells = ObservationFormat(max_cell=form.max_cell)
    if not shown:
        return ["-- no rows"]
    head = f"-- first {'row' if len(shown) == 1 else f'{len(shown)} rows'}: {', '.join(table.sample.columns)}"
    return [head, *("--   " + ", ".join(_flat(show_value(value, cells)) for value in row) for row in shown)]


def _fewer_tables(ranked: list[TableEntry], cut: tuple[str, ...], form: SchemaFormat) -> str:
    """The columns of as many tables as fit, best first, and names of the others; where names alone are too long, as many of them as fit."""
    columns = [_short(table, typed=False) for table in ranked]
    names = [quote(table.name) for table in ranked]
    total = len(ranked)

    def text(described: int, named: int) -> str:
        rest = [f"and {', '.join(names[described:named])}"] if named > described else []
        said = [f"columns of {total - described} of {total} tables"] + ([f"names of {total - named}"] if named < total else [])
        return _join([*columns[:described], *rest], (*cut, *said))

    described = _most(total, lambda n: _fits(text(n, total), form))
    if described is not None:
        return text(described, total)
    named = _most(total, lambda n: _fits(text(0, n), form))
    return text(0, named) if named is not None else _join([], ("everything",))


def _most(upto: int, fits: Callable[[int], bool]) -> int | None:
    """The largest n in 0..upto for which `fits(n)`, which holds for all smaller ones too; None where it holds for none."""
    low, high = -1, upto
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return None if low < 0 else low


def _join(parts: Sequence[str], cut: Sequence[str]) -> str:
    text = "\n".join([*parts, *([f"-- cut for length: {'; '.join(cut)}"] if cut else [])])
    # Names that are no UTF-8 reach us with surrogates, which no tokenizer and no endpoint takes.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _fits(text: str, form: SchemaFormat) -> bool:
    return bytes_over_four(text) <= form.max_tokens


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:width]}..."


def _flat(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
