"""Slow forms with the same result: work repeated for every row, and conditions that hide a column from its index. Judged by SQLite's VM steps."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, conjunction, conjuncts, in_statement, parse, set_condition
from savepoint.envs.sql.bugs.ground import Ground, Term, pick_one, where, with_terms
from savepoint.envs.sql.part import PartTable
from savepoint.envs.sql.schema import Column, literal, quote

MOST_WORK = 0.5
_FEWEST, _MOST = 60, 900  # rows of a selection: enough that repeated work shows, few enough that it does not take seconds


def _selection(ground: Ground, rng: Random) -> tuple[PartTable, Column, Column, Term, str] | None:
    """A table, a group, a number, a condition, and the WITH clause that names the selected rows `part`."""
    table = ground.choose_table(rng, lambda t: ground.groups(t) and ground.figures(t) and t.rows >= _FEWEST, keyed=True)
    if table is None:
        return None
    group = pick_one(ground.groups(table), rng)
    values = [c for c in ground.figures(table) if c.name != group.name]
    if not values:
        return None
    value = pick_one(values, rng)
    term = ground.narrow(table, rng, _FEWEST, _MOST)
    if term is None:
        return None
    columns = ", ".join(map(quote, (table.primary or "", group.name, value.name)))
    return table, group, value, term, f"WITH part AS (SELECT {columns} FROM {quote(table.name)}{where(term.sql)})"


def _draft(form: str, sql: str, wanted: str, table: PartTable, group: Column, value: Column) -> Draft:
    return Draft(form, (sql,), wanted, {"table": table.name, "group": group.name, "value": value.name}, tables=(table.name,))


def beside_group_figure(ground: Ground, rng: Random) -> Draft | None:
    """Each row with a figure of its group."""
    found = _selection(ground, rng)
    if found is None:
        return None
    table, group, value, term, head = found
    options = [("COUNT", "the number of rows"), ("MAX", f"the highest {value.name}"), ("MIN", f"the lowest {value.name}")]
    if value.additive:
        options += [("SUM", f"the total {value.name}"), ("AVG", f"the average {value.name}")]
    function, words = pick_one(options, rng)
    key, name, number = quote(table.primary or ""), quote(group.name), quote(value.name)
    sql = f"{head} SELECT o.{key}, o.{name}, o.{number}, {function}(o.{number}) OVER (PARTITION BY o.{name}) AS figure FROM part AS o"
    wanted = f"for each row of {table.name}{with_terms(term)}, {words} of the same {group.name} among these rows"
    return _draft(f"beside_{function.lower()}", sql, f"{wanted} (columns: {table.primary}, {group.name}, {value.name}, figure)", table, group, value)


def running_figure(ground: Ground, rng: Random) -> Draft | None:
    """Each row with a total so far, by key."""
    found = _selection(ground, rng)
    if found is None:
        return None
    table, group, value, term, head = found
    function, words = pick_one((("SUM", "total"), ("MAX", "highest"), ("MIN", "lowest"), ("COUNT", "number of")), rng)
    if function == "SUM" and not value.additive:
        return None
    key, number = quote(table.primary or ""), quote(value.name)
    frame = "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
    by_group = rng.random() < 0.4
    partition = f"PARTITION BY o.{quote(group.name)} " if by_group else ""
    sql = f"{head} SELECT o.{key}, o.{number}, {function}(o.{number}) OVER ({partition}ORDER BY o.{key} {frame}) AS so_far FROM part AS o"
    wanted = f"for each row of {table.name}{with_terms(term)}, the {words} {value.name} so far in the order of {table.primary}, itself included"
    wanted += f", each {group.name} on its own" if by_group else ""
    form = f"running_{function.lower()}{'_by_group' if by_group else ''}"
    return _draft(form, sql, f"{wanted} (columns: {table.primary}, {value.name}, figure so far)", table, group, value)


def ranked_rows(ground: Ground, rng: Random) -> Draft | None:
    """Each row with its rank, in all or in its group."""
    found = _selection(ground, rng)
    if found is None:
        return None
    table, group, value, term, head = found
    key, name, number = quote(table.primary or ""), quote(group.name), quote(value.name)
    by_group, down = rng.random() < 0.5, rng.random() < 0.6
    partition = f"PARTITION BY o.{name} " if by_group else ""
    sql = f"{head} SELECT o.{key}, o.{name}, o.{number}, RANK() OVER ({partition}ORDER BY o.{number}{' DESC' if down else ''}) AS place FROM part AS o"
    wanted = f"for each row of {table.name}{with_terms(term)}, its rank by {value.name} {f'within its {group.name}' if by_group else 'among all of these rows'}"
    wanted += f", the {'highest' if down else 'lowest'} first, equal ones sharing a rank (columns: {table.primary}, {group.name}, {value.name}, rank)"
    return _draft("rank_in_group" if by_group else "rank", sql, wanted, table, group, value)


def _inner(window: exp.Window) -> list[exp.Expr] | None:
    """What the rows `i` that a window sees for row `o` have to meet; None for windows of other sorts."""
    terms: list[exp.Expr] = [exp.EQ(this=_of(column, "i"), expression=column.copy()) for column in window.args.get("partition_by") or ()]
    order = window.args.get("order")
    if order is not None:
        if len(order.expressions) != 1:
            return None
        column, down = order.expressions[0].this, bool(order.expressions[0].args.get("desc"))
        if isinstance(window.this, exp.Rank):
            comparison: type[exp.Binary] = exp.GT if down else exp.LT
        else:
            comparison = exp.GTE if down else exp.LTE
        terms.append(comparison(this=_of(column, "i"), expression=column.copy()))
    return terms


def _of(column: exp.Expr, alias: str) -> exp.Column:
    return exp.column(column.this.copy(), table=alias)


def _query_per_row(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """A window function becomes a sub-query that runs again for every row."""
    window = tree.find(exp.Window)
    terms = _inner(window) if window is not None else None
    if window is None or terms is None:
        return None
    function = window.this.copy()
    for column in function.find_all(exp.Column):
        column.set("table", exp.to_identifier("i"))
    measure = parse("SELECT COUNT(*) + 1").expressions[0] if isinstance(function, exp.Rank) else function
    query = exp.Select(expressions=[measure.copy()])
    query.set("from_", exp.From(this=exp.alias_(exp.to_table("part"), "i", table=True)))
    set_condition(query, conjunction(terms))
    window.replace(exp.Subquery(this=query))
    return tree


def best_rows(ground: Ground, rng: Random) -> Draft | None:
    """The rows with the highest or lowest number of each group, all of them where several are equal."""
    found = _selection(ground, rng)
    if found is None:
        return None
    table, group, value, term, head = found
    key, name, number, down = quote(table.primary or ""), quote(group.name), quote(value.name), rng.random() < 0.6
    ranked = f"SELECT o.{key}, o.{name}, o.{number}, RANK() OVER (PARTITION BY o.{name} ORDER BY o.{number}{' DESC' if down else ''}) AS place FROM part AS o"
    sql = f"{head} SELECT {key}, {name}, {number} FROM ({ranked}) WHERE place = 1"
    wanted = f"for each {group.name}, the rows of {table.name}{with_terms(term)} with the {'highest' if down else 'lowest'} {value.name}, all of them where"
    wanted += f" several are equal (columns: {table.primary}, {group.name}, {value.name})"
    return _draft("best_rows", sql, wanted, table, group, value)


def _compared_with_all(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`RANK() … WHERE place = 1` becomes a comparison of every row with every other: NOT EXISTS a better one, or a join and a count."""
    window, with_clause = tree.find(exp.Window), tree.args.get("with_")
    terms = _inner(window) if window is not None and isinstance(window.this, exp.Rank) else None
    if terms is None or with_clause is None:
        return None
    columns = [exp.column(c.this.copy(), table="o") for c in tree.expressions]
    better = exp.Select(expressions=[exp.Literal.number(1)])
    better.set("from_", exp.From(this=exp.alias_(exp.to_table("part"), "i", table=True)))
    set_condition(better, conjunction(terms))
    out = exp.Select(expressions=columns)
    out.set("with_", with_clause.copy())
    out.set("from_", exp.From(this=exp.alias_(exp.to_table("part"), "o", table=True)))
    if rng.random() < 0.5:
        set_condition(out, exp.Not(this=exp.Exists(this=better)))
    else:
        counted = better.copy()
        counted.set("expressions", [exp.Count(this=exp.Star())])
        set_condition(out, exp.EQ(this=exp.Subquery(this=counted), expression=exp.Literal.number(0)))
    return out


