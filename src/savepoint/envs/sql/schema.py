"""What a database holds, as far as questions can be asked about it: tables, references, and what each column's values are like."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import floor, inf, isfinite, log10
from typing import Literal

import apsw

SqlValue = None | int | float | str | bytes
Run = Callable[[str], Sequence[Sequence[SqlValue]]]
Role = Literal["number", "word", "date", "name", "key", "id", "other"]

SAMPLED_ROWS = 4000
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[^\W\d_][\w-]{0,11}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?")
_KEYWORDS = frozenset(word.upper() for word in apsw.keywords)


class QueryFailed(Exception):
    """A query of ours on a user's database failed; `str()` is the database's message."""


@lru_cache(maxsize=65536)
def quote(identifier: str) -> str:
    """The identifier as SQL needs it: bare where that is safe, else in double quotes."""
    if is_plain(identifier):
        return identifier
    return '"' + identifier.replace('"', '""') + '"'


def is_plain(identifier: str) -> bool:
    """Whether an identifier needs no quotes: letters, digits and underscores, and no keyword of SQLite."""
    return _PLAIN.fullmatch(identifier) is not None and identifier.upper() not in _KEYWORDS


def literal(value: int | float | str) -> str:
    """A value as SQL text."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class Column:
    """One column, and what questions can do with it.

    role: `number`; `word` (few short values of one word); `date` (ISO dates or times); `name` (other readable text); `key` (refers to a row, here or
    elsewhere); `id` (the primary key); `other` (everything else: not asked about).
    figures: values for conditions, short and spread over the column's own range: numbers at rounded quantiles, the most frequent words, days.
    exact: few whole numbers, so that "exactly" and "per" make sense. additive: sums and averages make sense (not of years or keys). distinct: the share of
    non-null sampled values that differ; filled: the share of sampled rows that are not NULL; both in [0, 1].
    """

    table: str
    name: str
    role: Role
    figures: tuple[int | float | str, ...] = ()
    exact: bool = False
    additive: bool = False
    distinct: float = 0.0
    filled: float = 1.0

    @property
    def groups(self) -> bool:
        """Whether rows can be grouped by the column's values."""
        return self.role == "word" or self.exact

    @property
    def conditions(self) -> bool:
        """Whether a condition can be put on the column."""
        return bool(self.figures)


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its columns in order, how many rows it holds, and its primary key where that is one column."""

    name: str
    columns: tuple[Column, ...]
    rows: int
    primary: str | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key of one column: `table.column` refers to `to_table.to_column`. Declared, or inferred from names and values."""

    table: str
    column: str
    to_table: str
    to_column: str


@dataclass(frozen=True, slots=True)
class Schema:
    """All ordinary tables of a database and the references among them.

    views: names that a new table must not take. unread: tables whose rows could not be read (or not in a minute).
    """

    tables: tuple[Table, ...]
    references: tuple[Reference, ...]
    views: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Definition:
    """A table as the catalogue describes it: (name, position in the primary key or 0) of each column."""

    name: str
    columns: tuple[tuple[str, int], ...]
    references: tuple[Reference, ...]

    @property
    def primary(self) -> str | None:
        """The primary key where it is one column."""
        keys = [name for name, position in self.columns if position]
        return keys[0] if len(keys) == 1 else None


def read_schema(run: Run) -> Schema:
    """Read tables, references and samples of values. `run` gives the rows of a query, or raises QueryFailed. Tables that cannot be read are only named."""
    entries = run("SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY rowid")
    virtual = [str(name) for kind, name, sql in entries if kind == "table" and str(sql).upper().startswith("CREATE VIRTUAL")]
    ordinary = [
        str(name) for kind, name, _ in entries
        if kind == "table" and name not in virtual and not any(str(name).startswith(f"{parent}_") for parent in virtual)
    ]  # fmt: skip
    definitions = _resolve([_definition(run, name) for name in ordinary])
    inferred = _infer_references(run, definitions)
    references = tuple(r for d in definitions for r in (*d.references, *inferred[d.name]))
    keys = {(r.table, r.column) for r in references}
    tables = {d.name: _table(run, d, keys) for d in definitions}
    return Schema(
        tuple(table for table in tables.values() if table is not None), references,
        views=tuple(str(name) for kind, name, _ in entries if kind == "view" or name in virtual),
        unread=tuple(name for name, table in tables.items() if table is None),
    )  # fmt: skip


