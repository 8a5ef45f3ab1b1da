"""Grading by execution: the submission runs once, in a fork of its own; the gold runs in another; then the answers are compared."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from savepoint.envs.sql.compare import difference, orders_rows
from savepoint.envs.sql.tasks import Task
from savepoint.state import AnySession, Backend, BaseImage, ExecResult, Quota, split_statements

Outcome = Literal[
    "correct", "wrong_result", "wrong_state", "sql_error", "timeout", "too_big", "denied", "no_answer", "gold_timeout", "invalid_instance", "infra"
]
UNSCORED: frozenset[str] = frozenset({"gold_timeout", "invalid_instance", "infra"})
_CODE: dict[str, Outcome] = {
    "sql_error": "sql_error", "denied": "denied", "timeout": "timeout", "too_big": "too_big", "full": "too_big", "infra": "infra",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome code and the reward it pays: 1 or 0, or None where the instance or our infrastructure is at fault."""

    outcome: Outcome
    detail: str = ""

    @property
    def reward(self) -> float | None:
        return None if self.outcome in UNSCORED else float(self.outcome == "correct")


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of one graded run. Nothing is cut before it is compared: over a cap, the outcome says so."""

    deadline_s: float = 30.0
    max_rows: int = 200_000
    max_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class _Run:
    """What one script left: the last rows and the statement that gave them, and a digest of the content where it differs from the task image."""

    failure: Verdict | None
    rows: tuple[tuple[object, ...], ...] | None = None
    width: int = 0
    query: str = ""
    content: str | None = None


@dataclass(slots=True)
class Grader:
    """Grades submissions to tasks on one backend. Results of golds are cached by (task image, exact SQL text)."""

    backend: Backend
    limits: Limits = field(default_factory=Limits)
    quota: Quota = field(default_factory=Quota)
    cache_size: int = 50_000
    seconds: float = 0.0
    _contents: dict[str, str] = field(default_factory=dict)
    _golds: OrderedDict[tuple[str, tuple[str, ...]], _Run] = field(default_factory=OrderedDict)

    def grade(self, image: BaseImage, task: Task, submission: Sequence[str]) -> Verdict:
        """The verdict on a submission (each string one or more statements) to `task`, whose set-up `image` holds already."""
        started = time.perf_counter()
        try:
            return self._grade(image, task, submission)
        finally:
            self.seconds += time.perf_counter() - started

    def _grade(self, image: BaseImage, task: Task, submission: Sequence[str]) -> Verdict:
        if not any(split_statements(sql) for sql in submission):
            return Verdict("no_answer", "nothing to run")
        gold = self.gold(image, task)
        if gold.failure is not None:
            return gold.failure
        prediction = self._run(image, submission, readonly=task.task == "generation", owner=f"grade {task.instance_id}")
        return prediction.failure or self._compare(prediction, gold, task)

    def gold(self, image: BaseImage, task: Task) -> _Run:
        """The gold's run on its own fork, run once for an image and kept. A gold that fails is the instance's fault, never the agent's."""
        key = (image.digest, tuple(task.sol_sql))
        if key in self._golds:
            self._golds.move_to_end(key)
            return self._golds[key]
        run = self._run(image, task.sol_sql, readonly=False, owner=f"gold {task.instance_id}")
        if run.failure is not None and run.failure.outcome != "infra":
            code: Outcome = "gold_timeout" if run.failure.outcome == "timeout" else "invalid_instance"
            run = _Run(Verdict(code, f"the gold: {run.failure.outcome}: {run.failure.detail}"))
        elif run.failure is None and not run.rows and (run.rows is not None or run.content is None):
            run = _Run(Verdict("invalid_instance", "the gold gives no rows and changes nothing: any answer that does as much would pass"))
        if run.failure is None or run.failure.outcome != "infra":
            self._golds[key] = run
            if len(self._golds) > self.cache_size:
                self._golds.popitem(last=False)
        return run

    def _run(self, image: BaseImage, statements: Sequence[str], *, readonly: bool, owner: str) -> _Run:
        limits, answer, query = self.limits, None, ""
        with self.backend.lease(image, owner=owner, quota=self.quota) as session:
            for sql in (part for text in statements for part in split_statements(text)):
                result = session.execute(sql, deadline_s=limits.deadline_s, max_rows=limits.max_rows, max_bytes=limits.max_bytes, readonly=readonly)
                failure = _failure(result)
                if failure is not None:
                    return _Run(failure)
                if result.columns:
                    answer, query = result, sql
            content = self._content(session)
        if answer is None:
            return _Run(None, content=content)
        return _Run(None, rows=answer.rows, width=len(answer.columns), query=query, content=content)

    def _content(self, session: AnySession) -> str | None:
        """Digest of the committed content, None where it is the task image's. What a script leaves uncommitted does not exist."""
        if session.in_transaction:
            session.execute("ROLLBACK")
        if not session.stats().delta_pages:
            return None
        image = session.image
        if image.digest not in self._contents:
            with self.backend.lease(image, owner="content") as untouched:
                self._contents[image.digest] = untouched.digest("logical")
        content = session.digest("logical")
        return None if content == self._contents[image.digest] else content

    def _compare(self, prediction: _Run, gold: _Run, task: Task) -> Verdict:
        if gold.rows is not None:
            if prediction.rows is None:
                return Verdict("wrong_result", "no statement gives rows")
            if prediction.width != gold.width:
                return Verdict("wrong_result", f"{prediction.width} columns, expected {gold.width}")
            ordered = task.conditions.get("order") or orders_rows(gold.query)
            found = difference(prediction.rows, gold.rows, ordered=bool(ordered), decimal=_decimal(task.conditions.get("decimal")))
            if found is not None:
                return Verdict("wrong_result", found)
        if prediction.content != gold.content:
            return Verdict("wrong_state", "the database is left in another state than the gold leaves it in")
        return Verdict("correct")


def _failure(result: ExecResult) -> Verdict | None:
    if result.status != "ok":
        return Verdict(_CODE[result.status], result.error or result.status)
    if result.truncated:
        return Verdict("too_big", "the result is over the cap on rows or bytes")
    return None


def _decimal(value: object) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
