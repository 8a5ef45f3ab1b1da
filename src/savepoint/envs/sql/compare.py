"""When two results are the same answer: multisets of rows, in order where the gold orders, with SQLite's types kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import sqlglot
from sqlglot import exp

Row = tuple[object, ...]
_TOLERANCE = 1e-9


def orders_rows(sql: str) -> bool:
    """Whether a statement has a top-level ORDER BY, seen in its syntax tree: not one of a sub-query, a window, an aggregate or a literal.

    SQL that sqlglot cannot parse counts as unordered: then only the rows decide.
    """
    try:
        tree = sqlglot.parse_one(sql, dialect="sqlite")
    except sqlglot.errors.SqlglotError:
        return False
    return isinstance(tree, exp.Query) and tree.args.get("order") is not None


def cells_equal(a: object, b: object, decimal: int | None = None) -> bool:
    """NULL equals NULL only; integers exactly; a REAL on either side within 1e-9 relative (or half a unit of `decimal`); text and BLOB by bytes."""
    if isinstance(a, float) or isinstance(b, float):
        if not isinstance(a, int | float) or not isinstance(b, int | float):
            return False
        if a == b:
            return True
        try:
            gap = abs(a - b)
        except OverflowError:
            return False
        if gap != gap or gap == float("inf"):
            return False
        return gap <= _TOLERANCE * max(1.0, abs(a), abs(b)) or (decimal is not None and gap <= 0.5 * 10.0**-decimal)
    return type(a) is type(b) and a == b


def rows_equal(a: Row, b: Row, decimal: int | None = None) -> bool:
    return len(a) == len(b) and all(cells_equal(x, y, decimal) for x, y in zip(a, b, strict=True))


def difference(prediction: Sequence[Row], gold: Sequence[Row], *, ordered: bool, decimal: int | None = None) -> str | None:
    """None when the rows are the same answer, else one line that says where they first differ."""
    if len(prediction) != len(gold):
        return f"{len(prediction)} rows, expected {len(gold)}"
    if ordered:
        for number, (row, wanted) in enumerate(zip(prediction, gold, strict=True), 1):
            if not rows_equal(row, wanted, decimal):
                return f"row {number} is {row!r}, expected {wanted!r}"
        return None
    surplus, missing = Counter(prediction), Counter(gold)
    both = surplus & missing
    unpaired = _pair(list((surplus - both).elements()), list((missing - both).elements()), decimal)
    return None if unpaired is None else f"row {unpaired!r} is not in the expected result"


def _pair(rows: list[Row], wanted: list[Row], decimal: int | None) -> Row | None:
    """Pair rows one to one within the tolerance (augmenting paths); the first row left over, or None.

    What equality of Python values has paired is gone already: here are only rows that differ by rounding, or are wrong.
    """
    partner: dict[int, int] = {}
    buckets: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(wanted):
        buckets.setdefault(_shape(row), []).append(index)

    def augment(row: Row, seen: set[int]) -> list[tuple[int, Row]] | None:
        for index in buckets.get(_shape(row), ()):
            if index not in seen and rows_equal(row, wanted[index], decimal):
                seen.add(index)
                if index not in partner:
                    return [(index, row)]
                displaced = augment(rows[partner[index]], seen)
                if displaced is not None:
                    return [*displaced, (index, row)]
        return None

    for number, row in enumerate(rows):
        path = augment(row, set())
        if path is None:
            return row
        taken = {id(row): number} | {id(rows[n]): n for n in partner.values()}
        for index, owner in path:
            partner[index] = taken[id(owner)]
    return None


def _shape(row: Row) -> tuple[object, ...]:
    """A row with its numbers left out: rows can only be paired when these are equal."""
    return tuple("number" if isinstance(value, int | float) else value for value in row)
