"""Faults of joins, sub-queries and unions: lost outer rows, double counting, NOT IN with NULL, wrong correlation, duplicates."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, conjunction, conjuncts, in_statement, set_condition
from savepoint.envs.sql.bugs.ground import Ground, Link, Term, pick_one, told, where, with_terms
from savepoint.envs.sql.schema import quote

_LISTS = ("checked", "contacted", "reviewed", "excluded", "finished", "reported")


def _child_term(ground: Ground, link: Link, rng: Random, alias: str = "c.") -> Term | None:
    """A condition on the child's own columns."""
    return ground.term(link.child.columns, rng, alias=alias, avoid=(link.key,))


def _joined_on(link: Link) -> str:
    return f"c.{quote(link.key)} = p.{quote(link.primary)}"


def _words(link: Link, term: Term | None = None) -> dict[str, str]:
    return {"parent": link.parent.name, "child": link.child.name, "term": term.text if term else ""}


def children_of_each(ground: Ground, rng: Random) -> Draft | None:
    """For every parent, how many children with a property it has, zero included."""
    link = ground.choose_link(rng, lambda link: link.parent.rows <= 1000)
    if link is None:
        return None
    term = _child_term(ground, link, rng)
    if term is None:
        return None
    own = f"p.{quote(link.primary)}, p.{quote(link.label)}"
    totals = [c for c in link.child.columns if c.role == "number" and c.additive and c.filled == 1]
    measure, words, form = f"COUNT(c.{quote(link.key)})", f"the number of {link.child.name} rows with {term.text} that belong to it", "children_of_each"
    if totals and rng.random() < 0.4:
        value = pick_one(totals, rng)
        measure, form = f"COALESCE(SUM(c.{quote(value.name)}), 0)", "total_of_each"
        words = f"the total {value.name} of its {link.child.name} rows with {term.text}"
    sql = f"SELECT {own}, {measure} AS figure FROM {quote(link.parent.name)} AS p LEFT JOIN {quote(link.child.name)} AS c ON {_joined_on(link)} AND {term.sql}"
    wanted = f"for every {link.parent.name}, {words}, 0 where there is none (columns: {link.primary}, {link.label}, figure)"
    return Draft(form, (f"{sql} GROUP BY {own}",), wanted, _words(link, term), terms=told(term), tables=(link.parent.name, link.child.name))


