"""Faults of changing data: too many rows hit, values lost, work not committed, rows left behind."""

from __future__ import annotations

from random import Random

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import Draft, Kind, Probe, Script, in_statement
from savepoint.envs.sql.bugs.ground import Ground, Term, pick_one
from savepoint.envs.sql.part import PartTable
from savepoint.envs.sql.schema import Column, literal, quote

_LISTED_ROWS = 40


def look(table: PartTable, column: str, *, text: bool = False) -> Probe:
    """A look at one column of a table that no wrong update survives: all rows of a short table, sums weighted by the key (or by value) of a long one."""
    name, key, source = quote(column), quote(table.primary or ""), quote(table.name)
    if table.rows <= _LISTED_ROWS:
        return Probe(f"SELECT {key}, {name} FROM {source} ORDER BY {key}")
    if text:
        return Probe(f"SELECT {name}, COUNT(*), SUM({key}) FROM {source} GROUP BY {name} ORDER BY {name} LIMIT 60")
    return Probe(f"SELECT COUNT({name}), MIN({name}), MAX({name}), ROUND(SUM({name} * ({key} % 97 + 1)), 3) FROM {source}")


def _changeable(ground: Ground, rng: Random) -> tuple[PartTable, Column, Term] | None:
    """A table, a column of numbers, and a condition on another column that part of the rows meet."""
    table = ground.choose_table(rng, lambda t: ground.figures(t, additive=True), keyed=True)
    if table is None:
        return None
    value = pick_one(ground.figures(table, additive=True), rng)
    term = ground.narrow(table, rng, 1, max(1, table.rows * 3 // 4), avoid=(value.name,), whole=0)
    return None if term is None else (table, value, term)


def changed_numbers(ground: Ground, rng: Random) -> Draft | None:
    """A number raised, lowered or set in some rows."""
    found = _changeable(ground, rng)
    if found is None:
        return None
    table, value, term = found
    name, by = quote(value.name), rng.randint(1, 20)
    change, words, form = pick_one((
        (f"ROUND({name} * {1 + by / 100:.2f}, 2)", f"raise {value.name} by {by} % (rounded to 2 decimals)", "raised_by_percent"),
        (f"{name} + {by}", f"add {by} to {value.name}", "added"),
        (f"{name} - {by}", f"take {by} off {value.name}", "subtracted"),
        (f"{name} * 2", f"double {value.name}", "doubled"),
        ("0", f"set {value.name} to 0", "zeroed"),
    ), rng)  # fmt: skip
    sql = f"UPDATE {quote(table.name)} SET {name} = {change} WHERE {term.sql}"
    wanted = f"{words} in the rows of {table.name} with {term.text}, and leave every other row as it is"
    words_told = {"table": table.name, "value": value.name, "term": term.text}
    return Draft(form, (sql,), wanted, words_told, tables=(table.name,), probes=(look(table, value.name),))


def changed_words(ground: Ground, rng: Random) -> Draft | None:
    """A word set in some rows."""
    table = ground.choose_table(rng, lambda t: t.having("word"), keyed=True)
    if table is None:
        return None
    column = pick_one(table.having("word"), rng)
    term = ground.narrow(table, rng, 1, max(1, table.rows * 3 // 4), avoid=(column.name,), whole=0)
    if term is None:
        return None
    value = pick_one(column.figures, rng)
    sql = f"UPDATE {quote(table.name)} SET {quote(column.name)} = {literal(value)} WHERE {term.sql}"
    wanted = f"set {column.name} to {literal(value)} in the rows of {table.name} with {term.text}, and leave every other row as it is"
    words = {"table": table.name, "value": column.name, "term": term.text}
    return Draft("set_word", (sql,), wanted, words, tables=(table.name,), probes=(look(table, column.name, text=True),))


def _without_where(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """An UPDATE loses its WHERE."""
    if not isinstance(tree, exp.Update) or tree.args.get("where") is None:
        return None
    tree.set("where", None)
    return tree


def renamed_words(ground: Ground, rng: Random) -> Draft | None:
    """Two values of a column written otherwise, by CASE."""
    table = ground.choose_table(rng, lambda t: any(len(c.figures) >= 3 for c in t.having("word")), keyed=True)
    if table is None:
        return None
    column = pick_one([c for c in table.having("word") if len(c.figures) >= 3], rng)
    first, second = rng.sample(list(column.figures), 2)
    name = quote(column.name)
    style = pick_one(("upper", "new", "short"), rng)
    new = {"upper": lambda v: str(v).upper() + "!", "new": lambda v: f"New {v}", "short": lambda v: str(v)[:2] + "."}[style]
    case = f"CASE {name} WHEN {literal(first)} THEN {literal(new(first))} WHEN {literal(second)} THEN {literal(new(second))} ELSE {name} END"
    wanted = f"write {column.name} of {table.name} as {literal(new(first))} where it is {literal(first)} and as {literal(new(second))} where it is"
    wanted += f" {literal(second)}; all other values stay"
    sql = f"UPDATE {quote(table.name)} SET {name} = {case}"
    words = {"table": table.name, "value": column.name, "first": str(first), "second": str(second)}
    return Draft(f"renamed_words_{style}", (sql,), wanted, words, tables=(table.name,), probes=(look(table, column.name, text=True),))


def _case_without_else(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """CASE loses its ELSE."""
    case = tree.find(exp.Case)
    if case is None or case.args.get("default") is None:
        return None
    case.set("default", None)
    return tree


def corrected_from_list(ground: Ground, rng: Random) -> Draft | None:
    """Values taken over from a list that has some of the rows only."""
    table = ground.choose_table(rng, lambda t: ground.figures(t, additive=True) and t.rows >= 8, keyed=True)
    if table is None:
        return None
    value = pick_one(ground.figures(table, additive=True), rng)
    key, name, source = quote(table.primary or ""), quote(value.name), quote(table.name)
    other = ground.free_name(table.name, rng, ("corrections", "updates", "new_values", "fixes"))
    modulus = pick_one((3, 4, 5), rng)
    setup = (f"CREATE TABLE {other} AS SELECT {key} AS ref, {name} + 1 AS value FROM {source} WHERE {key} % {modulus} = 0",)
    sql = f"UPDATE {source} SET {name} = (SELECT n.value FROM {other} AS n WHERE n.ref = {source}.{key}) WHERE {key} IN (SELECT n.ref FROM {other} AS n)"
    wanted = f"take over the corrected {value.name} of {table.name} from {other} (its ref is the {table.primary}, its value the new {value.name}), and leave"
    wanted += f" the rows that {other} does not mention as they are"
    words = {"table": table.name, "value": value.name, "other": other}
    return Draft(f"corrected_from_list_{modulus}", (sql,), wanted, words, setup, tables=(table.name,), probes=(look(table, value.name),))


def moved_to_archive(ground: Ground, rng: Random) -> Draft | None:
    """Rows moved to another table, in one transaction."""
    table = ground.choose_table(rng, lambda t: t.rows >= 8, keyed=True)
    if table is None:
        return None
    term = ground.narrow(table, rng, 1, max(1, table.rows // 2), whole=0)
    if term is None:
        return None
    archive, source = ground.free_name(table.name, rng, ("archive", "old", "history", "closed")), quote(table.name)
    setup = (f"CREATE TABLE {archive} AS SELECT * FROM {source} WHERE 0",)
    gold = ("BEGIN", f"INSERT INTO {archive} SELECT * FROM {source} WHERE {term.sql}", f"DELETE FROM {source} WHERE {term.sql}", "COMMIT")
    key = quote(table.primary or "")
    probes = (
        *(Probe(f"SELECT COUNT(*), MIN({key}), MAX({key}), SUM({key}) FROM {name}") for name in (archive, source)),
        Probe(f"SELECT * FROM {archive} ORDER BY {key} LIMIT 5"),
    )
    wanted = f"move the rows of {table.name} with {term.text} to {archive} (which has the same columns), all in one transaction, so that they are gone from"
    words = {"table": table.name, "other": archive, "term": term.text}
    return Draft("moved_to_archive", gold, f"{wanted} {table.name} afterwards", words, setup, tables=(table.name,), probes=probes)


def _missing_commit(script: Script, rng: Random) -> Script | None:
    """The transaction is never committed: the session ends, and all of it is gone."""
    return script[:-1] if isinstance(script[-1], exp.Commit) and len(script) > 2 else None


def _emptied_first(script: Script, rng: Random) -> Script | None:
    """The rows are deleted before they are copied."""
    places = {type(statement): position for position, statement in enumerate(script)}
    if exp.Insert not in places or exp.Delete not in places or places[exp.Insert] > places[exp.Delete]:
        return None
    out = list(script)
    out[places[exp.Insert]], out[places[exp.Delete]] = script[places[exp.Delete]], script[places[exp.Insert]]
    return tuple(out)


def counted_up(ground: Ground, rng: Random) -> Draft | None:
    """A counter beside notes: raised where the row is there, made where it is not."""
    table = ground.choose_table(rng, lambda t: t.rows >= 8, keyed=True)
    if table is None:
        return None
    key, source = quote(table.primary or ""), quote(table.name)
    keys = [row[0] for row in ground.rows(f"SELECT {key} FROM {source} ORDER BY {key} LIMIT 200")]
    even, odd = [k for k in keys if isinstance(k, int) and k % 2 == 0], [k for k in keys if isinstance(k, int) and k % 2 == 1]
    if not even or not odd:
        return None
    notes = ground.free_name(table.name, rng, ("stats", "counters", "log", "marks"))
    counter = pick_one(("visits", "plays", "calls", "orders"), rng)
    old, new, by = pick_one(even, rng), pick_one(odd, rng), rng.randint(1, 9)
    setup = (
        f"CREATE TABLE {notes} (ref INTEGER PRIMARY KEY, {counter} INTEGER NOT NULL DEFAULT 0, note TEXT)",
        f"INSERT INTO {notes} SELECT {key}, {key} % 5 + 1, 'note ' || {key} FROM {source} WHERE {key} % 2 = 0",
    )
    one = rng.random() < 0.5
    values = f"({old}, {by})" if one else f"({old}, {by}), ({new}, {by})"
    sql = f"INSERT INTO {notes} (ref, {counter}) VALUES {values} ON CONFLICT(ref) DO UPDATE SET {counter} = {counter} + excluded.{counter}"
    where_ = f"ref {old}" if one else f"ref {old} and ref {new}"
    wanted = f"add {by} to {counter} of {where_} in {notes}, making a row where there is none yet, and keep the notes that are there"
    probes = (Probe(f"SELECT ref, {counter}, note FROM {notes} WHERE ref IN ({old}, {new}) ORDER BY ref"),
              Probe(f"SELECT COUNT(*), SUM({counter}), COUNT(note) FROM {notes}"))  # fmt: skip
    words = {"other": notes, "counter": counter}
    return Draft("counted_up_one" if one else "counted_up_two", (sql,), wanted, words, setup, tables=(table.name,), probes=probes)


def _replaced(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """An upsert becomes INSERT OR REPLACE, which throws the old row away."""
    if not isinstance(tree, exp.Insert) or tree.args.get("conflict") is None:
        return None
    tree.set("conflict", None)
    tree.set("alternative", "REPLACE")
    return tree


def removed_with_children(ground: Ground, rng: Random) -> Draft | None:
    """A row removed together with those that refer to it."""
    referring = [r.to_table for r in ground.schema.references]
    link = ground.choose_link(rng, lambda link: link.child.name not in referring and referring.count(link.parent.name) == 1)
    if link is None:
        return None
    key, child, parent, primary = quote(link.key), quote(link.child.name), quote(link.parent.name), quote(link.primary)
    found = ground.rows(f"SELECT {key} FROM {child} WHERE {key} IN (SELECT {primary} FROM {parent}) GROUP BY {key} ORDER BY {key} LIMIT 300")
    if len(found) < 3:
        return None
    chosen = sorted(rng.sample([int(row[0]) for row in found if isinstance(row[0], int)], rng.randint(1, 2)))
    which = f"= {chosen[0]}" if len(chosen) == 1 else f"IN ({chosen[0]}, {chosen[1]})"
    gold = (f"DELETE FROM {child} WHERE {key} {which}", f"DELETE FROM {parent} WHERE {primary} {which}")
    probes = (
        Probe(f"SELECT COUNT(*) FROM {child} WHERE {key} {which}"),
        Probe(f"SELECT COUNT(*), SUM({primary}) FROM {parent}"),
        Probe(f"SELECT COUNT(*), SUM({key}) FROM {child}"),
    )
    said = " and ".join(map(str, chosen))
    them = "it" if len(chosen) == 1 else "them"
    wanted = f"remove {link.parent.name} {said} (by {link.primary}) together with every {link.child.name} row that refers to {them}"
    words = {"child": link.child.name, "parent": link.parent.name}
    return Draft(f"removed_with_children_{len(chosen)}", gold, wanted, words, tables=(link.parent.name, link.child.name), probes=probes)


def _children_left(script: Script, rng: Random) -> Script | None:
    """Only the parent is removed."""
    return script[1:] if len(script) == 2 and all(isinstance(statement, exp.Delete) for statement in script) else None


def without_duplicates(ground: Ground, rng: Random) -> Draft | None:
    """Repeated lines of an import removed, the first of each kept."""
    table = ground.choose_table(rng, lambda t: t.rows >= 12 and len(ground.shown(t)) >= 2, keyed=True)
    if table is None:
        return None
    columns = rng.sample(ground.shown(table), min(len(ground.shown(table)), rng.randint(2, 3)))
    names, key, source = [quote(c.name) for c in columns], quote(table.primary or ""), quote(table.name)
    lines = ground.free_name(table.name, rng, ("import", "upload", "staging", "feed"))
    listed = ", ".join(names)
    setup = (
        f"CREATE TABLE {lines} (line INTEGER PRIMARY KEY, {listed})",
        f"INSERT INTO {lines} ({listed}) SELECT {listed} FROM {source} ORDER BY {key} LIMIT 60",
        f"INSERT INTO {lines} ({listed}) SELECT {listed} FROM {source} WHERE {key} % 3 = 0 ORDER BY {key} LIMIT 12",
    )
    sql = f"DELETE FROM {lines} WHERE NOT line IN (SELECT MIN(line) FROM {lines} GROUP BY {listed})"
    said = ", ".join(c.name for c in columns[:-1]) + f" and {columns[-1].name}"
    wanted = f"remove the repeated lines of {lines}: of lines that agree in {said}, only the one with the lowest line stays"
    probes = (Probe(f"SELECT COUNT(*), SUM(line), MAX(line) FROM {lines}"), Probe(f"SELECT line, {listed} FROM {lines} ORDER BY line LIMIT 15"))
    return Draft(f"without_duplicates_{len(columns)}", (sql,), wanted, {"other": lines, "last": columns[-1].name}, setup, tables=(table.name,), probes=probes)


def _too_few_columns(tree: exp.Expr, rng: Random) -> exp.Expr | None:
    """Lines count as repeated although they differ in the last column."""
    group = tree.find(exp.Group)
    if group is None or len(group.expressions) < 2:
        return None
    group.set("expressions", group.expressions[:-1])
    return tree


def entered_in_a_circle(ground: Ground, rng: Random) -> Draft | None:
    """Two rows that refer to each other, under enforced and deferred foreign keys: only a transaction can hold both."""
    table = ground.choose_table(rng, lambda t: t.rows >= 8, keyed=True)
    if table is None:
        return None
    keys = [int(row[0]) for row in ground.rows(f"SELECT {quote(table.primary or '')} FROM {quote(table.name)} ORDER BY 1 LIMIT 100") if row[0] is not None]
    set_, entry = pick_one((("set", "entry"), ("group", "member"), ("bundle", "item"), ("series", "part")), rng)
    sets, entries = ground.free_name(table.name, rng, (set_,)), ground.free_name(table.name, rng, (entry,))
    first, ref, number = quote(f"first_{entry}"), quote(f"{set_}_id"), rng.randint(1, 90)
    setup = (
        f"CREATE TABLE {sets} (id INTEGER PRIMARY KEY, {first} INTEGER NOT NULL REFERENCES {entries} (id) DEFERRABLE INITIALLY DEFERRED)",
        f"CREATE TABLE {entries} (id INTEGER PRIMARY KEY, {ref} INTEGER NOT NULL REFERENCES {sets} (id), target INTEGER NOT NULL)",
    )
    target = pick_one(keys, rng)
    gold = ("PRAGMA foreign_keys = ON", "BEGIN", f"INSERT INTO {sets} VALUES ({number}, {number * 10})",
            f"INSERT INTO {entries} VALUES ({number * 10}, {number}, {target})", "COMMIT")  # fmt: skip
    wanted = f"enter {sets} {number} with its first {entry}, {entries} {number * 10} (target {target}), in one transaction (BEGIN and COMMIT) with foreign keys"
    wanted += " switched on; the two rows refer to each other"
    probes = (Probe(f"SELECT s.id, s.{first}, e.{ref}, e.target FROM {sets} AS s JOIN {entries} AS e ON e.id = s.{first}"),)
    return Draft(f"circle_of_{set_}", gold, wanted, {"other": sets, "entry": entries}, setup, tables=(table.name,), probes=probes, uses=("BEGIN", "COMMIT"))


def _missing_transaction(script: Script, rng: Random) -> Script | None:
    """BEGIN and COMMIT are left out: each statement stands alone."""
    kept = tuple(statement for statement in script if not isinstance(statement, exp.Transaction | exp.Commit))
    return kept if 1 < len(kept) < len(script) else None


KINDS: dict[str, Kind] = {
    "update_without_where": Kind(
        "Management", (changed_numbers, changed_words), in_statement(_without_where),
        ("After it ran, {value} was changed in the whole table.",
         "It also changed rows without {term}.",
         "All rows of {table} were hit, not only those that I meant."),
    ),
    "case_without_else": Kind(
        "Management", (renamed_words,), in_statement(_case_without_else),
        ("Every row with another {value} has lost it.", "Rows that are neither {first} nor {second} now have no {value} at all."),
    ),
    "update_from_unmatched": Kind(
        "Management", (corrected_from_list,), in_statement(_without_where),
        ("Rows that {other} does not mention have no {value} any more.", "The {value} of all rows that are not in {other} is lost."),
        subtlety=2,
    ),
    "missing_commit": Kind(
        "Management", (moved_to_archive,), _missing_commit,
        ("In my session all looks well, but after I reconnect nothing has happened.", "The next morning the rows are back in {table}, and {other} is empty."),
        subtlety=2,
    ),
    "emptied_first": Kind(
        "Management", (moved_to_archive,), _emptied_first,
        ("The rows are gone from {table}, but {other} stays empty.", "Nothing arrives in {other}; the rows are simply lost."),
    ),
    "missing_transaction": Kind(
        "Management", (entered_in_a_circle,), _missing_transaction,
        ("The constraint is deferred, and still the first statement is refused.", "Neither row can go first, because each needs the other."),
        subtlety=2,
    ),
    "replaced_row": Kind(
        "Management", (counted_up,), in_statement(_replaced),
        ("The note of a row that was there already is lost, and {counter} starts from the beginning.",
         "Notes vanish from {other}, and the old {counter} is not added to."),
        subtlety=2,
    ),
    "children_left": Kind(
        "Management", (removed_with_children,), _children_left,
        ("The {child} rows that belong to it are still there.", "It leaves {child} rows behind that refer to no {parent}."),
    ),
    "too_few_columns": Kind(
        "Management", (without_duplicates,), in_statement(_too_few_columns),
        ("It removes too much: lines that differ in {last} are gone as well.",
         "Lines of {other} with another {last} are no repetition, but they are removed too."),
        subtlety=2,
    ),
}  # fmt: skip