def _definition(run: Run, name: str) -> _Definition:
    columns = tuple((str(row[1]), int(row[5] or 0)) for row in run(f"PRAGMA table_info({quote(name)})"))
    rows = run(f"PRAGMA foreign_key_list({quote(name)})")
    parts = Counter(row[0] for row in rows)
    # Keys of several columns are left out. A key that names no column refers to the primary key: resolved once all tables are known.
    references = tuple(Reference(name, str(row[3]), str(row[2]), str(row[4] or "")) for row in reversed(rows) if parts[row[0]] == 1)
    return _Definition(name, columns, references)


def _resolve(definitions: list[_Definition]) -> list[_Definition]:
    """The definitions with references in the spelling of the tables and columns they mean; those to nothing are dropped."""
    tables = {d.name.lower(): d for d in definitions}
    out = []
    for d in definitions:
        found = []
        for r in d.references:
            target = tables.get(r.to_table.lower())
            columns = {name.lower(): name for name, _ in target.columns} if target else {}
            to_column = columns.get(r.to_column.lower()) if r.to_column else target.primary if target else None
            own = next((name for name, _ in d.columns if name.lower() == r.column.lower()), None)
            if target and to_column and own:
                found.append(Reference(d.name, own, target.name, to_column))
        out.append(_Definition(d.name, d.columns, tuple(found)))
    return out


def _infer_references(run: Run, definitions: list[_Definition]) -> dict[str, list[Reference]]:
    """References that nobody declared: `city_id` to the primary key `id` or `city_id` of `city` or `cities`, if every value is found there."""
    out: dict[str, list[Reference]] = {d.name: [] for d in definitions}
    for d in definitions:
        declared = {r.column for r in d.references}
        for column, _ in d.columns:
            stem = re.sub(r"_?id$", "", column, flags=re.IGNORECASE).lower()
            if column in declared or column == d.primary or not stem or stem == column.lower():
                continue
            for target in definitions:
                fits = target.name.lower() in (stem, f"{stem}s", f"{stem}es", f"{stem[:-1]}ies") and target is not d
                if fits and target.primary and target.primary.lower() in ("id", column.lower()) and _contained(run, d.name, column, target):
                    out[d.name].append(Reference(d.name, column, target.name, target.primary))
                    break
    return out


def _contained(run: Run, table: str, column: str, target: _Definition) -> bool:
    values = f"SELECT DISTINCT {quote(column)} AS v FROM {quote(table)} WHERE {quote(column)} IS NOT NULL LIMIT 1000"
    key = quote(target.primary or "")
    try:
        ((total, missing),) = run(f"SELECT count(*), count(*) FILTER (WHERE v NOT IN (SELECT {key} FROM {quote(target.name)})) FROM ({values})")
    except QueryFailed:
        return False
    return bool(total) and missing == 0


def _table(run: Run, definition: _Definition, keys: set[tuple[str, str]]) -> Table | None:
    """A table with the roles of its columns, judged by a sample of its rows; None when it cannot be read."""
    name = quote(definition.name)
    try:
        ((rows,),) = run(f"SELECT count(*) FROM {name}")
        assert isinstance(rows, int)
        sample = run(f"SELECT {', '.join(_short(column) for column, _ in definition.columns)} FROM {name}{_spread_over(run, name, rows)}")
    except QueryFailed:
        return None
    columns = []
    for position, (column, _) in enumerate(definition.columns):
        values = [row[position] for row in sample if row[position] is not None]
        if column == definition.primary:
            columns.append(Column(definition.name, column, "id"))
        else:
            judged = _column(definition.name, column, values, (definition.name, column) in keys or _named_key(column))
            columns.append(replace(judged, filled=len(values) / max(1, len(sample))))
    return Table(definition.name, tuple(columns), rows, definition.primary)


def _short(column: str) -> str:
    """The column with BLOBs emptied and texts cut to 100 characters: more is not needed to judge it, and pictures would fill the memory."""
    name = quote(column)
    return f"CASE typeof({name}) WHEN 'blob' THEN x'' WHEN 'text' THEN substr({name}, 1, 100) ELSE {name} END"


