"""What users write: the question that a query answers, and the issue about one that does not."""

from __future__ import annotations

import re
from functools import lru_cache
from random import Random
from typing import Literal

from savepoint.envs.sql.query import AGGREGATES, Condition, Query

Wording = Literal["brief", "plain"]


_BRIEF = {
    "list": "list {first} of {table}",
    "distinct": "list different {first} of {table}",
    "count": "number of {table}",
    "count_by": "number of {table} per {first}",
    "aggregate": "{function} {measured} of {table}",
    "group": "{function} {measured} of {table} per {first}",
    "top": "{first} and {second} of the {limit} {table} with {extreme} {ordered}",
    "join_list": "{first} of {other} and {second} of its {table}",
    "join_group": "{function} {measured} of {table} per {first} of {other}",
}
_PLAIN = {
    "list": "the {first} of every row of {table}, repeated values included",
    "distinct": "every different {first} in {table}, each once",
    "count": "the number of rows of {table}",
    "count_by": "each {first} in {table} with the number of rows that have it",
    "aggregate": "the {function} {measured} over {table}",
    "group": "each {first} in {table} with its {function} {measured}",
    "top": "the {first} and the {second} of the {limit} of {table} with the {extreme} {ordered}, {extreme} first",
    "join_list": "for each row of {table} that refers to a row of {other}, the {first} of that row and its own {second}",
    "join_group": "each {first} in {other} with the {function} {measured} of the rows of {table} that refer to it",
}
_COMPARISONS = {">": "is over", "<": "is under", "=": "is exactly"}


def question(query: Query, wording: Wording = "brief") -> str:
    """What the query is for, as a noun phrase or short command: `brief` is what a policy of half a million parameters reads, `plain` says it in full."""
    templates, say = (_BRIEF, str) if wording == "brief" else (_PLAIN, spoken)
    columns = [say(ref.column) for ref in query.select] + ["", ""]
    function, measured = query.aggregate or ("", None)
    text = templates["count_by" if query.form == "count" and query.group else query.form].format(
        first=columns[0], second=columns[1], table=query.table, other=query.select[0].table if query.select else "",
        function=AGGREGATES.get(function, ""), measured=say(measured.column) if measured else "",
        limit=query.limit if wording == "brief" else _rows(query.limit), extreme="largest" if query.order and query.order[1] else "smallest",
        ordered=say(query.order[0].column) if query.order else "",
    )  # fmt: skip
    if query.where is None:
        return text
    return f"{text}{' where' if wording == 'brief' else ', taking only rows where'} {_condition(query.where, wording)}"


def _rows(count: int | None) -> str:
    return "one row" if count == 1 else f"{count} rows"


def _condition(condition: Condition, wording: Wording) -> str:
    name = condition.ref.column if wording == "brief" else spoken(condition.ref.column)
    if condition.is_date:
        since = "since" if wording == "brief" else "on or after"
        return f"{name} is {'before' if condition.operator == '<' else since} {condition.value}"
    return f"{name} {'is' if isinstance(condition.value, str) else _COMPARISONS[condition.operator]} {condition.value}"


@lru_cache(maxsize=4096)
def spoken(column: str) -> str:
    """`UnitPrice` or `unit_price` as people say it: unit price."""
    words = re.sub(r"[\W_]+", " ", column)
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[^\W\d])(?=\d)", " ", words)
    return " ".join(words.lower().split()) or column


_ISSUES = {
    "migrated": (
        "I need {wanted}. The query below worked for months, but since the last migration it fails.",
        "This report should give {wanted}. Somebody changed the schema, and now my query only gives an error.",
        "After yesterday's migration my query is broken. What I want is {wanted}.",
    ),
    "error": (
        "I need {wanted}, but my query fails with an error.",
        "My query does not run. What I want is {wanted}.",
        "I am trying to get {wanted}. The database refuses my query.",
    ),
    "wrong": (
        "I need {wanted}. My query runs, but its result is not that.",
        "This should give {wanted}, yet the result looks wrong. Where is my mistake?",
        "I am trying to get {wanted}. The query below gives something else.",
    ),
}


def issue_text(query: Query, wording: Wording, trouble: Literal["migrated", "error", "wrong"], rng: Random) -> str:
    """The user's text of a debugging task. `brief` is the question alone: what went wrong is seen from the query and its result."""
    if wording == "brief":
        return question(query)
    return rng.choice(_ISSUES[trouble]).format(wanted=question(query, "plain"))


def request_text(query: Query, wording: Wording) -> str:
    """The user's text of a generation task."""
    return question(query) if wording == "brief" else f"Give me {question(query, 'plain')}."
