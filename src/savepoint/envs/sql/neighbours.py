"""Wrong queries close to a right one: if one of them gives the right rows on an image by chance, that image cannot tell whether an answer is right."""

from __future__ import annotations

from collections.abc import Iterator

from sqlglot import exp

from savepoint.envs.sql.bugs.draft import conjunction, conjuncts, set_condition


def neighbours(tree: exp.Expr) -> Iterator[exp.Expr]:
    """The query without each of its conditions, with DISTINCT turned about, and with each UNION turned to the other sort."""
    selects = list(tree.find_all(exp.Select))
    for number, select in enumerate(selects):
        condition = select.args.get("where")
        terms = conjuncts(condition.this) if condition is not None else []
        for left_out in range(len(terms)):
            copy = tree.copy()
            kept = [term.copy() for position, term in enumerate(terms) if position != left_out]
            set_condition(list(copy.find_all(exp.Select))[number], conjunction(kept))
            yield copy
    if isinstance(tree, exp.Select) and not tree.args.get("group"):
        copy = tree.copy()
        copy.set("distinct", None if tree.args.get("distinct") else exp.Distinct())
        yield copy
    for number, union in enumerate(tree.find_all(exp.Union)):
        copy = tree.copy()
        list(copy.find_all(exp.Union))[number].set("distinct", not union.args.get("distinct"))
        yield copy
