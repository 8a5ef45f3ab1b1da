"""Faults of comparing values: numbers against texts, days and times, patterns and case."""

from __future__ import annotations

import re
from datetime import date, timedelta
from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, in_statement
from savepoint.envs.sql.bugs.ground import Ground, Term, pick_one, told, where, with_terms
from savepoint.envs.sql.bugs.grouping import groups_over_total
from savepoint.envs.sql.part import PartTable
from savepoint.envs.sql.schema import Column, literal, quote

_MONTHS = "January February March April May June July August September October November December".split()
_WEEKDAYS = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split()


def _dated(ground: Ground, rng: Random) -> tuple[PartTable, Column, list[str]] | None:
    """A table with a column of days, and the distinct days in it (at most 400, in order)."""
    able = [(t, c) for t in ground.keyed for c in t.having("date")]
    if not able:
        return None
    table, column = pick_one(able, rng)
    name = quote(column.name)
    days = ground.rows(f"SELECT DISTINCT substr({name}, 1, 10) AS day FROM {quote(table.name)} WHERE {name} IS NOT NULL ORDER BY day")
    texts = [row[0] for row in days if isinstance(row[0], str) and re.fullmatch(r"\d{4}-\d\d-\d\d", row[0])]
    return (table, column, texts[:: max(1, len(texts) // 400)]) if len(texts) >= 4 else None


def _listing(ground: Ground, table: PartTable, rng: Random, condition: str, phrase: str, avoid: str) -> tuple[str, str, str]:
    """(SQL, wanted, form): rows, their number, a figure of theirs, or their number by group, under a condition that `phrase` puts in words."""
    source = quote(table.name)
    groups = [c for c in ground.groups(table) if c.name != avoid]
    numbers = [c for c in ground.figures(table, additive=True) if c.name != avoid]
    style = rng.random()
    if groups and style < 0.3:
        group = pick_one(groups, rng)
        sql = f"SELECT {quote(group.name)}, COUNT(*) AS n FROM {source} WHERE {condition} GROUP BY {quote(group.name)}"
        return sql, f"by {group.name}, the number of rows of {table.name} {phrase} (columns: {group.name}, number)", "number_by_group"
    if numbers and style < 0.5:
        value = pick_one(numbers, rng)
        function, word = pick_one((("SUM", "total"), ("AVG", "average")), rng)
        sql = f"SELECT {function}({quote(value.name)}), COUNT(*) FROM {source} WHERE {condition}"
        return sql, f"the {word} {value.name} and the number of the rows of {table.name} {phrase} (columns: {word}, number)", f"{word}_of_rows"
    if style < 0.65:
        return f"SELECT COUNT(*) FROM {source} WHERE {condition}", f"the number of rows of {table.name} {phrase}", "number_of_rows"
    shown = [c for c in ground.shown(table) if c.name != avoid] or list(table.columns)
    show = pick_one(shown, rng)
    columns = list(dict.fromkeys((table.primary or "", show.name, avoid)))
    sql = f"SELECT {', '.join(map(quote, columns))} FROM {source} WHERE {condition}"
    return sql, f"the rows of {table.name} {phrase} (columns: {', '.join(columns)})", "rows"


def _made(name: str, built: tuple[str, str, str], words: dict[str, str], table: PartTable) -> Draft:
    sql, wanted, form = built
    return Draft(f"{name}_{form}", (sql,), wanted, words, tables=(table.name,))


def rows_of_a_part_of_time(ground: Ground, rng: Random) -> Draft | None:
    """Rows of a year, a month of any year, or a day of the week."""
    found = _dated(ground, rng)
    if found is None:
        return None
    table, column, days = found
    day = pick_one(days, rng)
    weekday = (date.fromisoformat(day).weekday() + 1) % 7
    code, value, phrase = pick_one((
        ("%Y", day[:4], f"whose {column.name} is in {day[:4]}"),
        ("%m", day[5:7], f"whose {column.name} is in {_MONTHS[int(day[5:7]) - 1]} (of any year)"),
        ("%w", str(weekday), f"whose {column.name} is a {_WEEKDAYS[weekday]}"),
        ("%d", day[8:10], f"whose {column.name} is day {int(day[8:10])} of a month"),
    ), rng)  # fmt: skip
    term = ground.narrow(table, rng, 5, table.rows, avoid=(column.name,), whole=0.6) or Term("", "", "")
    condition = where(f"strftime('{code}', {quote(column.name)}) = '{value}'", term.sql).removeprefix(" WHERE ")
    more = f" and that have {term.text}" if term.text else ""
    return _made("part_of_time", _listing(ground, table, rng, condition, phrase + more, column.name), {"by": column.name, "table": table.name}, table)


def _text_against_number(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """A text function is compared with a number, or a total with a text: SQLite never finds them equal, and every text greater than any number."""
    for comparison in tree.find_all(exp.EQ, exp.GT):
        left, right = comparison.left, comparison.right
        if not isinstance(right, exp.Literal):
            continue
        if isinstance(left, exp.AggFunc) and not right.is_string:
            right.replace(exp.Literal.string(right.name))
            return tree
        if isinstance(left, exp.TimeToStr | exp.Anonymous | exp.Func) and right.is_string and right.name.isdigit():
            right.replace(exp.Literal.number(str(int(right.name))))
            return tree
    return None


def rows_between_days(ground: Ground, rng: Random) -> Draft | None:
    """Rows from one day to another, both included whole, in a column that holds times of the day."""
    found = _dated(ground, rng)
    if found is None:
        return None
    table, column, days = found
    first, last = sorted(rng.sample(range(len(days)), 2))
    start, end, name = days[first], days[last], quote(column.name)
    after = (date.fromisoformat(end) + timedelta(days=1)).isoformat()
    condition = f"{name} >= '{start}' AND {name} < '{after}'"
    if ground.count(table.name, condition) < 3:
        return None
    phrase = f"from {start} to {end} by {column.name}, both days included"
    built = _listing(ground, table, rng, condition, phrase, column.name)
    return _made("between_days", built, {"by": column.name, "table": table.name, "end": end}, table)


def _last_day_lost(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`d >= first AND d < the day after` becomes `d BETWEEN first AND last`, which ends at midnight before the last day's rows."""
    low = next((c for c in tree.find_all(exp.GTE) if isinstance(c.right, exp.Literal) and c.right.is_string), None)
    high = next((c for c in tree.find_all(exp.LT) if isinstance(c.right, exp.Literal) and c.right.is_string), None)
    if low is None or high is None or low.parent is not high.parent or low.left != high.left:
        return None
    try:
        end = (date.fromisoformat(high.right.name) - timedelta(days=1)).isoformat()
    except ValueError:
        return None
    both = low.parent
    assert both is not None
    both.replace(exp.Between(this=low.left.copy(), low=low.right.copy(), high=exp.Literal.string(end)))
    return tree


def figures_by_month(ground: Ground, rng: Random) -> Draft | None:
    """Counts or totals by month."""
    found = _dated(ground, rng)
    if found is None:
        return None
    table, column, _ = found
    name, numbers = quote(column.name), ground.figures(table, additive=True)
    code, words = pick_one((("%Y-%m", "month (written YYYY-MM)"), ("%m", "month of the year (01 to 12, all years together)")), rng)
    measure, what = "COUNT(*)", "the number of rows"
    if numbers and rng.random() < 0.5:
        value = pick_one(numbers, rng)
        function, word = pick_one((("SUM", "total"), ("AVG", "average"), ("MAX", "highest")), rng)
        measure, what = f"{function}({quote(value.name)})", f"the {word} {value.name}"
    term = ground.narrow(table, rng, 8, table.rows, avoid=(column.name,), whole=0.5) or Term("", "", "")
    filled = f"NOT {name} IS NULL" if column.filled < 1 else ""
    sql = f"SELECT strftime('{code}', {name}) AS month, {measure} AS figure FROM {quote(table.name)}{where(filled, term.sql)} GROUP BY month"
    wanted = f"by {words} of {column.name}, {what} of {table.name}{with_terms(term)} (columns: month, figure)"
    form = "by_month" if code == "%m" else "by_year_and_month"
    return Draft(form, (sql,), wanted, {"by": column.name, "table": table.name}, terms=told(term), tables=(table.name,))


def _minute_for_month(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`%m` (month) becomes `%M` (minute) in every strftime."""
    found = [text for text in tree.find_all(exp.Literal) if text.is_string and text.name in ("%m", "%Y-%m")]
    for text in found:
        text.replace(exp.Literal.string(text.name.replace("%m", "%M")))
    return tree if found else None


def days_between(ground: Ground, rng: Random) -> Draft | None:
    """Days from one column of dates to another, or to a fixed day."""
    found = _dated(ground, rng)
    if found is None:
        return None
    table, column, days = found
    others = [c for c in table.having("date") if c.name != column.name]
    groups = [c for c in ground.groups(table) if c.name != column.name]
    group = pick_one(groups, rng) if groups and rng.random() < 0.4 else None
    term = ground.narrow(table, rng, 4, avoid=(column.name, group.name if group else "")) or Term("", "", "")
    key, name = quote(table.primary or ""), quote(column.name)
    if others and rng.random() < 0.7:
        other = pick_one(others, rng)
        end, words = quote(other.name), f"from {column.name} to {other.name}"
    else:
        last = (date.fromisoformat(days[-1]) + timedelta(days=rng.randint(1, 30))).isoformat()
        end, words = f"'{last}'", f"from {column.name} to {last}"
    inner = f"julianday({end}) - julianday({name})"
    wanted = f"for each row of {table.name}{with_terms(term)}, the days {words}, parts of a day as decimals (columns: {table.primary}, days)"
    sql = f"SELECT {key}, {inner} AS days FROM {quote(table.name)}{where(term.sql)}"
    if group is not None:
        sql = f"SELECT {quote(group.name)}, AVG({inner}) AS days FROM {quote(table.name)}{where(term.sql)} GROUP BY {quote(group.name)}"
        wanted = f"by {group.name}, the average number of days {words} (decimals kept) over the rows of {table.name}{with_terms(term)}"
        wanted += f" (columns: {group.name}, days)"
    form = "average_days" if group else "days_between"
    return Draft(form, (sql,), wanted, {"by": column.name, "table": table.name}, terms=told(term), tables=(table.name,))


def _subtracted_texts(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`julianday(a) - julianday(b)` becomes `a - b`, which subtracts the leading years."""
    for difference in tree.find_all(exp.Sub):
        sides = (difference.left, difference.right)
        if all(isinstance(side, exp.Func) and side.sql().upper().startswith("JULIANDAY") for side in sides):
            left, right = (next(side.find_all(exp.Column, exp.Literal)).copy() for side in sides)
            difference.replace(exp.Sub(this=left, expression=right))
            return tree
    return None


def _fragment(ground: Ground, rng: Random) -> tuple[PartTable, Column, str] | None:
    """A readable column, and a lower-case word of four letters or more out of one of its values."""
    able = [(t, c) for t in ground.keyed for c in t.having("name", "word") if t.rows >= 10]
    if not able:
        return None
    table, column = pick_one(able, rng)
    name = quote(column.name)
    values = ground.rows(f"SELECT DISTINCT {name} FROM {quote(table.name)} WHERE {name} IS NOT NULL ORDER BY {name} LIMIT 2000")
    text = pick_one(values, rng)[0] if values else None
    words = re.findall(r"[A-Za-z]{4,}", text) if isinstance(text, str) else []
    if not words:
        return None
    word = pick_one(words, rng)
    if rng.random() < 0.5:
        word = word[: rng.randint(3, len(word))]
    return table, column, word.lower()


def rows_containing(ground: Ground, rng: Random) -> Draft | None:
    """Rows whose text contains a word, whatever its case."""
    found = _fragment(ground, rng)
    if found is None:
        return None
    table, column, word = found
    term = ground.narrow(table, rng, 5, table.rows, avoid=(column.name,), whole=0.6) or Term("", "", "")
    style = pick_one((("%{}%", "contains {!r}"), ("{}%", "begins with {!r}"), ("%{}", "ends with {!r}")), rng)
    condition = where(f"{quote(column.name)} LIKE {literal(style[0].format(word))}", term.sql).removeprefix(" WHERE ")
    phrase = f"whose {column.name} {style[1].format(word)}, in capitals or small letters" + (f", and that have {term.text}" if term.text else "")
    words = {"column": column.name, "word": word, "table": table.name}
    return _made(style[1].split()[0], _listing(ground, table, rng, condition, phrase, column.name), words, table)


def _case_sensitive_match(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """LIKE becomes GLOB, which tells capitals from small letters."""
    like = next((t for t in tree.find_all(exp.Like) if isinstance(t.expression, exp.Literal)), None)
    if like is None or "_" in like.expression.name:
        return None
    like.replace(exp.Glob(this=like.this.copy(), expression=exp.Literal.string(like.expression.name.replace("%", "*"))))
    return tree


def _lost_wildcard(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The pattern loses its `%`, or writes `*` for it, which LIKE takes for a star."""
    like = next((t for t in tree.find_all(exp.Like) if isinstance(t.expression, exp.Literal) and "%" in t.expression.name), None)
    if like is None:
        return None
    like.expression.replace(exp.Literal.string(like.expression.name.replace("%", "*" if rng.random() < 0.5 else "")))
    return tree


KINDS: dict[str, Kind] = {
    "text_against_number": Kind(
        "Query", (rows_of_a_part_of_time, rows_of_a_part_of_time, groups_over_total), in_statement(_text_against_number),
        ("It finds nothing, although {table} has what I ask for.", "My comparison is never true, whatever figure I put there.",
         "The condition matches no row at all. I have checked the value by hand, and it is there."),
    ),
    "last_day_lost": Kind(
        "Query", (rows_between_days,), in_statement(_last_day_lost),
        ("The rows of the last day are missing.", "What happened on {end} itself does not come.", "It seems to stop just before {end} begins."),
        subtlety=2,
    ),
    "minute_for_month": Kind(
        "Query", (figures_by_month,), in_statement(_minute_for_month),
        ("The months are wrong; where a month should stand there are quite other figures.",
         "What it shows for the month has nothing to do with the month of {by}."),
    ),
    "subtracted_texts": Kind(
        "Query", (days_between,), in_statement(_subtracted_texts),
        ("The numbers are far too small to be days.",
         "What I get looks like a difference of years.",
         "Where {by} lies months back, I still get next to nothing."),
    ),
    "case_sensitive_match": Kind(
        "Query", (rows_containing,), in_statement(_case_sensitive_match),
        ("It does not find rows that have {word} in other letters, capitals for example.", "Capitals and small letters should not matter, but they do.",
         "Rows of {table} where the {column} is spelled with capitals are not found."),
    ),
    "lost_wildcard": Kind(
        "Query", (rows_containing,), in_statement(_lost_wildcard),
        ("It finds hardly anything, though {word} occurs in many.", "It finds next to nothing, and I can see {word} in the {column} of several rows.",
         "The pattern does not match the {column} values that it should."),
    ),
}  # fmt: skip