def _spread_over(run: Run, name: str, rows: int) -> str:
    """The clause that samples a large table evenly by rowid; its first rows where it has none."""
    if rows > SAMPLED_ROWS:
        try:
            ((low, high),) = run(f"SELECT min(rowid), max(rowid) FROM {name}")
            if isinstance(low, int) and isinstance(high, int):
                step = max(1, (high - low + 1) // SAMPLED_ROWS)
                wanted = "WITH RECURSIVE n(i) AS (SELECT {} UNION ALL SELECT i + {} FROM n WHERE i + {} <= {}) SELECT i FROM n"
                return f" WHERE rowid IN ({wanted.format(low, step, step, high)}) LIMIT {SAMPLED_ROWS}"
        except QueryFailed:
            pass  # WITHOUT ROWID
    return f" LIMIT {SAMPLED_ROWS}"


def _named_key(column: str) -> bool:
    return column.lower() in ("id", "rowid", "uuid") or column.endswith(("_id", "Id", "ID")) or column.lower().endswith("_id")


def _column(table: str, name: str, values: list[SqlValue], key: bool) -> Column:
    """Judge a column by its non-null sampled values."""
    counts = Counter(values)
    share = len(counts) / max(1, len(values))
    if len(counts) < 2:
        return Column(table, name, "other")
    if all(isinstance(value, int | float) for value in values):
        numbers = sorted(value for value in values if isinstance(value, int | float))
        exact = len(counts) <= 20 and all(isinstance(value, int) for value in counts)
        if key:
            return Column(table, name, "key", tuple(sorted(set(numbers))) if exact else (), exact, distinct=share)
        if len(counts) > 3:
            year = isinstance(numbers[0], int) and numbers[0] >= 1800 and numbers[-1] <= 2100
            figures = tuple(sorted(set(numbers))) if exact else _figures(numbers)
            return Column(table, name, "number", figures, exact, additive=not year, distinct=share)
        return Column(table, name, "other")
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values) or any("\ud800" <= c <= "\udfff" for text in counts if isinstance(text, str) for c in text):
        return Column(table, name, "other")  # mixed types, BLOBs, or bytes that are no UTF-8
    if sum(_DATE.fullmatch(text) is not None for text in texts) >= 0.95 * len(texts):
        return Column(table, name, "date", _days(sorted(texts)), distinct=share)
    if key:
        return Column(table, name, "key", distinct=share)
    return _text_column(table, name, texts, share)


def _text_column(table: str, name: str, texts: list[str], share: float) -> Column:
    words = Counter(text for text in texts if _WORD.fullmatch(text))
    common = sorted(words.items(), key=lambda item: (-item[1], item[0]))[:6]
    few = share <= 0.5 and len(set(texts)) <= 80
    if few and len(words) >= 2 and sum(words.values()) >= 0.5 * len(texts):
        return Column(table, name, "word", tuple(word for word, _ in common), distinct=share)
    letters = sum(sum(c.isalpha() for c in text) >= 0.5 * len(text) and "@" not in text and len(text) <= 60 for text in texts)
    return Column(table, name, "name" if letters >= 0.8 * len(texts) else "other", distinct=share)


def _figures(numbers: list[int | float]) -> tuple[int | float, ...]:
    """Short figures over the middle of a column's range: its 5 % quantiles, rounded to a step of 1, 2 or 5 times a power of ten."""
    quantiles = [numbers[(len(numbers) - 1) * k // 20] for k in range(1, 20)]
    spread = float(quantiles[-1]) - float(quantiles[0])
    if not 1e-280 < spread < inf:
        return ()
    power = floor(log10(spread / 15))
    unit = spread / 15 / 10.0**power
    step = (1 if unit <= 1 else 2 if unit <= 2 else 5 if unit <= 5 else 10) * 10.0**power
    whole = all(isinstance(number, int) for number in numbers)
    rounded = {round(round(q / step) * step, max(0, -power)) for q in quantiles}
    within = [value for value in rounded if isfinite(value) and numbers[0] <= value <= numbers[-1]]
    return tuple(sorted({int(value) if whole or value == int(value) else value for value in within}))


def _days(texts: list[str]) -> tuple[str, ...]:
    """Days at the 10 % quantiles, the first of a month where the column spans more than a year."""
    days = [texts[(len(texts) - 1) * k // 10][:10] for k in range(1, 10)]
    long = int(texts[-1][:4]) - int(texts[0][:4]) > 1
    return tuple(sorted({f"{day[:8]}01" if long else day for day in days}))
