"""Faults in how a user wants things shown: rounding, labels, bands, columns side by side, codes and lists."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, in_statement
from savepoint.envs.sql.bugs.ground import Ground, Term, pick_one, told, where, with_terms
from savepoint.envs.sql.part import PartTable
from savepoint.envs.sql.schema import Column, literal, quote

_LABELS = ("none", "n/a", "unknown", "-", "missing", "not given")
_BANDS = (("high", "middle", "low"), ("A", "B", "C"), ("large", "medium", "small"), ("gold", "silver", "bronze"), ("red", "amber", "green"))


def _group_and_value(ground: Ground, rng: Random) -> tuple[PartTable, Column, Column] | None:
    table = ground.choose_table(rng, lambda t: ground.groups(t) and ground.figures(t, additive=True))
    if table is None:
        return None
    group = pick_one(ground.groups(table), rng)
    values = [c for c in ground.figures(table, additive=True) if c.name != group.name]
    return (table, group, pick_one(values, rng)) if values else None


def rounded_average(ground: Ground, rng: Random) -> Draft | None:
    """Averages with a number of decimals of the user's choice."""
    found = _group_and_value(ground, rng)
    if found is None:
        return None
    table, group, value = found
    places = pick_one((1, 2, 2, 3), rng)
    factor, unit = pick_one(((1, ""), (1000, " in thousands"), (12, " in dozens")), rng)
    term = ground.narrow(table, rng, 8, table.rows, avoid=(group.name, value.name), whole=0.5) or Term("", "", "")
    name, average = quote(group.name), f"AVG({quote(value.name)})" + (f" / {factor}" if factor > 1 else "")
    sql = f"SELECT {name}, ROUND({average}, {places}) AS average FROM {quote(table.name)}{where(term.sql)} GROUP BY {name}"
    wanted = f"by {group.name}, the average {value.name}{unit}, rounded to {places} decimal{'s' * (places > 1)}, of the rows of {table.name}{with_terms(term)}"
    words = {"group": group.name, "value": value.name, "places": str(places)}
    return Draft(f"rounded_average_{factor}", (sql,), f"{wanted} (columns: {group.name}, average)", words, terms=told(term), tables=(table.name,))


