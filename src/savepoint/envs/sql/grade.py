"""Grading by execution. The submission runs once, in a fork of its own; the gold in another; checks look at what was left through a fresh connection.

Training, validation, scoring and evaluation all grade here. Outcomes are codes (`verdict.py`); the order in which one is found is that of the contract: the
instance, the first failing statement, collateral damage, the first failing check.
"""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import apsw

from savepoint.envs.sql import checks as declarative
from savepoint.envs.sql.checks import BadCheck, Examined, decimal_places
from savepoint.envs.sql.collateral import Effect, Inventory, changed_pages, collateral_damage, effect, state_difference, take_inventory
from savepoint.envs.sql.compare import Group, Rules, difference, group_difference, orders_rows
from savepoint.envs.sql.lexer import mentions
from savepoint.envs.sql.python_tests import PythonTests
from savepoint.envs.sql.run import DEFAULT_NOW, Limits, OwnWorkFailed, Run, Runner
from savepoint.envs.sql.tasks import Task
from savepoint.envs.sql.ties import cut_groups, grouped_query
from savepoint.envs.sql.verdict import OUTCOMES, UNSCORED, Outcome, Verdict
from savepoint.state import AnySession, Backend, BaseImage, Quota, StateError, split_statements

__all__ = ["OUTCOMES", "UNSCORED", "Examination", "Gold", "Grader", "Limits", "Outcome", "SelfTestFailed", "Verdict"]

Tests = Literal["auto", "checks", "python", "both"]
Ties = Literal["any", "strict"]
_INVENTORIES, _GOLD_CELLS, _RUN_CELLS = 64, 4_000_000, 4_000_000


class SelfTestFailed(RuntimeError):
    """The grader does not tell right from wrong here, so it refuses to start."""


@dataclass(slots=True)
class Gold:
    """A gold's run, kept. fault: why the instance cannot be graded. ordered: whether its query has an ORDER BY. groups: what that and a LIMIT leave open,
    looked at when it first matters."""

    run: Run
    fault: Verdict | None = None
    ordered: bool = False
    effect: Effect = field(default_factory=Effect)
    groups: tuple[Group, ...] | None = None
    groups_known: bool = False


@dataclass(frozen=True, slots=True)
class Examination:
    """A verdict with the runs it comes from. run, gold: None where grading did not get so far."""

    verdict: Verdict
    run: Run | None = None
    gold: Gold | None = None


