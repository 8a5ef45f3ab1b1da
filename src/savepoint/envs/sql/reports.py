"""What users write about deep tasks: what they want, what goes wrong, put together from many templates; and the check of a paraphrase."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from random import Random

Paraphrase = Callable[[str], str]

_RESULT_OPENINGS = (
    "I need {wanted}.", "My query should give {wanted}.", "For a report I want {wanted}.", "I am trying to get {wanted}.", "What I want is {wanted}.",
    "Our dashboard should show {wanted}.", "The result should be {wanted}.", "I was asked to find {wanted}.", "Wanted: {wanted}.",
    "The query below is meant to return {wanted}.",
)  # fmt: skip
_WORK_OPENINGS = (
    "I want to {wanted}.", "My script should {wanted}.", "The job is to {wanted}.", "I have to {wanted}.", "Every night we {wanted}.",
    "A colleague asked me to {wanted}.",
    "What it should do: {wanted}.",
)  # fmt: skip
_CLOSINGS = ("", "", "What is wrong?", "Where is my mistake?", "Please correct it.", "How do I have to write it?", "Can you fix this?", "What am I missing?")
_ERRORS = (
    "The database refuses it: {error}.", "All I get is an error: {error}.", "It stops with \"{error}\".", "SQLite answers {error}, and that is all.",
)  # fmt: skip
_OBSERVED = ("I get {rows}.", "What comes out has {rows}.", "The result has {rows}.")
_SLOW = (
    "The result is right, but it takes far too long.", "It is correct and much too slow.", "It works, but every run does many times the work that is needed.",
    "The answer is fine; only the time it takes is not.",
)  # fmt: skip
_SLOW_LIMITS = (
    "I need the same rows with at most {share} % of the work (counted in SQLite's VM steps).",
    "Please write it so that it needs no more than {share} % of the VM steps, with the same result.",
    "Same result, at most {share} % of the VM steps, please.",
)  # fmt: skip
_REQUESTS = (
    "Give me {wanted}.", "Show me {wanted}.", "I need {wanted}.", "What I want to know: {wanted}.", "Please list {wanted}.", "Find {wanted}.",
    "Can you get me {wanted}?",
)  # fmt: skip
_NAMES = ("notable", "relevant", "flagged", "special", "qualifying", "core")

SYMPTOMS: dict[str, tuple[str, ...]] = {
    "misspelled_column": ("A name in it seems to be wrong.",),
    "wrong_column": ("One of the columns shows something else than I asked for.", "The values are those of another column."),
    "wrong_table": ("What comes out does not belong to the table that I mean.", "The rows come from the wrong place."),
    "wrong_aggregate": ("The figure is computed the wrong way.", "The figure means something else than what I asked for."),
    "missing_group_by": ("Only a single line comes out.", "Everything is thrown together into one line."),
    "wrong_comparison": ("It takes the rows on the wrong side of the limit.", "My condition does the opposite of what I want."),
    "wrong_join_key": ("The two tables are put together wrongly.", "Rows appear side by side that do not belong together."),
    "wrong_direction": ("I get the other end of the list.", "The order is upside down."),
    "lost_distinct": ("Values come more than once.", "The result has duplicates."),
    "lost_condition": ("Rows go into it that should not.", "It takes all rows, whatever my condition was to be."),
}
"""What users see of the kinds of bug on typed queries."""


def report(wanted: str, symptom: str, rng: Random, *, work: bool = False, rows: int | None = None) -> str:
    """An issue: what is wanted, what goes wrong, perhaps how many rows came. work: `wanted` is a verb phrase."""
    opening = _said(rng.choice(_WORK_OPENINGS if work else _RESULT_OPENINGS), wanted)
    seen = [rng.choice(_OBSERVED).format(rows=f"{rows or 'no'} rows")] if rows not in (None, 1) and rng.random() < 0.25 else []
    body = [symptom, *seen]
    sentences = [opening, *body] if rng.random() < 0.7 else [*body, opening]
    return " ".join([*sentences, rng.choice(_CLOSINGS)]).strip()


def error_symptom(error: str, rng: Random) -> str:
    """What a user says of an error message."""
    return rng.choice(_ERRORS).format(error=error.rstrip("."))


def slowness(wanted: str, symptom: str, most_work: float, rng: Random) -> str:
    """An issue about a right result that comes too slowly, with the share of the work that a repair may take."""
    limit = rng.choice(_SLOW_LIMITS).format(share=round(100 * most_work))
    return " ".join((_said(rng.choice(_RESULT_OPENINGS), wanted), rng.choice(_SLOW), symptom, limit))


def request(wanted: str, terms: Iterable[tuple[str, str]], table: str, rng: Random) -> tuple[str, str | None]:
    """A question, and the evidence that it needs: in half of those that have a condition, the condition is only named, and explained beside it."""
    evidence = None
    named = [(text, sql) for text, sql in terms if wanted.count(f"rows of {table} with {text}") == 1]
    if named and rng.random() < 0.5:
        text, sql = named[rng.randrange(len(named))]
        name = rng.choice(_NAMES)
        wanted = wanted.replace(f"with {text}", f"that are {name}")
        evidence = f"rows are {name} when {re.sub(r'(?<![A-Za-z0-9_])[a-z][.]', '', sql)}"
        evidence = f"{table}: {evidence}"
    return _said(rng.choice(_REQUESTS), wanted), evidence


def _said(template: str, wanted: str) -> str:
    """The template with what is wanted; between commas where that begins with a preposition: "I need, by City, the number of rows"."""
    if not wanted.startswith(("by ", "for ")):
        return template.format(wanted=wanted)
    return re.sub(r"(?<!:) \{wanted\}", ", {wanted}", template).format(wanted=wanted)


def reworded(text: str, paraphrase: Paraphrase | None, names: Iterable[str]) -> str:
    """The text in other words, if these keep every figure, quoted value and name of a table or column; else the text itself."""
    if paraphrase is None:
        return text
    made = paraphrase(text).strip()
    facts = {*re.findall(r"'[^']*'", text), *re.findall(r"\d+(?:\.\d+)?", text), *(name for name in names if re.search(rf"\b{re.escape(name)}\b", text))}
    return made if made and all(fact in made for fact in facts) else text
