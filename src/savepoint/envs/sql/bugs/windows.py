"""Faults of order and windows: lost PARTITION BY, the default frame, running totals over ties, LIMIT without ORDER BY."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, in_statement
from savepoint.envs.sql.bugs.ground import Ground, Term, pick_one, told, where, with_terms
from savepoint.envs.sql.part import PartTable
from savepoint.envs.sql.schema import Column, quote

_WHOLE_FRAME = "ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING"
_SO_FAR = "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"


def _ranked(ground: Ground, rng: Random, low: int = 8) -> tuple[PartTable, Column, Column, Term] | None:
    """A table with a key, a column to group by, another to measure, and a condition that leaves a list of readable length."""
    table = ground.choose_table(rng, lambda t: ground.groups(t) and ground.figures(t), keyed=True)
    if table is None:
        return None
    group = pick_one(ground.groups(table), rng)
    values = [c for c in ground.figures(table) if c.name != group.name]
    if not values:
        return None
    term = ground.narrow(table, rng, low, avoid=(group.name,))
    return None if term is None else (table, group, pick_one(values, rng), term)


def best_of_each_group(ground: Ground, rng: Random) -> Draft | None:
    """The first n rows of each group."""
    found = _ranked(ground, rng, low=20)
    if found is None:
        return None
    table, group, value, term = found
    n, down = rng.randint(1, 3), rng.random() < 0.6
    key, name, number = quote(table.primary or ""), quote(group.name), quote(value.name)
    place = f"ROW_NUMBER() OVER (PARTITION BY {name} ORDER BY {number}{' DESC' if down else ''}, {key}) AS place"
    sql = f"SELECT {name}, {key}, {number} FROM (SELECT {name}, {key}, {number}, {place} FROM {quote(table.name)}{where(term.sql)}) WHERE place <= {n}"
    rows = f"the {n} rows" if n > 1 else "the one row"
    wanted = f"for each {group.name}, {rows} of {table.name}{with_terms(term)} with the {'highest' if down else 'lowest'} {value.name}"
    wanted += f", of equal ones the lowest {table.primary} first (columns: {group.name}, {table.primary}, {value.name})"
    return Draft(f"best_{'one' if n == 1 else 'few'}_of_group", (sql,), wanted, _names(table, group, value), terms=told(term), tables=(table.name,))


def share_of_group(ground: Ground, rng: Random) -> Draft | None:
    """Each row's share of its group's total, its distance from the group's average, or its place in the group."""
    found = _ranked(ground, rng)
    if found is None:
        return None
    table, group, value, term = found
    if not value.additive:
        return None
    key, name, number = quote(table.primary or ""), quote(group.name), quote(value.name)
    measure, words, form = pick_one((
        (f"100.0 * {number} / SUM({number}) OVER (PARTITION BY {name})", f"its percentage of the total {value.name} of its {group.name}", "share_of_group"),
        (f"{number} - AVG({number}) OVER (PARTITION BY {name})", f"its {value.name} minus the average {value.name} of its {group.name}", "distance_from_group"),
        (f"RANK() OVER (PARTITION BY {name} ORDER BY {number} DESC)",
         f"its rank by {value.name} (highest first, equal ones share a rank) within its {group.name}", "rank_in_group"),
        (f"COUNT(*) OVER (PARTITION BY {name})", f"how many of these rows have the same {group.name}", "size_of_group"),
    ), rng)  # fmt: skip
    sql = f"SELECT {key}, {name}, {number}, {measure} AS figure FROM {quote(table.name)}{where(term.sql)}"
    wanted = f"for each row of {table.name}{with_terms(term)}, {words}{', only those rows taken' if term.text else ''}"
    wanted += f" (columns: {table.primary}, {group.name}, {value.name}, figure)"
    return Draft(form, (sql,), wanted, _names(table, group, value), terms=told(term), tables=(table.name,))


def _names(table: PartTable, group: Column, value: Column) -> dict[str, str]:
    return {"table": table.name, "group": group.name, "value": value.name}


