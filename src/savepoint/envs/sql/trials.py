"""Trials by execution on several images of a database: a deep task is kept when its gold is right and its issue wrong on more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from savepoint.envs.sql.bugs import Draft, Kind
from savepoint.envs.sql.bugs.draft import parse, write
from savepoint.envs.sql.compare import difference, orders_rows
from savepoint.envs.sql.neighbours import neighbours
from savepoint.envs.sql.tasks import Task
from savepoint.envs.sql.verdict import UNSCORED, Verdict
from savepoint.envs.sql.verify import Answer, Images
from savepoint.state import AnySession, BaseImage

Judge = Callable[[BaseImage, Task, Sequence[str]], Verdict]
"""What decides about an answer to a task on an image: a `Grader`'s `grade`, or anything of the same form."""

_MOST_LOOKED_AT = 80  # rows of a look at a state


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial found. why: the reason to drop the task, None where it holds. issue: what the buggy statement gave. results: a digest of both answers."""

    why: str | None
    issue: Answer | None = None
    results: str = ""


class Trials:
    """Trials on the base image and others derived from it. A judge has the last word on every task, on the base image."""

    def __init__(self, images: Images, others: Sequence[BaseImage], judge: Judge) -> None:
        self.images, self.others, self.judge = images, tuple(others), judge

    def queries(self, setup: Sequence[str], gold: str, issue: str | None, most_work: float | None = None) -> Trial:
        """Try a right and a wrong query (or no wrong one, for a generation task). most_work: the wrong one is slow, and gives the same rows."""
        image = self.images.derived(*setup)
        if image is None:
            return Trial("the set-up fails")
        nearby = [write(tree) for tree in neighbours(parse(gold))]
        self.images.answer_soon(image, [gold, *([] if issue is None else [issue]), *nearby])
        right = self.images.answer(image, gold)
        why = _fault_of_gold(right)
        if why is not None:
            return Trial(why)
        wrong = self.images.answer(image, issue) if issue is not None else None
        by_chance = [sql for sql in nearby if self._not_wrong(self.images.answer(image, sql), right, orders_rows(gold)) is not None]
        if wrong is not None:
            why = _too_fast(right, wrong, most_work) if most_work is not None else self._not_wrong(wrong, right, orders_rows(gold))
            why = why or self._elsewhere(setup, gold, issue or "", by_chance, same=most_work is not None)
            if why is not None:
                return Trial(why, wrong)
        why = self._chance(setup, gold, by_chance)
        results = blake2b(repr((right.rows, wrong and (wrong.status, wrong.rows))).encode(), digest_size=12).hexdigest()
        return Trial(why, wrong, results)

    @staticmethod
    def _not_wrong(wrong: Answer, right: Answer, ordered: bool) -> str | None:
        if wrong.status == "sql_error":
            return None
        if wrong.status != "ok":
            return "issue too big"
        return "issue does not fail" if difference(wrong.rows, right.rows, ordered=ordered) is None else None

    def _elsewhere(self, setup: Sequence[str], gold: str, issue: str, nearby: Sequence[str], *, same: bool) -> str | None:
        """On the other images, a wrong query must be wrong on at least one, and a slow one right on all."""
        ordered, wrong_on = orders_rows(gold), 0
        for other in self.others:
            image = self.images.derived(*setup, of=other)
            if image is None:
                continue
            self.images.answer_soon(image, [gold, issue, *nearby])  # `_chance` asks for the latter
            right, wrong = self.images.answer(image, gold), self.images.answer(image, issue)
            if right.status != "ok":
                return "gold fails on another image"
            fails = self._not_wrong(wrong, right, ordered) is None
            if same and fails:
                return "issue differs on another image"
            wrong_on += fails
        return None if same or wrong_on or not self.others else "issue fails on one image only"

    def _chance(self, setup: Sequence[str], gold: str, by_chance: Sequence[str]) -> str | None:
        """A wrong query close by that gives the right rows here (`by_chance`) and other rows elsewhere: here, chance would pay."""
        for other in self.others if by_chance else ():
            moved = self.images.derived(*setup, of=other)
            if moved is None:
                continue
            self.images.answer_soon(moved, [gold, *by_chance])
            right = self.images.answer(moved, gold)
            if any(self._not_wrong(self.images.answer(moved, sql), right, orders_rows(gold)) is None for sql in by_chance):
                return "another query is right by chance"
        return None

    def states(self, draft: Draft, kind: Kind, gold: Sequence[str], issue: Sequence[str]) -> tuple[Trial, tuple[dict[str, Any], ...]]:
        """Try scripts that change the database: checks are made from what the gold leaves, and the issue must fail them on the base and on another image.

        The judge has spoken then: it need not be asked about the task again.
        """
        checks: tuple[dict[str, Any], ...] = ()
        failed_on = 0
        for number, start in enumerate((None, *self.others)):
            image = self.images.derived(*draft.setup, of=start)
            found = None if image is None else self._checks(image, draft, gold)
            if image is None or found is None:
                if number == 0:
                    return Trial("the set-up fails" if image is None else "gold leaves nothing to look at"), ()
                continue
            task = Task("trial", "debugging", "trial", "trial", tuple(gold), tuple(issue), checks=found)
            why = self.verdict(image, task)
            if number == 0:
                if why is not None:
                    return Trial(why), ()
                checks = found
            elif why is not None and why != "issue does not fail":
                return Trial(f"{why} on another image"), ()
            failed_on += why is None
            if failed_on == 2:
                break
        if self.others and failed_on < 2:
            return Trial("issue fails on one image only"), ()
        return Trial(None, self._error(draft, issue), blake2b(repr(checks).encode(), digest_size=12).hexdigest()), checks

    def verdict(self, image: BaseImage, task: Task) -> str | None:
        """Why the judge would not have the task: its gold is not correct, or its issue is, or the judge cannot tell; None where all is well."""
        gold = self.judge(image, task, task.sol_sql)
        if gold.outcome == "infra":
            raise RuntimeError(f"grading {task.instance_id}: {gold.detail}")
        if gold.outcome != "correct":
            return f"gold is {gold.outcome}"
        if not task.issue_sql:
            return None
        issue = self.judge(image, task, task.issue_sql)
        if issue.outcome == "infra":
            raise RuntimeError(f"grading {task.instance_id}: {issue.detail}")
        if issue.outcome in UNSCORED:
            return f"issue is {issue.outcome}"
        return "issue does not fail" if issue.outcome == "correct" else None

    def _checks(self, image: BaseImage, draft: Draft, gold: Sequence[str]) -> tuple[dict[str, Any], ...] | None:
        """Checks of the state that the gold leaves; None where the gold or a look fails, or a look is too long."""
        out: list[dict[str, Any]] = [{"type": "uses", "keywords": [word]} for word in draft.uses]
        for probe in draft.probes:
            with self.images.lease(image) as session:
                rows = _rows_after(session, (*gold, *probe.before), probe.query)
            if rows is None or len(rows) > _MOST_LOOKED_AT:
                return None
            out.append({"type": "state", "query": probe.query, "expect": [list(row) for row in rows], "before": list(probe.before)})
        out += [{"type": "raises", "query": sql, "error": error} for sql, error in draft.raises]
        return tuple(out)

    def _error(self, draft: Draft, issue: Sequence[str]) -> Answer:
        """How the wrong script ended on the base image."""
        image = self.images.derived(*draft.setup)
        assert image is not None
        with self.images.lease(image) as session:
            for sql in issue:
                result = session.execute(sql)
                if result.status != "ok":
                    return Answer("sql_error", (), result.error or "")
        return Answer("ok")


def _rows_after(session: AnySession, statements: Sequence[str], query: str) -> list[tuple[Any, ...]] | None:
    for sql in statements:
        if session.execute(sql).status != "ok":
            return None
    result = session.execute(query)
    plain = all(not isinstance(cell, bytes) for row in result.rows for cell in row)
    return list(result.rows) if result.status == "ok" and not result.truncated and result.rows and plain else None


def _fault_of_gold(right: Answer) -> str | None:
    if right.status != "ok":
        return "gold too big" if right.status in ("too_big", "timeout") else "gold fails"
    if not right.rows:
        return "gold empty"
    # One row of nothing, none or one: `SELECT 1` would be as good.
    return "gold says too little" if len(right.rows) == 1 and all(cell in (None, 0, 1) for cell in right.rows[0]) else None


def _too_fast(right: Answer, wrong: Answer, most_work: float) -> str | None:
    """A slow form must give the same rows, and take at least twice the work that a repair may not exceed."""
    if wrong.status != "ok":
        return "issue too big"
    if difference(wrong.rows, right.rows) is not None:
        return "slow form gives other rows"
    return None if 2 * right.steps <= most_work * wrong.steps else "issue not slow enough"
