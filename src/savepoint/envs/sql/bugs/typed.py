"""Kinds of bug: each makes a broken query out of a right one, so that the question alone tells what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from savepoint.envs.sql.part import Part
from savepoint.envs.sql.query import AGGREGATES, Operator, Query, Ref


@dataclass(frozen=True, slots=True)
class Bug:
    """A kind of bug. `apply` gives the broken query, or None where the kind does not apply. `weight`: how readily it is drawn where several apply."""

    apply: Callable[[Query, Part, Random], Query | None]
    weight: int = 1


def misspell(word: str, rng: Random) -> str:
    """The word with one letter (not the first) lost or doubled."""
    at = rng.randrange(1, len(word)) if len(word) > 1 else 1
    return word[:at] + word[at + 1 :] if rng.random() < 0.5 and len(word) > 1 else word[:at] + word[at - 1] + word[at:]


def _misspelled_column(query: Query, part: Part, rng: Random) -> Query | None:
    wrong = query.select[0] if query.select else query.aggregate[1] if query.aggregate else None
    wrong = wrong or (query.where.ref if query.where else None)
    if wrong is None:
        return None
    spelled = misspell(wrong.column, rng)
    known = {column.lower() for name in query.tables for column in part.table(name).all_columns}
    if spelled.lower() in known:
        return None
    # A group is misspelled as its column is; an order or condition on it, written elsewhere, is not.
    at = Ref(wrong.table, spelled)
    if query.select:
        return replace(query, select=(at, *query.select[1:]), group=at if query.group == wrong else query.group)
    if query.aggregate and query.aggregate[1]:
        return replace(query, aggregate=(query.aggregate[0], at))
    return replace(query, where=query.where and replace(query.where, ref=at))


def _wrong_column(query: Query, part: Part, rng: Random) -> Query | None:
    """Another column of the same table, in place of the aggregated one or else of the first selected one."""
    if query.aggregate and query.aggregate[1]:
        function, right = query.aggregate
        assert right is not None
        other = [c.name for c in part.table(right.table).numbers if c.name != right.column and (c.additive or function in ("MAX", "MIN"))]
        return replace(query, aggregate=(function, Ref(right.table, rng.choice(other)))) if other else None
    if not query.select:
        return None
    right = query.select[0]
    used = {ref.column for ref in query.refs if ref.table == right.table}
    other = [c.name for c in part.table(right.table).columns if c.name not in used]
    if not other:
        return None
    at = Ref(right.table, rng.choice(other))
    return replace(query, select=(at, *query.select[1:]), group=at if query.group == right else query.group)


def _wrong_table(query: Query, part: Part, rng: Random) -> Query | None:
    other = [table.name for table in part.tables if table.name != query.table]
    return replace(query, table=rng.choice(other)) if other and query.join is None else None


def _wrong_aggregate(query: Query, part: Part, rng: Random) -> Query | None:
    if query.aggregate is None or query.aggregate[1] is None:
        return None
    function, ref = query.aggregate
    return replace(query, aggregate=(rng.choice([name for name in AGGREGATES if name != function]), ref))


def _missing_group_by(query: Query, part: Part, rng: Random) -> Query | None:
    return replace(query, group=None) if query.group else None


def _wrong_comparison(query: Query, part: Part, rng: Random) -> Query | None:
    """The comparison the other way round."""
    if query.where is None or query.where.operator == "=":
        return None
    turned: Operator = "<"
    if query.where.operator == "<":
        turned = ">=" if query.where.is_date else ">"
    return replace(query, where=replace(query.where, operator=turned))


def _wrong_join_key(query: Query, part: Part, rng: Random) -> Query | None:
    """Key to key instead of the reference: `orders.id = customers.id`."""
    if query.join is None:
        return None
    primary = part.table(query.join.left.table).primary
    if primary is None or primary == query.join.left.column:
        return None
    return replace(query, join=replace(query.join, left=Ref(query.join.left.table, primary)))


def _wrong_direction(query: Query, part: Part, rng: Random) -> Query | None:
    return replace(query, order=(query.order[0], not query.order[1])) if query.order else None


def _lost_distinct(query: Query, part: Part, rng: Random) -> Query | None:
    return replace(query, distinct=False) if query.distinct else None


def _lost_condition(query: Query, part: Part, rng: Random) -> Query | None:
    return replace(query, where=None) if query.where else None


BUGS: dict[str, Bug] = {
    "misspelled_column": Bug(_misspelled_column),
    "wrong_column": Bug(_wrong_column),
    "wrong_table": Bug(_wrong_table),
    "wrong_aggregate": Bug(_wrong_aggregate),
    "missing_group_by": Bug(_missing_group_by, weight=2),
    "wrong_comparison": Bug(_wrong_comparison, weight=2),
    "wrong_join_key": Bug(_wrong_join_key, weight=2),
    "wrong_direction": Bug(_wrong_direction),
    "lost_distinct": Bug(_lost_distinct, weight=2),
    "lost_condition": Bug(_lost_condition),
}


def break_query(query: Query, part: Part, kinds: tuple[str, ...], rng: Random) -> tuple[str, Query] | None:
    """One of the kinds that apply to the query, drawn by weight, and the broken query; None when no kind applies."""
    made = [(kind, broken) for kind in kinds if (broken := BUGS[kind].apply(query, part, rng)) is not None]
    if not made:
        return None
    return rng.choices(made, [BUGS[kind].weight for kind, _ in made])[0]