def _lost_partition(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """Every window loses its PARTITION BY."""
    found = [window for window in tree.find_all(exp.Window) if window.args.get("partition_by")]
    for window in found:
        window.set("partition_by", None)
    return tree if found else None


def last_of_group(ground: Ground, rng: Random) -> Draft | None:
    """Beside each row, the value of the last row of its group."""
    found = _ranked(ground, rng)
    if found is None:
        return None
    table, group, value, term = found
    orders = [c for c in (*ground.days(table), *ground.figures(table)) if c.name not in (group.name, value.name)]
    key, name, number = quote(table.primary or ""), quote(group.name), quote(value.name)
    first = pick_one(orders, rng) if orders and rng.random() < 0.6 else None
    order, by = (f"{quote(first.name)}, ", first.name) if first is not None else ("", table.primary)
    function, word = pick_one((("LAST_VALUE", "last"), ("NTH_VALUE", "second")), rng)
    call = f"LAST_VALUE({number})" if function == "LAST_VALUE" else f"NTH_VALUE({number}, 2)"
    sql = f"SELECT {key}, {name}, {call} OVER (PARTITION BY {name} ORDER BY {order}{key} {_WHOLE_FRAME}) AS figure FROM {quote(table.name)}{where(term.sql)}"
    equal = f", of equal ones by {table.primary}" if order else ""
    wanted = f"for each row of {table.name}{with_terms(term)}, the {value.name} of the {word} row of the same {group.name} in the order of {by}{equal}"
    wanted += f"{' (only those rows count)' if term.text else ''} (columns: {table.primary}, {group.name}, that {value.name})"
    return Draft(f"{word}_of_group", (sql,), wanted, _names(table, group, value) | {"word": word, "by": str(by)}, terms=told(term), tables=(table.name,))


def _frame_default(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """A window that sees its whole partition falls back to the default frame, which ends at the current row."""
    found = [w for w in tree.find_all(exp.Window) if (spec := w.args.get("spec")) and spec.args.get("end") == "UNBOUNDED"]
    for window in found:
        window.set("spec", None)
    return tree if found else None


def running_total(ground: Ground, rng: Random) -> Draft | None:
    """A total (count, average) over all rows so far, in an order that has ties."""
    table = ground.choose_table(rng, lambda t: ground.figures(t, additive=True) and (ground.days(t) or len(ground.figures(t)) > 1), keyed=True)
    if table is None:
        return None
    value = pick_one(ground.figures(table, additive=True), rng)
    orders = [c for c in (*ground.days(table), *ground.figures(table)) if c.name != value.name]
    if not orders:
        return None
    order = pick_one(orders, rng)
    term = ground.narrow(table, rng, 10, avoid=())
    if term is None:
        return None
    key, number, by = quote(table.primary or ""), quote(value.name), quote(order.name)
    function, word = pick_one((("SUM", "total"), ("AVG", "average"), ("COUNT", "number")), rng)
    window = f"{function}({number}) OVER (ORDER BY {by}, {key} {_SO_FAR})"
    sql = f"SELECT {key}, {by}, {number}, {window} AS so_far FROM {quote(table.name)}{where(term.sql)}"
    what = "number of rows so far" if function == "COUNT" else f"{word} {value.name} of all rows so far"
    wanted = f"for each row of {table.name}{with_terms(term)}, the running {what}, itself included, in the order of {order.name} and, where that is equal,"
    wanted += f" of {table.primary} (columns: {table.primary}, {order.name}, {value.name}, running figure)"
    words = {"table": table.name, "by": order.name, "value": value.name}
    return Draft(f"running_{word}", (sql,), wanted, words, terms=told(term), tables=(table.name,))


def _running_total_ties(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The frame of rows so far is left out, and with it the tie-breaker: all rows of equal order get the figure of the last of them."""
    for window in tree.find_all(exp.Window):
        spec, order = window.args.get("spec"), window.args.get("order")
        if spec is None or spec.args.get("end") != "CURRENT ROW" or order is None or len(order.expressions) < 2:
            continue
        window.set("spec", None)
        order.set("expressions", order.expressions[:1])
        return tree
    return None


def first_rows(ground: Ground, rng: Random) -> Draft | None:
    """The first n rows in an order that leaves nothing open."""
    table = ground.choose_table(rng, lambda t: ground.shown(t) and (ground.figures(t) or ground.days(t)), keyed=True)
    if table is None:
        return None
    order = pick_one([*ground.figures(table), *ground.days(table)], rng)
    shown = [c for c in ground.shown(table) if c.name != order.name]
    n = rng.randint(3, 12)
    term = ground.narrow(table, rng, n + 5, table.rows, avoid=(order.name,))
    if not shown or term is None:
        return None
    show, down = pick_one(shown, rng), rng.random() < 0.6
    key, by = quote(table.primary or ""), quote(order.name)
    skip = pick_one((0, 0, 0, n), rng)
    sql = f"SELECT {key}, {quote(show.name)}, {by} FROM {quote(table.name)}{where(term.sql)} ORDER BY {by}{' DESC' if down else ''}, {key} LIMIT {n}"
    words = ("latest" if down else "earliest") if order.role == "date" else ("highest" if down else "lowest")
    page = f"the second {n} rows (number {n + 1} to {2 * n})" if skip else f"the {n} rows"
    wanted = f"{page} of {table.name}{with_terms(term)} with the {words} {order.name}, {words} first, of equal ones the lowest {table.primary} first"
    wanted += f" (columns: {table.primary}, {show.name}, {order.name})"
    names = {"table": table.name, "by": order.name, "words": words}
    return Draft("second_page" if skip else "first_rows", (sql + (f" OFFSET {skip}" if skip else ""),), wanted, names, terms=told(term), tables=(table.name,))


def _limit_without_order(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """LIMIT stays, ORDER BY goes."""
    if tree.args.get("limit") is None or tree.args.get("order") is None:
        return None
    tree.set("order", None)
    return tree


KINDS: dict[str, Kind] = {
    "lost_partition": Kind(
        "Query", (best_of_each_group, share_of_group), in_statement(_lost_partition),
        ("It treats the whole table as one {group}.", "The figures do not start again with each {group}.",
         "What should be looked at {group} by {group} is computed over all rows of {table}."),
    ),
    "frame_default": Kind(
        "Query", (last_of_group,), in_statement(_frame_default),
        ("The window does not seem to see the rows that come later.",
         "Most rows do not show the {value} of the {word} row: it looks only as far as the row itself.",
         "Within one {group} the figure differs from row to row, and it must be the same everywhere."),
        subtlety=2,
    ),
    "running_total_ties": Kind(
        "Query", (running_total,), in_statement(_running_total_ties),
        ("Rows with the same {by} all show one figure, that of the last of them.", "Where {by} is equal, the figure jumps and then stands still.",
         "As soon as two rows share a {by}, the figure is already that of the later one."),
        subtlety=2,
    ),
    "limit_without_order": Kind(
        "Query", (first_rows,), in_statement(_limit_without_order),
        ("I get the right number of rows, but not the {words} ones.", "The rows look picked at random; much better ones exist in {table}.",
         "It gives some rows of {table}, not those with the {words} {by}."),
    ),
}  # fmt: skip