def indexed_search(ground: Ground, rng: Random) -> Draft | None:
    """Few rows found by a column that has an index."""
    table = ground.choose_table(rng, lambda t: t.rows >= 200, keyed=True)
    if table is None:
        return None
    columns = [c for c in table.columns if c.role in ("date", "word", "key", "name", "number")]
    column = pick_one(columns, rng)
    name = quote(column.name)
    found = ground.rows(
        f"SELECT {name} FROM {quote(table.name)} WHERE {name} IS NOT NULL GROUP BY {name} HAVING COUNT(*) <= {table.rows // 10} ORDER BY {name} LIMIT 500"
    )
    value = pick_one(found, rng)[0] if found else None
    if not isinstance(value, int | float | str) or (isinstance(value, str) and len(value) > 40):
        return None
    condition, words, form = f"{name} = {literal(value)}", f"whose {column.name} is {literal(value)}", "indexed_value"
    if column.role == "date" and isinstance(value, str):
        year = int(value[:4])
        condition, words, form = f"{name} >= '{year}-01-01' AND {name} < '{year + 1}-01-01'", f"whose {column.name} is in {year}", "indexed_year"
    shown = [c for c in ground.shown(table) if c.name != column.name]
    if not shown:
        return None
    show, key = pick_one(shown, rng), quote(table.primary or "")
    setup = (f"CREATE INDEX {quote(f'by_{column.name}'.lower())} ON {quote(table.name)} ({name})",)
    tail, what, columns_told = "", f"{key}, {quote(show.name)}", f" (columns: {table.primary}, {show.name})"
    if rng.random() < 0.3:
        what, form, columns_told = "COUNT(*)", f"{form}_count", ""
    elif rng.random() < 0.3:
        tail, form = f" ORDER BY {key}", f"{form}_ordered"
        columns_told += f", in the order of {table.primary}"
    wanted = f"the {'number of ' if what == 'COUNT(*)' else ''}rows of {table.name} {words}{columns_told}"
    sql = f"SELECT {what} FROM {quote(table.name)} WHERE {condition}{tail}"
    return Draft(form, (sql,), wanted, {"table": table.name, "column": column.name}, setup, tables=(table.name,))


