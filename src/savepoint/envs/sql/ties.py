"""What a gold query leaves open: rows with equal ORDER BY keys may come in any order, and a LIMIT through them may keep any.

The gold is run once more without its LIMIT, with a number that says to which group each row belongs. The window function that numbers the
groups compares keys as ORDER BY does, under each key's own collation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from savepoint.envs.sql.compare import Group, Row, Rules, group_difference
from savepoint.envs.sql.lexer import Clauses, OrderTerm, clauses, tokens


def grouped_query(statement: str, columns: Sequence[str], *, keys: bool = False) -> str | None:
    """A query that gives the rows of `statement` before its LIMIT, group by group, with two more columns: the number of the group, and the OFFSET.
    None where nothing is open, or the statement cannot be rewritten.

    columns: the names of its result columns. keys: give the ORDER BY keys themselves instead, in order.
    """
    found = clauses(statement)
    if found is None or not (found.order or found.limit):
        return None
    names = [f"c{i}" for i in range(len(columns))]
    offset = _offset(found.limit)
    if not found.order:
        if keys:
            return None
        return f"WITH savepoint_rows({', '.join(names)}) AS (\n{found.body}\n) SELECT {', '.join(names)}, 1, {offset} FROM savepoint_rows"
    terms: list[str] = []
    extra: list[str] = []
    for term in found.order:
        key = _output_key(term, found, columns)
        if key is None:
            if found.select_end is None:
                return None
            key = f"c{len(names) + len(extra)}" + _collation(term.expression)
            extra.append(term.expression)
        terms.append(f"{key} {term.direction}".strip())
    body = found.body
    if extra:
        assert found.select_end is not None
        body = f"{body[: found.select_end]}, {', '.join(extra)}{body[found.select_end :]}"
    all_names = names + [f"c{len(names) + i}" for i in range(len(extra))]
    if keys:
        bare = [term.split(" ", 1)[0] for term in terms]
        return f"WITH savepoint_rows({', '.join(all_names)}) AS (\n{body}\n) SELECT {', '.join(bare)} FROM savepoint_rows ORDER BY {', '.join(terms)}"
    numbered = f"SELECT {', '.join(names)}, dense_rank() OVER (ORDER BY {', '.join(terms)}) AS savepoint_group, {offset} FROM savepoint_rows"
    return f"WITH savepoint_rows({', '.join(all_names)}) AS (\n{body}\n) {numbered} ORDER BY savepoint_group"


def _offset(limit: str | None) -> str:
    """The expression of OFFSET in `LIMIT n OFFSET m` or `LIMIT m, n`; 0 where there is none."""
    parts = tokens(limit or "")
    for i, token in enumerate(parts):
        if token.depth == 0 and token.is_word("OFFSET"):
            return f"({(limit or '')[token.end :]})"
        if token.depth == 0 and token.text == "," and i:
            return f"({(limit or '')[parts[0].end : token.start]})"
    return "0"


def _output_key(term: OrderTerm, found: Clauses, columns: Sequence[str]) -> str | None:
    """The result column that a term of ORDER BY names: by number, by its name or alias, or by being the same expression. None: it is another expression."""
    bare = _without_collation(term.expression)
    suffix = _collation(term.expression)
    pieces = tokens(bare)
    if len(pieces) == 1 and pieces[0].kind == "number" and pieces[0].text.isdecimal():
        position = int(pieces[0].text)
        return f"c{position - 1}{suffix}" if 1 <= position <= len(columns) else None
    if len(pieces) == 1 and pieces[0].kind in ("word", "name"):
        name = _unquoted(bare).lower()
        matches = [i for i, column in enumerate(columns) if column.lower() == name]
        if matches:
            return f"c{matches[0]}{suffix}"
    if len(found.outputs) == len(columns):  # without a star, positions are known
        keys = [token.key for token in pieces]
        for i, output in enumerate(found.outputs):
            if [token.key for token in tokens(output)][: len(keys)] == keys and _only_alias_follows(output, len(keys)):
                return f"c{i}{suffix}"
    return None


def _only_alias_follows(output: str, count: int) -> bool:
    rest = tokens(output)[count:]
    return not rest or (len(rest) == 2 and rest[0].is_word("AS")) or (len(rest) == 1 and rest[0].kind in ("word", "name", "string"))


def _collation(expression: str) -> str:
    parts = tokens(expression)
    if len(parts) >= 3 and parts[-2].is_word("COLLATE") and parts[-2].depth == 0:
        return f" COLLATE {parts[-1].text}"
    return ""


def _without_collation(expression: str) -> str:
    parts = tokens(expression)
    return expression[: parts[-3].end] if _collation(expression) else expression


def _unquoted(name: str) -> str:
    if name[:1] in "\"`":
        return name[1:-1].replace(name[0] * 2, name[0])
    return name[1:-1] if name.startswith("[") else name


def cut_groups(rows: Sequence[Row], gold: Sequence[Row]) -> tuple[Group, ...] | None:
    """Groups of the rows of `grouped_query`, each with how many of it the gold's result holds; None where the two do not fit together.

    The gold's own result says how many rows there are, so LIMIT need not be evaluated. Groups that OFFSET skips are left out.
    """
    groups = [tuple(row[:-2] for row in members) for _, members in groupby(rows, key=lambda row: row[-2])]
    offset = rows[0][-1] if rows else 0
    if not isinstance(offset, int):
        return None
    first, found, at = max(0, offset), [], 0
    for members in groups:
        take = min(at + len(members), first + len(gold)) - max(at, first)
        if take > 0:
            found.append(Group(members, take))
        at += len(members)
    return tuple(found) if group_difference(gold, found, Rules(ordered=True)) is None else None
