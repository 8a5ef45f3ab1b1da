"""Faults of triggers and constraints: totals overwritten or spoilt everywhere, checks that let everything pass, keys that are too narrow."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, Probe, in_statement
from savepoint.envs.sql.bugs.ground import Ground, pick_one
from savepoint.envs.sql.schema import quote


def kept_total(ground: Ground, rng: Random) -> Draft | None:
    """A trigger that keeps a total by parent up to date when a child comes or goes."""

    def fits(table: object) -> bool:
        return any(c.role == "number" and c.additive and c.filled == 1 for c in table.columns)  # type: ignore[attr-defined]

    link = ground.choose_link(rng, lambda link: link.child.primary is not None and link.child.primary != link.key and fits(link.child))
    if link is None:
        return None
    value = pick_one([c for c in link.child.columns if c.role == "number" and c.additive and c.filled == 1], rng)
    child, key, number, primary = quote(link.child.name), quote(link.key), quote(value.name), quote(link.child.primary or "")
    totals = ground.free_name(link.parent.name, rng, ("totals", "sums", "summary", "balance"))
    setup = (f"CREATE TABLE {totals} AS SELECT {key} AS ref, SUM({number}) AS total FROM {child} WHERE NOT {key} IS NULL GROUP BY {key}",)
    found = ground.rows(f"SELECT {primary}, {key} FROM {child} WHERE NOT {key} IS NULL ORDER BY {primary} LIMIT 200")
    rows = [(row[0], row[1]) for row in found if isinstance(row[0], int) and isinstance(row[1], int)]
    if len(rows) < 4:
        return None
    chosen = rng.sample(rows, 2)
    comes, name = rng.random() < 0.6, pick_one(("keep_total", "update_total", "follow_total"), rng)
    event, row, sign = ("INSERT", "NEW", "+") if comes else ("DELETE", "OLD", "-")
    others = ", ".join(quote(c.name) for c in link.child.columns if c.name != link.child.primary)
    before = tuple(
        f"INSERT INTO {child} ({primary}, {others}) SELECT (SELECT MAX({primary}) + 1 FROM {child}), {others} FROM {child} WHERE {primary} = {chosen_key}"
        if comes else f"DELETE FROM {child} WHERE {primary} = {chosen_key}"
        for chosen_key, _ in chosen
    )  # fmt: skip
    refs = ", ".join(sorted({str(ref) for _, ref in chosen}))
    probes = (Probe(f"SELECT ref, ROUND(total, 6) FROM {totals} WHERE ref IN ({refs}) ORDER BY ref", before),
              Probe(f"SELECT COUNT(total), ROUND(SUM(total), 6) FROM {totals}", before[:1]))  # fmt: skip
    sql = f"UPDATE {totals} SET total = total {sign} {row}.{number} WHERE ref = {row}.{key}"
    wanted = f"create a trigger {name}: whenever a row of {link.child.name} is {'inserted' if comes else 'deleted'}, its {value.name} is"
    wanted += f" {'added to' if comes else 'taken off'} the total in {totals} whose ref is the row's {link.key}"
    head = f"CREATE TRIGGER {name} AFTER {event} ON {child} BEGIN "
    words = {"other": totals, "child": link.child.name, "value": value.name, "key": link.key, "done": "inserted" if comes else "deleted"}
    form = f"kept_total_{event.lower()}"
    return Draft(form, (sql,), wanted, words, setup, (head, "; END"), tables=(link.parent.name, link.child.name), probes=probes)


def _overwritten_total(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`total = total + NEW.x` becomes `total = NEW.x`."""
    found = tree.find(exp.Add, exp.Sub)
    if not isinstance(tree, exp.Update) or found is None:
        return None
    found.replace(found.expression.copy())
    return tree


