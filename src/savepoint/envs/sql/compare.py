"""When two results are the same answer: multisets of rows, in order where the gold orders, with SQLite's types kept apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from savepoint.envs.sql.lexer import clauses

Row = tuple[object, ...]
_TOLERANCE = 1e-9
# Steps of the search for a pairing within the tolerance. An honest result needs a few a row; beyond, rows count as different.
_PAIRING_STEPS = 4_000_000
_SHOWN_CELL, _SHOWN_ROW = 80, 400


@dataclass(frozen=True, slots=True)
class Rules:
    """How rows are compared. ordered: in the gold's order (None: if the gold has an ORDER BY). duplicates: whether a repeated row counts. decimal: digits
    that matter of a REAL."""

    ordered: bool | None = None
    duplicates: bool = True
    decimal: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with equal ORDER BY keys. take: how many of them the result holds; fewer than there are where LIMIT or OFFSET cuts the group."""

    rows: tuple[Row, ...]
    take: int


def orders_rows(sql: str) -> bool:
    """Whether a statement has a top-level ORDER BY: not one of a sub-query, a window, an aggregate, a literal or a comment."""
    found = clauses(sql)
    return found is not None and bool(found.order)


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


def difference(prediction: Sequence[Row], gold: Sequence[Row], *, ordered: bool = False, duplicates: bool = True, decimal: int | None = None) -> str | None:
    """None when the rows are the same answer, else one line that says where they first differ. The rules are those of `Rules`."""
    if not duplicates:
        prediction, gold = _distinct(prediction), _distinct(gold)
    if ordered:
        return _first_difference(prediction, gold, decimal)
    if not duplicates:
        return _set_difference(prediction, gold, decimal)
    if len(prediction) != len(gold):
        surplus = list((Counter(prediction) - Counter(gold)).elements())
        first = f"; unexpected: {show(surplus[0])}" if surplus else ""
        return f"{len(prediction)} rows, expected {len(gold)}{first}"
    left = unpaired(prediction, gold, decimal)
    return None if left is None else f"row {show(left)} is not in the expected result"


def group_difference(prediction: Sequence[Row], groups: Sequence[Group], rules: Rules) -> str | None:
    """As `difference`, where the gold leaves open the order inside a group, and which rows of a cut group it gives."""
    decimal = rules.decimal
    if not rules.duplicates:
        return _set_group_difference(_distinct(prediction), groups, rules)
    total = sum(group.take for group in groups)
    if len(prediction) != total:
        return f"{len(prediction)} rows, expected {total}"
    if rules.ordered:
        at = 0
        for group in groups:
            left = unpaired(prediction[at : at + group.take], group.rows, decimal)
            if left is not None:
                return f"row {show(left)} is not among rows {at + 1} to {at + group.take} of the expected result"
            at += group.take
        return None
    return _unordered_group_difference(prediction, groups, total, decimal)


def _unordered_group_difference(prediction: Sequence[Row], groups: Sequence[Group], total: int, decimal: int | None) -> str | None:
    """Rows may stand anywhere, but whole groups must be there, and of each cut group as many as the gold takes.

    Pairing rows with groups of limited room is a flow. By max-flow min-cut it exists when no choice of full groups is a bottleneck, and at most two groups
    are cut (one by OFFSET, one by LIMIT): so four counts decide.
    """
    whole = [row for group in groups if group.take == len(group.rows) for row in group.rows]
    cut = [group for group in groups if group.take < len(group.rows)]
    left = unpaired(prediction, [*whole, *(row for group in cut for row in group.rows)], decimal)
    if left is not None:
        return f"row {show(left)} is not in the expected result"
    missing = unpaired(whole, prediction, decimal)
    if missing is not None:
        return f"row {show(missing)} is missing"
    for group in cut if len(cut) > 1 else ():
        others = [*whole, *(row for other in cut if other is not group for row in other.rows)]
        if _Pairing(list(prediction), others, decimal).size() + group.take < total:
            return f"more than {group.take} rows are of a group that the expected result has {group.take} of"
    return None


def unpaired(rows: Sequence[Row], wanted: Sequence[Row], decimal: int | None = None) -> Row | None:
    """A row that is left over when the rows are paired one to one with equal ones of `wanted` (which may hold more); None when all find a partner."""
    surplus, missing = Counter(rows), Counter(wanted)
    both = surplus & missing
    left = list((surplus - both).elements())
    if not left:
        return None
    # Taking exact matches away first is quick and nearly always right; but nearness is no equivalence, and a row may have to give its partner up.
    found = _Pairing(left, list((missing - both).elements()), decimal).unpaired()
    if found is None:
        return None
    touched = {_shape(row) for row in left}
    return _Pairing([r for r in rows if _shape(r) in touched], [r for r in wanted if _shape(r) in touched], decimal).unpaired()


