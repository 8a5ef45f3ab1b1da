"""Faults of counting and grouping: integer division, WHERE and HAVING exchanged, counts of the wrong thing, forgotten parentheses."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, conjunction, in_statement, set_condition
from savepoint.envs.sql.bugs.ground import Ground, Term, pick_one, told, where, with_terms
from savepoint.envs.sql.part import PartTable
from savepoint.envs.sql.schema import Column, literal, quote


def _grouped_table(ground: Ground, rng: Random, *, figures: bool) -> tuple[PartTable, Column, Column | None] | None:
    """A table, a column to group by, and (where asked for) another of numbers."""
    table = ground.choose_table(rng, lambda t: ground.groups(t) and (not figures or len({*ground.figures(t, additive=True)} - {ground.groups(t)[0]}) > 0))
    if table is None:
        return None
    group = pick_one(ground.groups(table), rng)
    numbers = [c for c in ground.figures(table, additive=True) if c != group]
    if figures and not numbers:
        return None
    return table, group, pick_one(numbers, rng) if figures else None


def share_by_group(ground: Ground, rng: Random) -> Draft | None:
    """The percentage of rows with a property, by group."""
    found = _grouped_table(ground, rng, figures=False)
    if found is None:
        return None
    table, group, _ = found
    term = ground.term(table.columns, rng, avoid=(group.name,))
    if term is None:
        return None
    name = quote(group.name)
    sql = f"SELECT {name}, 100.0 * SUM(CASE WHEN {term.sql} THEN 1 ELSE 0 END) / COUNT(*) AS percentage FROM {quote(table.name)} GROUP BY {name}"
    wanted = f"the percentage (0 to 100, decimals kept) of the rows of {table.name} with {term.text}, by {group.name} (columns: {group.name}, percentage)"
    return Draft("share_by_group", (sql,), wanted, {"group": group.name, "table": table.name}, terms=told(term), tables=(table.name,))


def mean_by_hand(ground: Ground, rng: Random) -> Draft | None:
    """A total of whole numbers divided by a count."""
    table = ground.choose_table(rng, lambda t: any(_whole(ground, c) for c in ground.figures(t, additive=True)) and ground.groups(t))
    if table is None:
        return None
    value = pick_one([c for c in ground.figures(table, additive=True) if _whole(ground, c)], rng)
    groups = [c for c in ground.groups(table) if c != value]
    if not groups:
        return None
    group = pick_one(groups, rng)
    term = ground.narrow(table, rng, 10, table.rows, avoid=(group.name,), whole=0.5)
    name, number = quote(group.name), quote(value.name)
    unit, factor, words = pick_one(((1, "", ""), (60, " / 60", " divided by 60"), (1000, " / 1000", " divided by 1000")), rng)
    tail = f"{where(term.sql) if term else ''} GROUP BY {name}"
    sql = f"SELECT {name}, SUM({number}) * 1.0 / COUNT(*){factor} AS mean FROM {quote(table.name)}{tail}"
    wanted = f"by {group.name}, the total {value.name} divided by the number of rows{words}, decimals kept, of the rows of {table.name}{with_terms(term)}"
    wanted += f" (columns: {group.name}, mean)"
    return Draft(f"mean_by_hand_{unit}", (sql,), wanted, {"group": group.name, "table": table.name}, terms=told(term), tables=(table.name,))


def _whole(ground: Ground, column: Column) -> bool:
    found = ground.rows(f"SELECT COUNT(*) FROM {quote(column.table)} WHERE typeof({quote(column.name)}) <> 'integer'")
    return found == ((0,),)


def _integer_division(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`100.0 * a / b` becomes `100 * a / b` or `a / b * 100`; `a * 1.0 / b` becomes `a / b`."""
    for product in tree.find_all(exp.Mul):
        real = next((side for side in (product.left, product.right) if isinstance(side, exp.Literal) and side.name in ("100.0", "1.0")), None)
        if real is None:
            continue
        other = product.right if real is product.left else product.left
        if real.name == "1.0":
            product.replace(other.copy())
            return tree
        quotient = product.parent
        if isinstance(quotient, exp.Div) and rng.random() < 0.5:
            divided = quotient.copy()  # a copy: it carries SQLite's sort of division
            divided.set("this", other.copy())
            quotient.replace(exp.Mul(this=divided, expression=exp.Literal.number(100)))
        else:
            real.replace(exp.Literal.number(100))
        return tree
    return None


