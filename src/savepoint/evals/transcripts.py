"""What the agent did: traces read line by line, its behaviour counted, and the same task found before and after learning.

Trace files may be larger than memory. A scan keeps one small record a trajectory, with the place of its line; what is shown is read again.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers.sql import SqlLexer

from savepoint.errors import UserError

Sort = Literal["renamed", "bug"]
_ISSUE = re.compile(r"\A(?P<question>.*?)\n+sql: (?P<sql>.*?)\n+result: (?P<result>.*)\Z", re.DOTALL)
_SHOWN = 4000


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory of an evaluation, as far as choosing and counting need it. `offset`: where its line begins, in bytes.

    looked: it ran a query. found: it submitted a word that its observations hold and the user's message does not: the live database told it.
    unchanged: it submitted the user's query as it was (None: nothing was submitted, or the prompt quotes no query).
    """

    path: Path
    offset: int
    task: str
    sort: Sort
    success: bool
    looked: bool
    found: bool
    unchanged: bool | None


@dataclass(frozen=True, slots=True)
class Shown:
    """A message of the agent and what came of it. `sql` is highlighted; `observation` is None where the episode ended."""

    thought: str
    tool: str | None
    sql: tuple[Markup, ...]
    reward: float | None
    cut: bool
    observation: str | None