def _lost_rounding(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`ROUND(x, 2)` becomes `ROUND(x)`, or `CAST(x AS INTEGER)`."""
    found = tree.find(exp.Round)
    if found is None or found.args.get("decimals") is None:
        return None
    if rng.random() < 0.5:
        found.set("decimals", None)
    else:
        found.replace(exp.cast(found.this.copy(), "INTEGER"))
    return tree


def labelled_holes(ground: Ground, rng: Random) -> Draft | None:
    """A column with a word of the user's in place of NULL."""
    able = [(t, c) for t in ground.keyed for c in ground.holes(t) if c.role in ("word", "name")]
    if not able:
        return None
    table, column = pick_one(able, rng)
    term = ground.narrow(table, rng, 5, avoid=(column.name,))
    if term is None:
        return None
    label, name, key = pick_one(_LABELS, rng), quote(column.name), quote(table.primary or "")
    shown = f"COALESCE({name}, {literal(label)})"
    words = {"column": column.name, "label": label, "table": table.name}
    if column.distinct < 0.8 and rng.random() < 0.4:
        sql = f"SELECT {shown} AS label, COUNT(*) AS n FROM {quote(table.name)}{where(term.sql)} GROUP BY {shown}"
        wanted = f"by {column.name}, the number of rows of {table.name}{with_terms(term)}, those without one under {literal(label)}"
        wanted += f" (columns: {column.name}, number)"
        return Draft("labelled_groups", (sql,), wanted, words, terms=told(term), tables=(table.name,))
    sql = f"SELECT {key}, {shown} AS label FROM {quote(table.name)}{where(term.sql)}"
    wanted = f"for each row of {table.name}{with_terms(term)}, its {column.name}, written {literal(label)} where there is none"
    wanted += f" (columns: {table.primary}, {column.name})"
    return Draft("labelled_rows", (sql,), wanted, words, terms=told(term), tables=(table.name,))


def _missing_label(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`COALESCE(x, 'none')` becomes `x` wherever it stands."""
    found = list(tree.find_all(exp.Coalesce))
    for call in found:
        call.replace(call.this.copy())
    return tree if found else None


def bands(ground: Ground, rng: Random) -> Draft | None:
    """Rows sorted into three bands of the user's, counted or listed."""
    table = ground.choose_table(rng, lambda t: any(len(c.figures) >= 4 for c in ground.figures(t)), keyed=True)
    if table is None:
        return None
    value = pick_one([c for c in ground.figures(table) if len(c.figures) >= 4], rng)
    low, high = sorted(rng.sample(list(value.figures), 2), key=float)
    top, middle, bottom = pick_one(_BANDS, rng)
    number, key = quote(value.name), quote(table.primary or "")
    band = f"CASE WHEN {number} >= {high} THEN '{top}' WHEN {number} >= {low} THEN '{middle}' ELSE '{bottom}' END"
    meaning = f"'{top}' from {value.name} {high} up, '{middle}' from {low} up, '{bottom}' below"
    words = {"top": top, "middle": middle, "value": value.name}
    term = ground.narrow(table, rng, 8, avoid=(value.name,))
    if term is None or rng.random() < 0.5:
        sql = f"SELECT {band} AS band, COUNT(*) AS n FROM {quote(table.name)} GROUP BY band"
        return Draft("counted_bands", (sql,), f"the number of rows of {table.name} by band: {meaning} (columns: band, number)", words, tables=(table.name,))
    sql = f"SELECT {key}, {number}, {band} AS band FROM {quote(table.name)}{where(term.sql)}"
    wanted = f"for each row of {table.name}{with_terms(term)}, its band: {meaning} (columns: {table.primary}, {value.name}, band)"
    return Draft("listed_bands", (sql,), wanted, words, terms=told(term), tables=(table.name,))


def _bands_in_wrong_order(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The wider condition of a CASE comes first and takes everything that the narrower was for."""
    cases = [case for case in tree.find_all(exp.Case) if len(case.args["ifs"]) == 2]
    for case in cases:
        case.set("ifs", [branch.copy() for branch in reversed(case.args["ifs"])])
    return tree if cases else None


def side_by_side(ground: Ground, rng: Random) -> Draft | None:
    """Counts of two groups in columns of their own, by another group or in all."""
    table = ground.choose_table(rng, lambda t: any(len(c.figures) >= 2 for c in t.having("word")))
    if table is None:
        return None
    column = pick_one([c for c in table.having("word") if len(c.figures) >= 2], rng)
    first, second = rng.sample(list(column.figures), 2)
    groups = [c for c in ground.groups(table) if c.name != column.name]
    counts = ", ".join(f"COUNT(CASE WHEN {quote(column.name)} = {literal(value)} THEN 1 END)" for value in (first, second))
    heads = f"the number with {column.name} {literal(first)}, the number with {column.name} {literal(second)}"
    words = {"first": str(first), "second": str(second), "column": column.name}
    term = ground.narrow(table, rng, 8, table.rows, avoid=(column.name,), whole=0.4) or Term("", "", "")
    if groups and rng.random() < 0.6:
        group = pick_one(groups, rng)
        sql = f"SELECT {quote(group.name)}, {counts} FROM {quote(table.name)}{where(term.sql)} GROUP BY {quote(group.name)}"
        wanted = f"one line for each {group.name} of {table.name}{with_terms(term)}, with these columns: {group.name}, {heads}"
        return Draft("side_by_side_groups", (sql,), wanted, words, terms=told(term), tables=(table.name,))
    sql = f"SELECT {counts}, COUNT(*) FROM {quote(table.name)}{where(term.sql)}"
    wanted = f"one line about the rows of {table.name}{with_terms(term)}, with these columns: {heads}, the number of all"
    return Draft("side_by_side", (sql,), wanted, words, terms=told(term), tables=(table.name,))


def _zero_is_counted(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`COUNT(CASE … THEN 1 END)` becomes `COUNT(CASE … THEN 1 ELSE 0 END)`: a zero counts as well as a one."""
    cases = [count.this for count in tree.find_all(exp.Count) if isinstance(count.this, exp.Case)]
    for case in cases:
        case.set("default", exp.Literal.number(0))
    return tree if cases else None


def padded_code(ground: Ground, rng: Random) -> Draft | None:
    """A code of fixed width made of the row's number."""
    table = ground.choose_table(rng, lambda t: t.rows >= 10 and ground.shown(t), keyed=True)
    if table is None:
        return None
    term = ground.narrow(table, rng, 5)
    if term is None:
        return None
    width = max(4, len(str(table.rows)) + rng.randint(1, 2))
    prefix = pick_one(("", f"{table.name[:1].upper()}-", f"{table.name[:2].upper()}", "#"), rng)
    show, key = pick_one(ground.shown(table), rng), quote(table.primary or "")
    sql = f"SELECT printf('{prefix}%0{width}d', {key}) AS code, {quote(show.name)} FROM {quote(table.name)}{where(term.sql)}"
    example = f"{prefix}{7:0{width}}"
    wanted = f"the rows of {table.name}{with_terms(term)} with a code made of {table.primary}"
    wanted += f", filled up with zeros to {width} digits{f' after {prefix!r}' if prefix else ''} (7 gives {example!r}), and their {show.name}"
    wanted += f" (columns: code, {show.name})"
    return Draft(f"padded_code_{len(prefix)}", (sql,), wanted, {"example": example, "table": table.name}, terms=told(term), tables=(table.name,))


def _lost_padding(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`%05d` becomes `%5d` (blanks) or `%d` (nothing)."""
    for text in tree.find_all(exp.Literal):
        if text.is_string and "%0" in text.name and text.name.endswith("d"):
            head, _, width = text.name.partition("%0")
            text.replace(exp.Literal.string(f"{head}%{width if rng.random() < 0.5 else 'd'}"))
            return tree
    return None


def list_in_a_cell(ground: Ground, rng: Random) -> Draft | None:
    """By group, the names of its rows in one cell, in alphabetical order."""
    short = [t for t in ground.keyed if t.rows <= 3000]
    able = [(t, g, c) for t in short for g in ground.groups(t) for c in t.having("name", "word") if c.name != g.name and c.filled == 1]
    if not able:
        return None
    table, group, column = pick_one(able, rng)
    term = ground.narrow(table, rng, 4, 400, avoid=(group.name, column.name))
    if term is None:
        return None
    separator = pick_one((", ", "; ", " / ", " | "), rng)
    name, shown = quote(group.name), quote(column.name)
    cell = f"GROUP_CONCAT({shown}, '{separator}' ORDER BY {shown}, {quote(table.primary or '')})"
    sql = f"SELECT {name}, {cell} AS list FROM {quote(table.name)}{where(term.sql)}"
    wanted = f"for each {group.name} of {table.name}{with_terms(term)}, the {column.name} of all its rows in one cell, in alphabetical order, with"
    wanted += f" {separator!r} between them (columns: {group.name}, list)"
    words = {"separator": separator, "column": column.name}
    return Draft("list_in_a_cell", (f"{sql} GROUP BY {name}",), wanted, words, terms=told(term), tables=(table.name,))


def _list_separator(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The list falls back to commas without blanks."""
    call = tree.find(exp.GroupConcat)
    if call is None or call.args.get("separator") is None:
        return None
    call.args["separator"].replace(exp.Literal.string(","))
    return tree


def _list_order(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The list loses its order."""
    call = tree.find(exp.GroupConcat)
    order = call.this if call is not None else None
    if not isinstance(order, exp.Order):
        return None
    order.replace(order.this.copy())
    return tree


KINDS: dict[str, Kind] = {
    "lost_rounding": Kind(
        "Personalization", (rounded_average,), in_statement(_lost_rounding),
        ("I only see whole numbers, not {places} decimals.", "It rounds too much: everything behind the point is gone."),
        subtlety=0,
    ),
    "missing_label": Kind(
        "Personalization", (labelled_holes,), in_statement(_missing_label),
        ("Where there is no {column} the cell stays empty instead of saying {label}.",
         "The word {label} never appears.",
         "I still get NULL for some rows of {table}."),
        subtlety=0,
    ),
    "bands_in_wrong_order": Kind(
        "Personalization", (bands,), in_statement(_bands_in_wrong_order),
        ("Nothing is ever {top}.", "Rows with a very high {value} are called {middle}."),
    ),
    "zero_is_counted": Kind(
        "Personalization", (side_by_side,), in_statement(_zero_is_counted),
        ("The columns for {first} and {second} always show the same number.", "Each column counts all rows, whatever their {column} is."),
    ),
    "lost_padding": Kind(
        "Personalization", (padded_code,), in_statement(_lost_padding),
        ("The leading zeros are missing.", "The codes are not like {example}: no zeros are filled in."),
        subtlety=0,
    ),
    "list_separator": Kind(
        "Personalization", (list_in_a_cell,), in_statement(_list_separator),
        ("The entries are stuck together with bare commas.", "Between two entries I want exactly {separator!r}, and I get something else."),
        subtlety=0,
    ),
    "list_order": Kind(
        "Personalization", (list_in_a_cell,), in_statement(_list_order),
        ("The lists are not in alphabetical order.", "The {column} entries come in some other order than the alphabet's."),
    ),
}  # fmt: skip