def groups_over_total(ground: Ground, rng: Random) -> Draft | None:
    """Groups whose total, average or size is over a figure."""
    found = _grouped_table(ground, rng, figures=True)
    if found is None:
        return None
    table, group, value = found
    assert value is not None
    function, word = pick_one((("SUM", "total"), ("AVG", "average")), rng)
    term = ground.narrow(table, rng, 10, table.rows, avoid=(group.name, value.name), whole=0.6)
    name, measured = quote(group.name), f"{function}({quote(value.name)})"
    tail = where(term.sql) if term else ""
    found_limit = _middle(ground, f"SELECT {measured} FROM {quote(table.name)}{tail} GROUP BY {name} ORDER BY 1")
    if found_limit is None:
        return None
    limit = found_limit
    sql = f"SELECT {name}, {measured} AS figure FROM {quote(table.name)}{tail} GROUP BY {name} HAVING {measured} > {limit}"
    wanted = f"each {group.name} of {table.name} whose {word} {value.name} is over {limit}, with that {word}"
    wanted += f", counting only rows{with_terms(term)}" if term and term.text else ""
    words = {"group": group.name, "value": value.name, "limit": str(limit), "table": table.name, "word": word}
    return Draft(f"groups_over_{word}", (sql,), f"{wanted} (columns: {group.name}, {word})", words, terms=told(term), tables=(table.name,))