def _hidden_from_index(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The column is put into an expression that has the same value: `x = 5` becomes `x + 0 = 5`, a range of days the year of the day."""
    condition = tree.args.get("where")
    terms = conjuncts(condition.this) if condition is not None else []
    if len(terms) == 2 and isinstance(terms[0], exp.GTE) and isinstance(terms[1], exp.LT):
        year = terms[0].right.name[:4]
        column = terms[0].left.sql(dialect="sqlite")
        form = pick_one(("strftime('%Y', {}) = '{}'", "substr({}, 1, 4) = '{}'", "CAST(strftime('%Y', {}) AS INTEGER) = {}"), rng)
        set_condition(tree, parse(f"SELECT {form.format(column, year)}").expressions[0])
        return tree
    if len(terms) == 1 and isinstance(terms[0], exp.EQ):
        column, value = terms[0].left.sql(dialect="sqlite"), terms[0].right.sql(dialect="sqlite")
        text = terms[0].right.args.get("is_string")
        form = pick_one(("{} || '' = {}", "COALESCE({}, '') = {}", "substr({}, 1) = {}") if text else ("{} + 0 = {}", "COALESCE({}, -1) = {}"), rng)
        set_condition(tree, parse(f"SELECT {form.format(column, value)}").expressions[0])
        return tree
    return None


KINDS: dict[str, Kind] = {
    "query_per_row": Kind(
        "Efficiency", (beside_group_figure,), in_statement(_query_per_row),
        ("The sub-query runs again for every single row.", "For each row it goes through all the others to work out the figure of its {group}."),
        most_work=MOST_WORK,
    ),
    "quadratic_running_total": Kind(
        "Efficiency", (running_figure,), in_statement(_query_per_row),
        ("For every row it goes through all earlier rows from the start.", "With twice the rows of {table} it takes four times as long."),
        most_work=MOST_WORK,
    ),
    "rank_by_counting": Kind(
        "Efficiency", (ranked_rows,), in_statement(_query_per_row),
        ("To find the rank it counts, for every row, all the rows ahead of it.", "Each row is compared with every other just to count those ahead."),
        most_work=MOST_WORK,
    ),
    "compared_with_all": Kind(
        "Efficiency", (best_rows,), in_statement(_compared_with_all),
        ("Every row is compared with all the others of its {group}.", "It looks for a better row again and again, once for each row of {table}."),
        most_work=MOST_WORK, subtlety=2,
    ),
    "hidden_from_index": Kind(
        "Efficiency", (indexed_search,), in_statement(_hidden_from_index),
        ("There is an index on {column}, but all of {table} is read.", "The plan says SCAN, although {column} is indexed and few rows match."),
        most_work=MOST_WORK,
    ),
}  # fmt: skip