class Grader:
    """Grades submissions to tasks on one backend. Golds, their effects and inventories are cached by (image, exact text, clock).

    limits: caps of a run. tests: which tests of an instance count. ties: "strict" compares row by row where an ORDER BY leaves the order open.
    now: the clock of SQL for tasks that do not set their own. reuse_runs: a submission that repeats another to the letter, on the same image, is answered from
    that one's run; for training, where the policy repeats itself, and the gold.

    Before its first verdict it tests itself: a right answer must be worth 1, the wrong one 0 (SelfTestFailed).
    """

    def __init__(
        self, backend: Backend, limits: Limits | None = None, quota: Quota | None = None, *, tests: Tests = "auto", ties: Ties = "any", now: str = DEFAULT_NOW,
        reuse_runs: bool = False, cache_size: int = 50_000,
    ) -> None:  # fmt: skip
        self.runner = Runner(backend, limits or Limits()) if quota is None else Runner(backend, limits or Limits(), quota)
        self.tests, self.ties, self.now, self.cache_size = tests, ties, now, cache_size
        self.reuse_runs = reuse_runs
        self.seconds = 0.0
        self._runs: OrderedDict[tuple[object, ...], Run] = OrderedDict()
        self._golds: OrderedDict[tuple[object, ...], Gold] = OrderedDict()
        self._cells = self._run_cells = 0
        self._inventories: OrderedDict[str, Inventory] = OrderedDict()
        self._steps: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._python: PythonTests | None = None
        self._tested = False

    @property
    def backend(self) -> Backend:
        return self.runner.backend

    @property
    def limits(self) -> Limits:
        return self.runner.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.runner.limits = limits

    def close(self) -> None:
        """End the process that runs Python tests, if there is one. The backend stays open."""
        if self._python is not None:
            self._python.close()
            self._python = None

    # ------------------------------------------------------------------ grading

    def grade(self, image: BaseImage, task: Task, submission: Sequence[str]) -> Verdict:
        """The verdict on a submission (each string one or more statements) to `task`, whose set-up `image` holds already."""
        return self.examine(image, task, submission).verdict

    def examine(self, image: BaseImage, task: Task, submission: Sequence[str]) -> Examination:
        """As `grade`, with the runs. A failure of our own infrastructure is tried once more, then it is "infra": never scored."""
        if not self._tested:
            self.self_test()
        started = time.perf_counter()
        try:
            found = self._guarded(image, task, submission)
            return self._guarded(image, task, submission) if found.verdict.outcome == "infra" else found
        finally:
            self.seconds += time.perf_counter() - started

    def _guarded(self, image: BaseImage, task: Task, submission: Sequence[str]) -> Examination:
        try:
            return self._examine(image, task, submission)
        except (StateError, OwnWorkFailed, OSError, MemoryError) as error:
            return Examination(Verdict("infra", f"{type(error).__name__}: {error}"))

    def _examine(self, image: BaseImage, task: Task, submission: Sequence[str]) -> Examination:
        if (task.dialect or "SQLite").lower() != "sqlite":
            return Examination(Verdict("invalid_instance", f"dialect {task.dialect!r}: only SQLite is graded here"))
        if not any(split_statements(sql) for sql in submission):
            gold = self.gold(image, task)
            return Examination(gold.fault or Verdict("no_answer", "nothing to run"), None, gold)
        gold = self.gold(image, task)
        if gold.fault is not None:
            return Examination(gold.fault, None, gold)
        looks = any(self.chosen_tests(task)) or not gold.effect.changes_nothing  # at the end state, through a fresh connection
        known = None if looks else self._runs.get(self._run_key(image, task, submission))
        if known is not None:
            return Examination(known.failure or self._rows_failing(image, task, gold, known) or Verdict("correct"), known, gold)
        with self.runner.lease(image, f"grade {task.instance_id}", self.clock(task)) as session:
            run = self.runner.run(session, submission, readonly=task.task == "generation", keep=looks)
            self._remember(image, task, submission, run)
            if run.failure is not None:
                return Examination(run.failure, run, gold)
            try:
                verdict = self._damage(image, task, gold, session, run) or self._failing(image, task, gold, session, run)
            except BadCheck as error:
                verdict = Verdict("invalid_instance", str(error))
        return Examination(verdict or Verdict("correct"), run, gold)

    def _run_key(self, image: BaseImage, task: Task, statements: Sequence[str]) -> tuple[object, ...]:
        """All that the run of a script depends on; the seed of random() is the same for every one."""
        return image.digest, tuple(statements), task.task, self.clock(task), self.limits

    def _remember(self, image: BaseImage, task: Task, statements: Sequence[str], run: Run) -> None:
        """Keep a run that another of the same text would repeat: it changed nothing, and no clock or process of ours had a part in how it ended."""
        by_chance = run.failure is not None and run.failure.outcome in ("timeout", "infra")
        if not self.reuse_runs or run.end is not None or by_chance:
            return
        self._runs[self._run_key(image, task, statements)] = run
        self._run_cells += _run_cells(run)
        while len(self._runs) > self.cache_size or self._run_cells > _RUN_CELLS:
            self._run_cells -= _run_cells(self._runs.popitem(last=False)[1])

    def _damage(self, image: BaseImage, task: Task, gold: Gold, session: AnySession, run: Run) -> Verdict | None:
        """Closes the agent's connection, and with it TEMP objects, pragmas and open transactions; then looks at what was changed."""
        if run.end is None:
            return None
        with self.runner.lease(image, "inventory", self.clock(task)) as untouched:
            pages = changed_pages(session, untouched.checkpoint()) if run.end.pages else frozenset()
            session.restore(run.end)
            if not pages:
                return None
            inventory = self._inventory(untouched)
            found = _looked_at(lambda: collateral_damage(inventory, gold.effect, session, pages, untouched))
        return None if found is None else Verdict("wrong_state", found)

    def _failing(self, image: BaseImage, task: Task, gold: Gold, session: AnySession, run: Run) -> Verdict | None:
        """The verdict of the first test that fails."""
        use_checks, use_python = self.chosen_tests(task)
        if not (use_checks or use_python):
            return self._default(image, task, gold, session, run)
        if use_checks:
            examined = Examined(self.runner, session, run, self.comparison(image, task, gold, run), lambda: self._issue_steps(image, task))
            for index, check in enumerate(task.checks):
                verdict = declarative.run_check(check, examined)
                if verdict is not None:
                    return verdict if verdict.outcome in UNSCORED else replace(verdict, check=index)
        if use_python:
            self._python = self._python or PythonTests(self.runner)
            return self._python.run(image, task, run, session, self.clock(task))
        return None

    def chosen_tests(self, task: Task) -> tuple[bool, bool]:
        """Whether the declarative checks and the Python tests of a task count; neither: its default comparison does."""
        has_checks, has_python = bool(task.checks), bool(task.test_cases)
        if self.tests == "auto":
            return has_checks, has_python and not has_checks
        return has_checks and self.tests in ("checks", "both"), has_python and self.tests in ("python", "both")

    def _default(self, image: BaseImage, task: Task, gold: Gold, session: AnySession, run: Run) -> Verdict | None:
        """Rows against the gold's; and where the gold changes tables, these must end as it leaves them."""
        wrong = self._rows_failing(image, task, gold, run)
        if wrong is not None or gold.effect.changes_nothing:
            return wrong
        with self.runner.lease(image, "inventory", self.clock(task)) as untouched:
            inventory = self._inventory(untouched)
        found = _looked_at(lambda: state_difference(inventory, gold.effect, session, existing_only=gold.run.rows is not None))
        return None if found is None else Verdict("wrong_state", found)

    def _rows_failing(self, image: BaseImage, task: Task, gold: Gold, run: Run) -> Verdict | None:
        """The default comparison of rows, where the gold has any."""
        if gold.run.rows is None:
            return None
        conditions = task.conditions
        order, distinct = conditions.get("order"), conditions.get("distinct")
        rules = Rules(order, True if distinct is None else bool(distinct), decimal_places(conditions.get("decimal")))
        found = self.comparison(image, task, gold, run)(rules)
        return None if found is None else Verdict("wrong_result", found)

    def comparison(self, image: BaseImage, task: Task, gold: Gold, run: Run) -> Callable[[Rules], str | None]:
        """How a run's rows differ from the gold's, as a function of the rules. Rules whose `ordered` is None take the gold's own ORDER BY."""

        def compare(rules: Rules) -> str | None:
            if gold.run.rows is None or run.rows is None:
                return "no statement gives rows"
            if len(run.columns) != len(gold.run.columns):
                return f"{len(run.columns)} columns, expected {len(gold.run.columns)}"
            own_order = gold.ordered
            ordered = own_order if rules.ordered is None else bool(rules.ordered)
            rules = replace(rules, ordered=ordered)
            found = difference(run.rows, gold.run.rows, ordered=ordered, duplicates=rules.duplicates, decimal=rules.decimal)
            if found is None or self.ties == "strict" or (ordered and not own_order):
                return found
            groups = self.groups(image, task, gold)
            if groups is None or (group_difference(run.rows, groups, rules) is not None):
                return found
            return None

        return compare

    # ------------------------------------------------------------------ golds

    def clock(self, task: Task) -> str:
        """What 'now' is for a task's SQL."""
        return str(task.conditions.get("now") or self.now)

    def gold(self, image: BaseImage, task: Task) -> Gold:
        """The gold's run on its own fork, run once for an image and kept. A gold that fails is the instance's fault, never the agent's."""
        key = (image.digest, tuple(task.sol_sql), task.task, self.clock(task), self.compares_rows(task), any(self.chosen_tests(task)), self.limits)
        if key in self._golds:
            self._golds.move_to_end(key)
            return self._golds[key]
        gold = self._run_gold(image, task)
        if gold.fault is None or gold.fault.outcome != "infra":
            self._golds[key] = gold
            self._cells += _cells(gold)
            while len(self._golds) > self.cache_size or (self._cells > _GOLD_CELLS and len(self._golds) > 1):
                self._cells -= _cells(self._golds.popitem(last=False)[1])
        return gold

    def run_gold(self, image: BaseImage, task: Task, *, seed: int = 0, now: str | None = None) -> Run:
        """The gold once more, on a fork of its own."""
        with self.runner.lease(image, f"gold {task.instance_id}", now or self.clock(task), seed=seed) as session:
            return self.runner.run(session, task.sol_sql, readonly=task.task == "generation")

    def run_again(self, image: BaseImage, task: Task, statements: Sequence[str]) -> Run:
        """Other statements on a fork of the task image, under the rules of the task."""
        with self.runner.lease(image, f"again {task.instance_id}", self.clock(task)) as session:
            return self.runner.run(session, statements, readonly=task.task == "generation")

    def _run_gold(self, image: BaseImage, task: Task) -> Gold:
        if not any(split_statements(sql) for sql in task.sol_sql):
            return Gold(Run(()), Verdict("invalid_instance", "there is no gold"))
        with self.runner.lease(image, f"gold {task.instance_id}", self.clock(task)) as session:
            run = self.runner.run(session, task.sol_sql, readonly=task.task == "generation")
            if run.failure is not None:
                return Gold(run, _gold_fault(run.failure))
            made = Effect()
            if run.end is not None and run.end.pages:
                with self.runner.lease(image, "inventory", self.clock(task)) as untouched:
                    pages = changed_pages(session, untouched.checkpoint())
                    session.restore(run.end)
                    made = effect(self._inventory(untouched), session, pages, untouched)
            self._remember(image, task, task.sol_sql, run)
        gold = Gold(replace(run, end=None), None, run.rows is not None and orders_rows(run.query), made)
        gold.fault = self._doubt(image, task, gold)
        return gold

    def _doubt(self, image: BaseImage, task: Task, gold: Gold) -> Verdict | None:
        """Why a gold that ran proves nothing, or None."""
        by_state = gold.run.rows is None and not any(self.chosen_tests(task)) and not gold.effect.changes_nothing
        if self.compares_rows(task) and not gold.run.rows and not by_state:
            what = "gives no rows" if gold.run.rows is None else "gives zero rows"
            return Verdict("invalid_instance", f"the gold {what}, so that any answer that does as much would pass")
        if self.may_vary(image, task) and not same_rows(gold.run, self.run_gold(image, task, seed=1)):
            return Verdict("invalid_instance", "the gold gives another result each time it runs")
        return None

    def compares_rows(self, task: Task) -> bool:
        """Whether the gold's rows decide."""
        use_checks, use_python = self.chosen_tests(task)
        return (use_checks and any(check.get("type") == "result" for check in task.checks)) or not (use_checks or use_python)

    def may_vary(self, image: BaseImage, task: Task) -> bool:
        """Whether the gold could give another result with other random numbers: it, or a view, trigger or default of the database, names such a function."""
        with self.runner.lease(image, "inventory", self.clock(task)) as untouched:
            inventory = self._inventory(untouched)
        return mentions([*task.sol_sql, *(entry.sql for entry in inventory.schema.values())], "random")

    def groups(self, image: BaseImage, task: Task, gold: Gold) -> tuple[Group, ...] | None:
        """What the gold's ORDER BY and LIMIT leave open; None where that is nothing, or cannot be found out."""
        if not gold.groups_known:
            gold.groups = self._find_groups(image, task, gold)
            gold.groups_known = True
            self._cells += sum(len(group.rows) for group in gold.groups or ()) * max(1, len(gold.run.columns))
        return gold.groups

    def _find_groups(self, image: BaseImage, task: Task, gold: Gold) -> tuple[Group, ...] | None:
        query = grouped_query(gold.run.query, gold.run.columns) if gold.run.rows is not None else None
        if query is None:
            return None
        with self.runner.lease(image, f"ties {task.instance_id}", self.clock(task)) as session:
            before = self.runner.run(session, gold.run.statements[: gold.run.position])
            if before.failure is not None:
                return None
            result = self.runner.ask(session, query, readonly=True)
        if result.status != "ok" or result.truncated:
            return None
        return cut_groups(result.rows, gold.run.rows or ())

    def _issue_steps(self, image: BaseImage, task: Task) -> int:
        """VM steps of the issue SQL, as far as it runs. BadCheck without any."""
        key = (image.digest, tuple(task.issue_sql), self.clock(task), self.limits)
        if key not in self._steps:
            with self.runner.lease(image, f"issue {task.instance_id}", self.clock(task)) as session:
                self._steps[key] = self.runner.run(session, task.issue_sql).vm_steps
            if len(self._steps) > self.cache_size:
                self._steps.popitem(last=False)
        if not self._steps[key]:
            raise BadCheck("vm_steps: the issue SQL does not run, so there is nothing to compare with")
        return self._steps[key]

    def _inventory(self, untouched: AnySession) -> Inventory:
        digest = untouched.image.digest
        if digest not in self._inventories:
            self._inventories[digest] = take_inventory(untouched)
            if len(self._inventories) > _INVENTORIES:
                self._inventories.popitem(last=False)
        self._inventories.move_to_end(digest)
        return self._inventories[digest]

    # ------------------------------------------------------------------ self-test

    def self_test(self) -> None:
        """Grade what is known: a right answer 1, the wrong one 0, one that destroys 0. SelfTestFailed otherwise; done before the first verdict."""
        self._tested = True
        task = Task("self-test", "debugging", "self", "", ("SELECT b FROM t WHERE a = 2",), ("SELECT b FROM t",))
        try:
            with tempfile.TemporaryDirectory(prefix="savepoint-") as folder:
                file = Path(folder) / "self.sqlite"
                with closing(apsw.Connection(str(file))) as connection:
                    connection.execute("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y')").fetchall()
                image = self.backend.import_base(file)
            for sql, wanted in ((task.sol_sql[0], 1.0), (task.issue_sql[0], 0.0), ("DROP TABLE t", 0.0), ("SELEC 1", 0.0)):
                verdict = self._guarded(image, task, [sql]).verdict
                if verdict.reward != wanted:
                    raise SelfTestFailed(f"self-test of the grader: {sql!r} is {verdict.outcome} ({verdict.detail}), expected reward {wanted:g}")
        except BaseException:
            self._tested = False
            raise


def _looked_at(look: Callable[[], str | None]) -> str | None:
    """What a look at a prediction's end state finds; that it cannot be read is a finding as well."""
    try:
        return look()
    except OwnWorkFailed as error:
        if error.status == "infra":
            raise
        return f"what was left cannot be read: {error}"


def _gold_fault(failure: Verdict) -> Verdict:
    if failure.outcome == "infra":
        return failure
    code: Outcome = "gold_timeout" if failure.outcome == "timeout" else "invalid_instance"
    return Verdict(code, f"the gold: {failure.outcome}: {failure.detail}")


def same_rows(first: Run, second: Run) -> bool:
    """Whether two runs of one script ended alike: the same failure, or the same rows, in any order."""
    if first.failure is not None or second.failure is not None:
        return first.failure == second.failure
    if first.rows is None or second.rows is None:
        return first.rows is second.rows
    return first.columns == second.columns and difference(second.rows, first.rows) is None


def _run_cells(run: Run) -> int:
    return 1 + len(run.rows or ()) * max(1, len(run.columns))


def _cells(gold: Gold) -> int:
    rows = len(gold.run.rows or ()) + sum(len(group.rows) for group in gold.groups or ())
    return 1 + rows * max(1, len(gold.run.columns))