def _middle(ground: Ground, sql: str) -> int | float | None:
    """A short figure near the middle of the numbers that a query gives in ascending order."""
    numbers = [row[0] for row in ground.rows(sql) if isinstance(row[0], int | float)]
    if len(numbers) < 4 or numbers[0] == numbers[-1]:
        return None
    middle = numbers[len(numbers) * 2 // 3]
    short = float(f"{middle:.2g}")
    short = short if numbers[0] < short < numbers[-1] else float(f"{middle:.4g}")
    return int(short) if short == int(short) else short


def counts_of_rows_over(ground: Ground, rng: Random) -> Draft | None:
    """By group, how many rows have a number over a figure."""
    found = _grouped_table(ground, rng, figures=True)
    if found is None:
        return None
    table, group, value = found
    assert value is not None
    term = ground.term([value], rng)
    if term is None:
        return None
    name = quote(group.name)
    measure, words = pick_one((("COUNT(*)", "the number of rows"), (f"AVG({quote(value.name)})", f"the average {value.name} of the rows")), rng)
    sql = f"SELECT {name}, {measure} AS figure FROM {quote(table.name)} WHERE {term.sql} GROUP BY {name}"
    wanted = f"by {group.name}, {words} of {table.name} with {term.text} (columns: {group.name}, figure)"
    return Draft("rows_by_group", (sql,), wanted, {"group": group.name, "table": table.name, "term": term.text}, terms=told(term), tables=(table.name,))


def _where_for_having(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The condition on a group's figure is put on single rows: `HAVING SUM(x) > 9` becomes `WHERE x > 9`."""
    having, group = tree.args.get("having"), tree.args.get("group")
    if having is None or group is None or not isinstance(having.this, exp.Binary) or not isinstance(having.this.left, exp.AggFunc):
        return None
    on_rows = having.this.copy()
    on_rows.left.replace(on_rows.left.this.copy())
    kept = tree.args.get("where")
    set_condition(tree, None, "having")
    set_condition(tree, conjunction([*([kept.this.copy()] if kept else []), on_rows]))
    return tree


def _having_for_where(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The condition on rows is put on groups: `WHERE x > 9 GROUP BY w` becomes `GROUP BY w HAVING x > 9`."""
    condition, group = tree.args.get("where"), tree.args.get("group")
    if condition is None or group is None or tree.args.get("having") is not None:
        return None
    set_condition(tree, condition.this.copy(), "having")
    set_condition(tree, None)
    return tree


def count_with_holes(ground: Ground, rng: Random) -> Draft | None:
    """How many rows each group has, in a table that has a column with NULLs."""
    table = ground.choose_table(rng, lambda t: ground.groups(t) and ground.holes(t))
    if table is None:
        return None
    group, hole = pick_one(ground.groups(table), rng), pick_one(ground.holes(table), rng)
    term = ground.narrow(table, rng, 5, table.rows, avoid=(group.name, hole.name), whole=0.5)
    name = quote(group.name)
    tail = f"FROM {quote(table.name)}{where(term.sql) if term else ''} GROUP BY {name}"
    sql = f"SELECT {name}, COUNT(*) AS rows_in_all, COUNT({quote(hole.name)}) AS filled {tail}"
    wanted = f"by {group.name}, how many rows of {table.name}{with_terms(term)} there are, and how many of them have a {hole.name}"
    wanted += f" (columns: {group.name}, all rows, rows with a {hole.name})"
    return Draft("count_with_holes", (sql,), wanted, {"group": group.name, "table": table.name, "hole": hole.name}, terms=told(term), tables=(table.name,))


def _count_of_nullable(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`COUNT(*)` beside a count of a column with NULLs becomes a count of that column."""
    counts = list(tree.find_all(exp.Count))
    everything = next((c for c in counts if isinstance(c.this, exp.Star)), None)
    column = next((c.this for c in counts if isinstance(c.this, exp.Column)), None)
    if everything is None or column is None:
        return None
    everything.set("this", column.copy())
    return tree


def either_word_and_limit(ground: Ground, rng: Random) -> Draft | None:
    """Rows of one of two groups that also meet another condition."""
    table = ground.choose_table(rng, lambda t: t.having("word") and t.numbers or len(t.having("word")) > 1, keyed=True)
    if table is None:
        return None
    words = [c for c in table.having("word") if len(c.figures) >= 2]
    if not words:
        return None
    column = pick_one(words, rng)
    first, second = rng.sample(list(column.figures), 2)
    term = ground.term(table.columns, rng, avoid=(column.name,))
    shown = [c for c in ground.shown(table) if c.name != column.name]
    if term is None or not shown:
        return None
    show, name = pick_one(shown, rng), quote(column.name)
    either = f"({name} = {literal(first)} OR {name} = {literal(second)})"
    aggregate = rng.random() < 0.4
    what = "COUNT(*)" if aggregate else f"{quote(table.primary or '')}, {quote(show.name)}"
    sql = f"SELECT {what} FROM {quote(table.name)} WHERE {either} AND {term.sql}"
    rows = f"the rows of {table.name} whose {column.name} is {literal(first)} or {literal(second)} and that in either case have {term.text}"
    wanted = f"the number of {rows.removeprefix('the ')}" if aggregate else f"{rows} (columns: {table.primary}, {show.name})"
    label = {"first": str(first), "second": str(second), "term": term.text, "table": table.name}
    return Draft("either_count" if aggregate else "either_rows", (sql,), wanted, label, tables=(table.name,))


def _lost_parentheses(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`(a OR b) AND c` becomes `a OR b AND c`."""
    for paren in tree.find_all(exp.Paren):
        if isinstance(paren.this, exp.Or) and isinstance(paren.parent, exp.And):
            paren.replace(paren.this.copy())
            return tree
    return None


def rows_without_word(ground: Ground, rng: Random) -> Draft | None:
    """Rows whose column is not a certain word, those without any included."""
    able = [(t, c) for t in ground.keyed for c in ground.holes(t) if c.role in ("word", "name")]
    if not able:
        return None
    table, column = pick_one(able, rng)
    name = quote(column.name)
    values = ground.rows(f"SELECT {name} FROM {quote(table.name)} WHERE {name} IS NOT NULL GROUP BY {name} ORDER BY COUNT(*) DESC, {name} LIMIT 6")
    texts = [row[0] for row in values if isinstance(row[0], str) and len(row[0]) <= 40]
    term = ground.narrow(table, rng, 2, avoid=(column.name,), whole=0.3)
    if not texts or term is None:
        return None
    value = pick_one(texts, rng)
    count = rng.random() < 0.4
    what = "COUNT(*)" if count else f"{quote(table.primary or '')}, {name}"
    sql = f"SELECT {what} FROM {quote(table.name)}{where(f'{name} IS NOT {literal(value)}', term.sql)}"
    wanted = f"the {'number of ' if count else ''}rows of {table.name}{with_terms(term)} whose {column.name} is anything but {literal(value)}, rows without any"
    wanted += f" {column.name} included" + ("" if count else f" (columns: {table.primary}, {column.name})")
    words = {"hole": column.name, "table": table.name, "value": value}
    return Draft("count_without_word" if count else "rows_without_word", (sql,), wanted, words, terms=told(term), tables=(table.name,))


def _unequal_loses_nulls(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`x IS NOT 'a'` becomes `x <> 'a'`, which is not true of NULL."""
    test = tree.find(exp.NullSafeNEQ)
    if test is None:
        return None
    test.replace(exp.NEQ(this=test.this.copy(), expression=test.expression.copy()))
    return tree


def rows_with_hole(ground: Ground, rng: Random) -> Draft | None:
    """Rows that have, or lack, a value in a column with NULLs."""
    table = ground.choose_table(rng, ground.holes, keyed=True)
    if table is None:
        return None
    column = pick_one(ground.holes(table), rng)
    lacking = rng.random() < 0.6
    condition = f"{quote(column.name)} IS {'' if lacking else 'NOT '}NULL"
    term = ground.narrow(table, rng, 4, table.rows, avoid=(column.name,), whole=0.3) or Term("", "", "")
    tail = where(condition, term.sql)
    having = f"rows of {table.name}{with_terms(term)} that have {'no' if lacking else 'a'} {column.name}"
    shown = [c for c in ground.shown(table) if c.name != column.name]
    groups = [c for c in ground.groups(table) if c.name != column.name]
    words = {"hole": column.name, "table": table.name}
    style = rng.random()
    if groups and style < 0.4:
        group = pick_one(groups, rng)
        sql = f"SELECT {quote(group.name)}, COUNT(*) AS n FROM {quote(table.name)}{tail} GROUP BY {quote(group.name)}"
        return Draft("holes_by_group", (sql,), f"by {group.name}, the number of {having} (columns: {group.name}, number)", words, tables=(table.name,))
    if shown and style < 0.75:
        show = pick_one(shown, rng)
        sql = f"SELECT {quote(table.primary or '')}, {quote(show.name)} FROM {quote(table.name)}{tail}"
        return Draft("rows_with_hole", (sql,), f"the {having} (columns: {table.primary}, {show.name})", words, tables=(table.name,))
    return Draft("count_of_holes", (f"SELECT COUNT(*) FROM {quote(table.name)}{tail}",), f"the number of {having}", words, tables=(table.name,))


def _equals_null(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`x IS NULL` becomes `x = NULL`, and `x IS NOT NULL` becomes `x <> NULL`."""
    test = next((t for t in tree.find_all(exp.Is) if isinstance(t.expression, exp.Null)), None)
    if test is None:
        return None
    negated = isinstance(test.parent, exp.Not)
    made = (exp.NEQ if negated else exp.EQ)(this=test.this.copy(), expression=exp.Null())
    (test.parent if negated else test).replace(made)  # type: ignore[union-attr]
    return tree


KINDS: dict[str, Kind] = {
    "integer_division": Kind(
        "Query", (share_by_group, mean_by_hand), in_statement(_integer_division),
        ("All I get are whole numbers, the decimals are gone.", "Every figure is cut down to a whole number; many that should not be are 0.",
         "The figures have no decimals, as if everything behind the point were thrown away."),
    ),
    "where_for_having": Kind(
        "Query", (groups_over_total,), in_statement(_where_for_having),
        ("The limit of {limit} seems to be applied to single rows of {table} and not to the {word} of each {group}.",
         "It looks at each row's own {value} instead of the {word} by {group}, so the wrong {group} values come out.",
         "{group} values whose {word} is well over {limit} are missing or have a wrong figure."),
    ),
    "having_for_where": Kind(
        "Query", (counts_of_rows_over,), in_statement(_having_for_where),
        ("The figures count rows that do not have {term}, and some {group} values are missing altogether.",
         "My condition ({term}) does not work on the rows: whole groups disappear and the others are computed over all their rows."),
        subtlety=2,
    ),
    "count_of_nullable": Kind(
        "Query", (count_with_holes,), in_statement(_count_of_nullable),
        ("Both counts are always the same, so the first cannot be the number of all rows.",
         "The first count is too low: rows without a {hole} are not counted.", "Rows that have no {hole} are missing from the count of all rows."),
        subtlety=2,
    ),
    "lost_parentheses": Kind(
        "Query", (either_word_and_limit,), in_statement(_lost_parentheses),
        ("Rows of {first} come in although they do not have {term}.", "The condition ({term}) works for one of the two, {second}, but not for {first}."),
        subtlety=2,
    ),
    "unequal_loses_nulls": Kind(
        "Query", (rows_without_word,), in_statement(_unequal_loses_nulls),
        ("The rows whose {hole} is empty do not come, though they have to.", "Every row of {table} without a {hole} gets lost.",
         "It leaves out more than {value}: rows with no {hole} at all are gone too."),
        subtlety=2,
    ),
    "equals_null": Kind(
        "Query", (rows_with_hole,), in_statement(_equals_null),
        ("It finds nothing, though I can see such rows of {table} in the table.", "My test of {hole} is never true, for no row at all.",
         "The database behaves as if no row met my condition on {hole}."),
    ),
}  # fmt: skip
