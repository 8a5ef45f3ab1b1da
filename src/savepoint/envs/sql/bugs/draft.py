"""What every kind of bug is made of: a right script that has the place for it, the fault, and what a user sees of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import sqlglot
from sqlglot import exp

from savepoint.envs.sql.bugs.ground import Ground

Category = Literal["Query", "Management", "Personalization", "Efficiency"]
Script = tuple[exp.Expr, ...]
Fault = Callable[[Script, Random], Script | None]

CATEGORIES: tuple[Category, ...] = ("Query", "Management", "Personalization", "Efficiency")


def parse(sql: str) -> exp.Expr:
    """One statement as a syntax tree of sqlglot."""
    return sqlglot.parse_one(sql, dialect="sqlite")


def write(tree: exp.Expr) -> str:
    """The tree as SQLite's SQL."""
    return tree.sql(dialect="sqlite")


@dataclass(frozen=True, slots=True)
class Probe:
    """A look at the state that a script leaves: the rows of `query` after the statements of `before`."""

    query: str
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A right script over a database, and what it is for.

    form: the name of its construction. gold: its statements. wanted: what it gives, as a noun phrase, or what it does, as a verb phrase (Management); exact,
    so that a reader can write the script from it. words: what the user's description of the trouble may mention. setup: statements that the database needs
    first. wrap: text around the gold's only statement, for what sqlglot does not parse (a trigger's head and end). terms: conditions in `wanted` that a
    question may give a name to, (text, SQL). probes, raises: how the state is looked at afterwards; (statement, whether it must fail).
    uses: keywords that `wanted` demands.
    """

    form: str
    gold: tuple[str, ...]
    wanted: str
    words: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    wrap: tuple[str, str] = ("", "")
    terms: tuple[tuple[str, str], ...] = ()
    tables: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    raises: tuple[tuple[str, bool], ...] = ()
    uses: tuple[str, ...] = ()

    def script(self) -> Script:
        """The gold's statements as trees."""
        return tuple(parse(sql) for sql in self.gold)

    def text(self, script: Script) -> tuple[str, ...]:
        """A script's statements as SQL, with the wrap."""
        head, end = self.wrap
        return tuple(f"{head}{write(tree)}{end}" for tree in script)


Form = Callable[[Ground, Random], Draft | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of bug: right scripts that it occurs in, the fault itself (a pure function on their trees), and how users describe it.

    subtlety: 0 where an error says what is wrong, 1 where the result is plainly wrong, 2 where only some rows are (NULLs, ties, last days).
    most_work: for Efficiency, the share of the issue's VM steps that a repair may take.
    """

    category: Category
    forms: tuple[Form, ...]
    fault: Fault
    symptoms: tuple[str, ...]
    subtlety: int = 1
    most_work: float | None = None

    def checks(self) -> tuple[dict[str, Any], ...]:
        """The checks that a task of this kind has whatever its script: none means the grader's default comparison."""
        return () if self.most_work is None else ({"type": "result"}, {"type": "vm_steps", "max_ratio": self.most_work})


def in_statement(change: Callable[[exp.Expr, Random], exp.Expr | None]) -> Fault:
    """A fault in the last statement of a script. `change` is given a copy that it may alter, and gives None where the kind does not apply."""

    def fault(script: Script, rng: Random) -> Script | None:
        tree = change(script[-1].copy(), rng)
        return None if tree is None else (*script[:-1], tree)

    return fault


def conjuncts(condition: exp.Expr) -> list[exp.Expr]:
    """The terms of a conjunction, in order."""
    return [term.unnest() for term in condition.flatten()] if isinstance(condition, exp.And) else [condition]


def conjunction(terms: list[exp.Expr]) -> exp.Expr | None:
    """The terms joined by AND; None for none."""
    return exp.and_(*terms, copy=False, dialect="sqlite") if terms else None


def set_condition(select: exp.Expr, condition: exp.Expr | None, clause: Literal["where", "having"] = "where") -> None:
    """Put a condition in the place of a clause's own; None takes the clause out."""
    made = None if condition is None else (exp.Where if clause == "where" else exp.Having)(this=condition)
    select.set(clause, made)