@dataclass(frozen=True, slots=True)
class Transcript:
    """An episode, ready to be shown. `question`, `issue` and `result` are the user's message; without a query all is `question`."""

    task: str
    category: str
    system: str
    question: str
    issue: Markup | None
    result: str | None
    turns: tuple[Shown, ...]
    outcome: str
    reason: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The same held-out task before and after. `pattern` words what it shows, and `alike` of the `of` tasks of its sort show it (`how` often)."""

    sort: Sort
    before: Transcript
    after: Transcript
    pattern: str
    how: str
    alike: int
    of: int


def scan(path: Path) -> list[Record]:
    """The records of a trace file, in order, without what our infrastructure failed at. UserError for a line that is none."""
    records = []
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            try:
                record = _record(path, offset, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}:{number}: not a trajectory: {error!r}") from None
            offset += len(line)
            if record is not None:
                records.append(record)
    return records


def _record(path: Path, offset: int, trajectory: dict[str, Any]) -> Record | None:
    if trajectory["reward"] is None or trajectory["status"] == "failed":
        return None
    turns = trajectory["turns"]
    calls = [turn["tool_call"] for turn in turns if turn["tool_call"]]
    user = "\n".join(turn["text"] for turn in turns if turn["role"] == "user")
    submitted = ";".join(_statements(calls[-1])) if calls and calls[-1]["name"] == "submit_solution" else ""
    issue = _ISSUE.match(user)
    unchanged = _plain(issue["sql"]) == _plain(submitted) if issue and submitted else None
    seen = "\n".join(turn["observation"] for turn in turns if turn["observation"])
    found = not _words(submitted) & _words(seen) <= _words(user)
    sort: Sort = "renamed" if _kind(trajectory).startswith("renamed") else "bug"
    looked = any(call["name"] == "execute_sql" for call in calls)
    return Record(path, offset, trajectory["task"], sort, trajectory["reward"] == 1.0, looked, found, unchanged)


def _kind(trajectory: dict[str, Any]) -> str:
    """The kind of bug of a made task, else the category."""
    return trajectory.get("kind") or trajectory["category"] or ""


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _plain(sql: str) -> str:
    """SQL without what does not change it: spacing, and the last semicolon."""
    return re.sub(r"\s*([(),;])\s*", r"\1", " ".join(sql.split())).rstrip(";")


def _statements(call: dict[str, Any] | None) -> list[str]:
    arguments = (call or {}).get("arguments") or {}
    value = arguments.get("sql_list", arguments.get("sql"))
    return [value] if isinstance(value, str) else [str(item) for item in value or ()]


def behaviour(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """What was done, by sort of task: `n`, `success`, the share that `looked`, success `when_looked` and `when_not`, and the share of
    submissions that were `unchanged`. A share of nothing is None.
    """
    out = {}
    for sort in ("renamed", "bug"):
        part = [record for record in records if record.sort == sort]
        if part:
            out[sort] = {
                "n": len(part), "success": _mean(r.success for r in part), "looked": _mean(r.looked for r in part),
                "when_looked": _mean(r.success for r in part if r.looked), "when_not": _mean(r.success for r in part if not r.looked),
                "unchanged": _mean(r.unchanged for r in part if r.unchanged is not None),
            }  # fmt: skip
    return out


def _mean(values: Iterable[bool]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


_PATTERNS: dict[Sort, tuple[str, Callable[[Record], bool], Callable[[Record], bool]]] = {
    "renamed": (
        "failed by guessing the new name, then solved by reading it from the live database",
        lambda r: not r.success and not r.looked and r.unchanged is False, lambda r: r.success and r.found,
    ),
    "bug": (
        "failed by handing the query back unchanged, then repaired it",
        lambda r: not r.success and bool(r.unchanged), lambda r: r.success,
    ),
}  # fmt: skip


def pairs(before: Sequence[Record], after: Sequence[Record]) -> list[Pair]:
    """One task of each sort, as it was done before and after.

    Taken is the first task, in the order of the file, whose every sample failed in its sort's own way before and succeeded in it after;
    else the first with such a sample on both sides; else the first that failed and then succeeded; else the first that is on both sides.
    """
    chosen = []
    for sort, (pattern, was, became) in _PATTERNS.items():
        first, last = (_by_task(records, sort) for records in (before, after))
        both = [task for task in first if task in last]
        if not both:
            continue
        typical = [task for task in both if all(map(was, first[task])) and all(map(became, last[task]))]
        some = [task for task in both if any(map(was, first[task])) and any(map(became, last[task]))]
        solved = [task for task in both if any(not r.success for r in first[task]) and any(r.success for r in last[task])]
        if typical or some:
            task, alike = (typical or some)[0], len(typical or some)
            old, new = next(filter(was, first[task])), next(filter(became, last[task]))
            how = "in every sample" if typical else "in at least one sample"
        elif solved:
            task, alike, pattern, how = solved[0], len(solved), "failed, then solved", "in at least one sample"
            old, new = next(r for r in first[task] if not r.success), next(r for r in last[task] if r.success)
        else:
            task, alike, pattern, how = both[0], len(both), "evaluated before and after", "in every sample"
            old, new = first[task][0], last[task][0]
        chosen.append(Pair(sort, read(old), read(new), pattern, how, alike, len(both)))
    return chosen


def _by_task(records: Sequence[Record], sort: Sort) -> dict[str, list[Record]]:
    out = defaultdict(list)
    for record in records:
        if record.sort == sort:
            out[record.task].append(record)
    return out


def read(record: Record) -> Transcript:
    """The episode of a record, from its line in the trace file."""
    with record.path.open("rb") as file:
        file.seek(record.offset)
        trajectory = json.loads(file.readline())
    turns = trajectory["turns"]
    user = "\n".join(turn["text"] for turn in turns if turn["role"] == "user")
    issue = _ISSUE.match(user)
    shown = []
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        if turn["role"] == "assistant":
            call = turn["tool_call"] or {}
            observation = after["observation"] if after and after["role"] == "tool" else None
            shown.append(
                Shown(cut(turn["text"]), call.get("name"), tuple(highlighted(sql) for sql in _statements(call)), turn["reward"],
                      turn["finish_reason"] == "length", None if observation is None else cut(observation))
            )  # fmt: skip
    system = "\n\n".join(turn["text"] for turn in turns if turn["role"] == "system")
    return Transcript(
        trajectory["task"], (_kind(trajectory) or "no category").replace("_", " "), cut(system),
        cut(issue["question"] if issue else user), highlighted(issue["sql"]) if issue else None, cut(issue["result"]) if issue else None,
        tuple(shown), trajectory["outcome"] or "none", trajectory["reason"] or "", trajectory["reward"],
    )  # fmt: skip


def cut(text: str) -> str:
    """At most some thousands of characters, saying what was left out."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… {len(text) - _SHOWN:,} more characters"


def highlighted(sql: str) -> Markup:
    """SQL as HTML with pygments' short classes; everything in it is escaped."""
    return Markup(highlight(cut(sql), SqlLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n"))  # noqa: S704