class _Pairing:
    """A maximum pairing of rows within the tolerance, by shortest augmenting paths. Rows whose text, blobs and NULLs differ never meet."""

    def __init__(self, rows: list[Row], wanted: Sequence[Row], decimal: int | None) -> None:
        self.rows, self.decimal, self.steps = rows, decimal, 0
        self.wanted: dict[Row, list[tuple[Row, int]]] = {}
        for index, row in enumerate(wanted):
            self.wanted.setdefault(_shape(row), []).append((row, index))
        for bucket in self.wanted.values():
            bucket.sort(key=lambda item: _numbers(item[0]))
        self.firsts = {shape: [_first_number(row) for row, _ in bucket] for shape, bucket in self.wanted.items()}
        self.owner: dict[int, int] = {}  # index of a wanted row -> index of the row that has it
        self.held: dict[int, int] = {}  # and back

    def unpaired(self) -> Row | None:
        """The first row that finds no partner, in the order of numbers; None when all do."""
        return next((self.rows[number] for number in self._order() if not self._place(number)), None)

    def size(self) -> int:
        """How many rows find a partner."""
        return sum(self._place(number) for number in self._order())

    def candidates(self, row: Row) -> list[int]:
        """The wanted rows that equal a row."""
        shape = _shape(row)
        bucket, firsts, first = self.wanted.get(shape, []), self.firsts.get(shape, []), _first_number(row)
        reach = _reach(first, self.decimal)
        low, high = bisect_left(firsts, first - reach), bisect_right(firsts, first + reach)
        self.steps += high - low + 1
        return [index for wanted, index in bucket[low:high] if rows_equal(row, wanted, self.decimal)]

    def _order(self) -> list[int]:
        return sorted(range(len(self.rows)), key=lambda i: _numbers(self.rows[i]))

    def _place(self, number: int) -> bool:
        """Find a partner for a row, moving others where that helps (breadth first)."""
        came: dict[int, int] = {}
        queue = deque([number])
        while queue and self.steps <= _PAIRING_STEPS:
            row = queue.popleft()
            for index in self.candidates(self.rows[row]):
                if index in came:
                    continue
                came[index] = row
                if index not in self.owner:
                    self._turn(index, came, number)
                    return True
                queue.append(self.owner[index])
        return False

    def _turn(self, index: int, came: dict[int, int], number: int) -> None:
        """Give each row on the path the partner that it asked for."""
        while True:
            row = came[index]
            before = self.held.get(row)
            self.owner[index], self.held[row] = row, index
            if row == number or before is None:
                return
            index = before


def _reach(value: float, decimal: int | None) -> float:
    """How far from a number its equals can lie, with something to spare."""
    return 3 * max(_TOLERANCE * max(1.0, abs(value)), 0.5 * 10.0**-decimal if decimal is not None else 0.0)


def _numbers(row: Row) -> tuple[float, ...]:
    return tuple(_as_float(value) for value in row if isinstance(value, int | float))


def _first_number(row: Row) -> float:
    return next((_as_float(value) for value in row if isinstance(value, int | float)), 0.0)


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _shape(row: Row) -> Row:
    """A row with its numbers left out: rows can only be paired when these are equal."""
    return tuple("number" if isinstance(value, int | float) else (type(value).__name__, value) for value in row)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    return list(dict.fromkeys(rows))


def _first_difference(prediction: Sequence[Row], gold: Sequence[Row], decimal: int | None) -> str | None:
    for number, (row, wanted) in enumerate(zip(prediction, gold, strict=False), 1):
        if not rows_equal(row, wanted, decimal):
            return f"row {number} is {show(row)}, expected {show(wanted)}"
    if len(prediction) != len(gold):
        return f"{len(prediction)} rows, expected {len(gold)}"
    return None


class _Known:
    """Rows to look others up in, within the tolerance."""

    def __init__(self, rows: Sequence[Row], decimal: int | None) -> None:
        self._rows, self._decimal, self._exact = rows, decimal, set(rows)
        self._near: _Pairing | None = None

    def has(self, row: Row) -> bool:
        if row in self._exact:
            return True
        self._near = self._near or _Pairing([], self._rows, self._decimal)
        return bool(self._near.candidates(row))

    def outsider(self, rows: Sequence[Row]) -> Row | None:
        return next((row for row in rows if not self.has(row)), None)


def _set_difference(prediction: Sequence[Row], gold: Sequence[Row], decimal: int | None) -> str | None:
    for rows, others, words in ((prediction, gold, "is not in the expected result"), (gold, prediction, "is missing")):
        left = _Known(others, decimal).outsider(rows)
        if left is not None:
            return f"row {show(left)} {words}"
    return None


def _set_group_difference(prediction: Sequence[Row], groups: Sequence[Group], rules: Rules) -> str | None:
    """Where duplicates do not count: whole groups are there, of cut ones no more than they give, and rows come in the order of their groups."""
    given = _Known(prediction, rules.decimal)
    whole = [group for group in groups if group.take == len(group.rows)]
    missing = given.outsider([row for group in whole for row in group.rows])
    if missing is not None:
        return f"row {show(missing)} is missing"
    left = _Known([row for group in groups for row in group.rows], rules.decimal).outsider(prediction)
    if left is not None:
        return f"row {show(left)} is not in the expected result"
    if rules.ordered:
        at = 0
        for group in groups:
            known = _Known(group.rows, rules.decimal)
            while at < len(prediction) and known.has(prediction[at]):
                at += 1
        if at < len(prediction):
            return f"row {at + 1} is {show(prediction[at])}, which is out of place"
    most = len({row for group in whole for row in group.rows}) + sum(group.take for group in groups if group.take < len(group.rows))
    if len(prediction) > most or (not prediction and groups):
        return f"{len(prediction)} different rows, expected {most}"
    return None


def show(row: Row) -> str:
    """A row for a person: long values and long rows cut, bytes and what is no text escaped."""
    cells = [text if len(text) <= _SHOWN_CELL else text[:_SHOWN_CELL] + "…" for text in map(_shown, row)]
    text = "(" + ", ".join(cells) + ("," if len(cells) == 1 else "") + ")"
    return text if len(text) <= _SHOWN_ROW else text[:_SHOWN_ROW] + "…)"


def _shown(value: object) -> str:
    short = value[: _SHOWN_CELL + 1] if isinstance(value, str | bytes) else value
    return "NULL" if value is None else repr(short).encode("utf-8", "backslashreplace").decode("utf-8")