def _outer_to_inner(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """What is asked of the right side of a LEFT JOIN moves from ON to WHERE."""
    for join in tree.find_all(exp.Join):
        on = join.args.get("on")
        if join.side != "LEFT" or not isinstance(on, exp.And):
            continue
        keys: list[exp.Expr] = []
        moved: list[exp.Expr] = []
        for part in conjuncts(on):
            (keys if isinstance(part, exp.EQ) and isinstance(part.expression, exp.Column) else moved).append(part.copy())
        if not keys or not moved:
            continue
        join.set("on", conjunction(keys))
        kept = tree.args.get("where")
        set_condition(tree, conjunction([*([kept.this.copy()] if kept else []), *moved]))
        return tree
    return None


def total_of_parents(ground: Ground, rng: Random) -> Draft | None:
    """A total (or count) over parents that have a child with a property."""
    link = ground.choose_link(rng)
    if link is None:
        return None
    term = _child_term(ground, link, rng)
    if term is None:
        return None
    numbers = ground.figures(link.parent, additive=True)
    groups = ground.groups(link.parent)
    measure, words = ("COUNT(*)", "the number") if not numbers or rng.random() < 0.5 else ("", "")
    if not measure:
        value = pick_one(numbers, rng)
        measure, words = f"SUM(p.{quote(value.name)})", f"the total {value.name}"
    inner = f"EXISTS (SELECT 1 FROM {quote(link.child.name)} AS c WHERE {_joined_on(link)} AND {term.sql})"
    has = f"of the {link.parent.name} rows that have at least one {link.child.name} with {term.text}, each {link.parent.name} taken once"
    if groups and rng.random() < 0.5:
        group = pick_one(groups, rng)
        name = f"p.{quote(group.name)}"
        sql = f"SELECT {name}, {measure} AS figure FROM {quote(link.parent.name)} AS p WHERE {inner} GROUP BY {name}"
        wanted, form = f"by {group.name}, {words} {has} (columns: {group.name}, figure)", "parents_by_group"
    else:
        sql, wanted, form = f"SELECT {measure} AS figure FROM {quote(link.parent.name)} AS p WHERE {inner}", f"{words} {has}", "total_of_parents"
    return Draft(form, (sql,), wanted, _words(link, term), terms=told(term), tables=(link.parent.name, link.child.name))


def _double_counting(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`WHERE EXISTS (SELECT … FROM c WHERE …)` becomes a join with `c`: a parent counts once for each child."""
    exists = tree.find(exp.Exists)
    if exists is None or isinstance(exists.parent, exp.Not) or not isinstance(exists.parent, exp.Where):
        return None
    inner = exists.this
    on, *rest = conjuncts(inner.args["where"].this)
    tree.set("joins", [exp.Join(this=inner.args["from_"].this.copy(), on=on.copy())])
    set_condition(tree, conjunction([term.copy() for term in rest]))
    return tree


def not_in_list(ground: Ground, rng: Random) -> Draft | None:
    """Rows that are not on a list kept in another table, one line of which is empty."""
    table = ground.choose_table(rng, lambda t: ground.shown(t) and t.rows >= 6, keyed=True)
    if table is None:
        return None
    term = ground.narrow(table, rng, 6, whole=0.3, alias="t.")
    if term is None:
        return None
    name, key = ground.free_name("", rng, _LISTS), quote(table.primary or "")
    setup = (
        f"CREATE TABLE {name} (ref INTEGER, note TEXT)",
        f"INSERT INTO {name} SELECT {key}, 'import' FROM {quote(table.name)} WHERE {key} % 3 = 1",
        f"INSERT INTO {name} VALUES (NULL, 'unknown')",
    )
    show = pick_one(ground.shown(table), rng)
    inner = f"NOT EXISTS (SELECT 1 FROM {name} AS c WHERE c.ref = t.{key})"
    count = rng.random() < 0.35
    what = "COUNT(*)" if count else f"t.{key}, t.{quote(show.name)}"
    sql = f"SELECT {what} FROM {quote(table.name)} AS t{where(inner, term.sql)}"
    wanted = f"the {'number of ' if count else ''}rows of {table.name}{with_terms(term)} that no row of {name} refers to by its column ref"
    wanted += "" if count else f" (columns: {table.primary}, {show.name})"
    words = {"child": name, "parent": table.name}
    return Draft("count_not_in_list" if count else "not_in_list", (sql,), wanted, words, setup, terms=told(term), tables=(table.name,))


def without_children(ground: Ground, rng: Random) -> Draft | None:
    """Parents that no child refers to, where some children refer to nothing."""
    link = ground.choose_link(rng, lambda link: any(c.name == link.key and c.filled < 1 for c in link.child.columns))
    if link is None:
        return None
    sql = f"SELECT p.{quote(link.primary)}, p.{quote(link.label)} FROM {quote(link.parent.name)} AS p"
    sql += f" WHERE NOT EXISTS (SELECT 1 FROM {quote(link.child.name)} AS c WHERE {_joined_on(link)})"
    wanted = f"every {link.parent.name} that no {link.child.name} refers to by {link.key} (columns: {link.primary}, {link.label})"
    return Draft("without_children", (sql,), wanted, _words(link), tables=(link.parent.name, link.child.name))


def _not_in_null(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`NOT EXISTS (SELECT 1 FROM c WHERE c.k = p.id)` becomes `p.id NOT IN (SELECT c.k FROM c)`, which one NULL makes never true."""
    for exists in tree.find_all(exp.Exists):
        if not isinstance(exists.parent, exp.Not):
            continue
        inner = exists.this.copy()
        on, *rest = conjuncts(inner.args["where"].this)
        if not isinstance(on, exp.EQ):
            continue
        inner.set("expressions", [on.left.copy()])
        set_condition(inner, conjunction([term.copy() for term in rest]))
        exists.parent.replace(exp.Not(this=exp.In(this=on.right.copy(), query=exp.Subquery(this=inner))))
        return tree
    return None


def over_own_average(ground: Ground, rng: Random) -> Draft | None:
    """Rows whose number is over the average of their own group, or is the highest of it."""
    table = ground.choose_table(rng, lambda t: ground.groups(t) and ground.figures(t) and t.rows <= 2000, keyed=True)
    if table is None:
        return None
    group = pick_one(ground.groups(table), rng)
    values = [c for c in ground.figures(table) if c.name != group.name]
    if not values:
        return None
    value = pick_one(values, rng)
    function, words, operator = pick_one((("AVG", "over the average", ">"), ("MAX", "the highest", "="), ("MIN", "the lowest", "=")), rng)
    if function == "AVG" and not value.additive:
        return None
    name, number, key, source = quote(group.name), quote(value.name), quote(table.primary or ""), quote(table.name)
    term = ground.narrow(table, rng, 10, 2000, avoid=(group.name, value.name), alias="o.") or Term("", "", "")
    inner = f"(SELECT {function}(i.{number}) FROM {source} AS i WHERE i.{name} = o.{name})"
    sql = f"SELECT o.{key}, o.{name}, o.{number} FROM {source} AS o{where(f'o.{number} {operator} {inner}', term.sql)}"
    wanted = f"the rows of {table.name}{with_terms(term)} whose {value.name} is {words} {value.name} of all rows with the same {group.name}"
    wanted += f" (columns: {table.primary}, {group.name}, {value.name})"
    return Draft(f"{function.lower()}_of_own_group", (sql,), wanted, {"group": group.name, "value": value.name, "table": table.name}, tables=(table.name,))


def _wrong_correlation(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`i.w = o.w` becomes `i.w = i.w` (the outer row forgotten), or compares the group with the outer row's key."""
    for inner in tree.find_all(exp.Subquery):
        condition = inner.this.args.get("where")
        if condition is None or not isinstance(condition.this, exp.EQ):
            continue
        right = condition.this.right
        if not isinstance(right, exp.Column) or not isinstance(condition.this.left, exp.Column) or right.table == condition.this.left.table:
            continue
        key = next((c for c in tree.expressions if isinstance(c, exp.Column) and c.name != right.name), None)
        forgotten = exp.column(right.this.copy(), table=condition.this.left.table)
        right.replace(key.copy() if key is not None and rng.random() < 0.4 else forgotten)
        return tree
    return None


def counts_over_both(ground: Ground, rng: Random) -> Draft | None:
    """How often each value occurs in two columns together."""
    if not ground.overlaps:
        return None
    a, b = pick_one(ground.overlaps, rng)
    rows = f"SELECT {quote(a.name)} AS value FROM {quote(a.table)} UNION ALL SELECT {quote(b.name)} FROM {quote(b.table)}"
    least = pick_one((1, 2, 3, 5), rng)
    sql = f"SELECT value, COUNT(*) AS n FROM ({rows}) WHERE NOT value IS NULL GROUP BY value" + (f" HAVING COUNT(*) >= {least}" if least > 1 else "")
    wanted = f"each value of {a.table}.{a.name} and {b.table}.{b.name}, with how many rows of both tables together have it"
    wanted += (f", where these are at least {least}" if least > 1 else "") + " (columns: value, number)"
    return Draft("counts_over_both", (sql,), wanted, {"a": a.table, "b": b.table}, tables=(a.table, b.table))


def rows_one_below_the_other(ground: Ground, rng: Random) -> Draft | None:
    """A total over two selections of one table, rows in both counted twice; or of two different tables."""
    table = ground.choose_table(rng, lambda t: ground.figures(t, additive=True))
    if table is None:
        return None
    value = pick_one(ground.figures(table, additive=True), rng)
    first, second = ground.term(table.columns, rng, avoid=(value.name,)), ground.term(table.columns, rng, avoid=(value.name,))
    if first is None or second is None or first.column == second.column:
        return None
    half = f"SELECT {quote(value.name)} AS value FROM {quote(table.name)} WHERE"
    function, word = pick_one((("SUM", "total"), ("AVG", "average"), ("COUNT", "number")), rng)
    sql = f"SELECT {function}(value) AS figure FROM ({half} {first.sql} UNION ALL {half} {second.sql})"
    wanted = f"the {word} of all {value.name} values of two lists put one below the other: the rows of {table.name} with {first.text}, and those with"
    wanted += f" {second.text} (a row on both lists counts twice)"
    return Draft(f"{word}_of_two_lists", (sql,), wanted, {"a": first.text, "b": second.text}, tables=(table.name,))


def _union_for_union_all(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """UNION ALL becomes UNION: equal rows melt into one."""
    union = tree if isinstance(tree, exp.Union) else tree.find(exp.Union)
    if union is None or union.args.get("distinct"):
        return None
    union.set("distinct", True)
    return tree


def values_of_either(ground: Ground, rng: Random) -> Draft | None:
    """Every value that occurs in one of two columns, once."""
    if not ground.overlaps:
        return None
    a, b = pick_one(ground.overlaps, rng)
    halves = [f"SELECT {quote(c.name)} FROM {quote(c.table)} WHERE NOT {quote(c.name)} IS NULL" for c in (a, b)]
    wanted = f"every value that occurs in {a.table}.{a.name} or in {b.table}.{b.name}, each once"
    return Draft("values_of_either", (" UNION ".join(halves),), wanted, {"table": f"{a.table} and {b.table}"}, tables=(a.table, b.table))


def rows_of_either(ground: Ground, rng: Random) -> Draft | None:
    """Rows that meet one of two conditions, each once."""
    table = ground.choose_table(rng, ground.shown, keyed=True)
    if table is None:
        return None
    first = ground.narrow(table, rng, 2, 600, whole=0)
    second = ground.narrow(table, rng, 2, 600, whole=0)
    if first is None or second is None or first.sql == second.sql:
        return None
    show = pick_one(ground.shown(table), rng)
    half = f"SELECT {quote(table.primary or '')}, {quote(show.name)} FROM {quote(table.name)} WHERE"
    wanted = f"each row of {table.name} with {first.text} or with {second.text}, once even where it has both (columns: {table.primary}, {show.name})"
    return Draft("rows_of_either", (f"{half} {first.sql} UNION {half} {second.sql}",), wanted, {"table": table.name}, tables=(table.name,))


def _union_all_for_union(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """UNION becomes UNION ALL."""
    if not isinstance(tree, exp.Union) or not tree.args.get("distinct"):
        return None
    tree.set("distinct", False)
    return tree




KINDS: dict[str, Kind] = {
    "outer_to_inner": Kind(
        "Query", (children_of_each,), in_statement(_outer_to_inner),
        ("Every {parent} that has no {child} with {term} is missing; I want it with 0.",
         "I use a LEFT JOIN, and still the {parent} rows that have no such {child} rows are gone.",
         "The list is too short: where the figure should be 0 there is no line at all."),
        subtlety=2,
    ),
    "double_counting": Kind(
        "Query", (total_of_parents,), in_statement(_double_counting),
        ("The figures are too high: a {parent} with several such {child} rows is counted several times.",
         "Since I join {child}, everything is too large.", "It seems that one {parent} counts once for each of its {child} rows."),
        subtlety=2,
    ),
    "not_in_null": Kind(
        "Query", (not_in_list, not_in_list, without_children), in_statement(_not_in_null),
        ("It finds none at all, although there are many.", "NOT IN never seems to be true here: not one {parent} is found.",
         "The answer is that there is none, but I know of {parent} rows that {child} does not mention."),
        subtlety=2,
    ),
    "wrong_correlation": Kind(
        "Query", (over_own_average,), in_statement(_wrong_correlation),
        ("Rows are not compared with those of their own {group}.", "For the comparison it does not take the rows of {table} with the same {group}.",
         "The wrong rows come out: the figure that {value} is compared with is not that of the row's own {group}."),
        subtlety=2,
    ),
    "union_for_union_all": Kind(
        "Query", (counts_over_both, rows_one_below_the_other), in_statement(_union_for_union_all),
        ("The figures are wrong, as if equal values counted only once.", "Values that occur more than once go into it a single time.",
         "It looks as though duplicates were removed before anything is counted."),
        subtlety=2,
    ),
    "union_all_for_union": Kind(
        "Query", (values_of_either, rows_of_either), in_statement(_union_all_for_union),
        ("Some lines come more than once.", "The result has duplicates, and it must not.", "I see the same line several times in what comes from {table}."),
    ),
}  # fmt: skip