def _every_total(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """The update inside the trigger loses its WHERE."""
    if not isinstance(tree, exp.Update) or tree.args.get("where") is None:
        return None
    tree.set("where", None)
    return tree


def ratings(ground: Ground, rng: Random) -> Draft | None:
    """A table of ratings: a range that is checked, and one rating for each row and author."""
    table = ground.choose_table(rng, lambda t: t.rows >= 8, keyed=True)
    if table is None:
        return None
    key, source = quote(table.primary or ""), quote(table.name)
    keys = [row[0] for row in ground.rows(f"SELECT {key} FROM {source} ORDER BY {key} LIMIT 50") if isinstance(row[0], int)]
    if len(keys) < 2:
        return None
    name = ground.free_name(table.name, rng, ("ratings", "reviews", "scores", "votes"))
    figure, author = pick_one((("stars", "author"), ("points", "reviewer"), ("grade", "person"), ("score", "user_name")), rng)
    low, high = pick_one(((1, 5), (0, 10), (1, 10), (0, 100), (1, 3)), rng)
    ref, other = rng.sample(keys, 2)
    sql = f"CREATE TABLE {name} (ref INTEGER NOT NULL REFERENCES {source} ({key}), {figure} INTEGER NOT NULL CHECK ({figure} >= {low} AND {figure} <= {high}),"
    sql += f" {author} TEXT NOT NULL, UNIQUE (ref, {author}))"
    into = f"INSERT INTO {name} (ref, {figure}, {author}) VALUES"
    raises = (
        (f"{into} ({ref}, {low}, 'Ann'), ({ref}, {high}, 'Bob'), ({other}, {low}, 'Ann')", False),
        (f"{into} ({ref}, {high + 1}, 'Ann')", True), (f"{into} ({ref}, {low - 1}, 'Ann')", True), (f"{into} ({ref}, NULL, 'Ann')", True),
        (f"{into} ({ref}, {low}, 'Ann'), ({ref}, {high}, 'Ann')", True), (f"{into} (NULL, {low}, 'Ann')", True), (f"{into} ({ref}, {low}, NULL)", True),
    )  # fmt: skip
    wanted = f"create a table {name} with the columns ref (the {table.primary} of {table.name}), {figure} (a whole number from {low} to {high}, nothing else is"
    wanted += f" accepted) and {author}, none of them ever empty; one {author} can rate each ref once, and several can rate the same ref"
    words = {"other": name, "figure": figure, "author": author, "high": str(high), "ref": str(ref)}
    return Draft("ratings", (sql,), wanted, words, tables=(table.name,), raises=raises)


def _check_accepts_all(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """`a >= 1 AND a <= 5` in a CHECK becomes OR, which is true of every number."""
    check = tree.find(exp.CheckColumnConstraint)
    both = check.find(exp.And) if check is not None else None
    if both is None:
        return None
    both.replace(exp.Or(this=both.left.copy(), expression=both.right.copy()))
    return tree


def _narrow_key(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """UNIQUE over two columns loses the second."""
    unique = tree.find(exp.UniqueColumnConstraint)
    if unique is None or unique.this is None or len(unique.this.expressions) < 2:
        return None
    unique.this.set("expressions", unique.this.expressions[:1])
    return tree


KINDS: dict[str, Kind] = {
    "overwritten_total": Kind(
        "Management", (kept_total,), in_statement(_overwritten_total),
        ("The total becomes just the {value} of the last row that was {done}.", "After one {child} row is {done}, the old total is lost."),
    ),
    "every_total": Kind(
        "Management", (kept_total,), in_statement(_every_total),
        ("One {child} row, and all totals in {other} change.", "It is not only the row of its own {key} that changes: every total does."),
    ),
    "check_accepts_all": Kind(
        "Management", (ratings,), in_statement(_check_accepts_all),
        ("It accepts any {figure}, even one far over {high}.", "My CHECK refuses nothing at all."),
    ),
    "narrow_key": Kind(
        "Management", (ratings,), in_statement(_narrow_key),
        ("The second {author} who rates the same ref is refused.", "For ref {ref} only a single row can be entered, whoever the {author} is."),
    ),
}  # fmt: skip
