"""`savepoint validate`: what a data set must keep before anybody trains on it or is measured by it.

Per instance: the gold is right, twice; the user's SQL is not; cheating is not; and the gold's answer is definite. Lints point at what is legal and often a
mistake. Everything is found by running.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw

from savepoint.envs.sql.collateral import read_schema
from savepoint.envs.sql.compare import Rules
from savepoint.envs.sql.grade import Gold, Grader, Verdict, same_rows
from savepoint.envs.sql.lexer import clauses, tokens
from savepoint.envs.sql.run import Run
from savepoint.envs.sql.tasks import Task, load_tasks
from savepoint.envs.sql.ties import grouped_query
from savepoint.errors import UserError
from savepoint.evals.bench import Bench, GradingOptions, Record, check_databases, run_all
from savepoint.files import write_atomically
from savepoint.state import BaseImage, SetupError, split_statements

_OTHER_NOW = "2031-07-19T13:37:42Z"


def validate(
    tasks: str | Path, options: GradingOptions, *, workers: int = 1, fix_report: Path | None = None, each: Callable[[int, int], None] = lambda done, total: None
) -> Record:
    """What `savepoint validate --json` prints. fix_report: a file that lists which instances to leave out, and why. UserError for bad input."""
    started = time.monotonic()
    loaded = load_tasks(tasks, complete=False)
    check_databases(loaded.tasks, options)
    done = [0]

    def count(index: int, record: Record) -> None:
        done[0] += 1
        each(done[0], len(loaded.tasks))

    records = run_all(examine, loaded.tasks, options, workers=workers, lost=_lost, each=count)
    valid = sum(record["valid"] for record in records)
    result = {
        "command": "validate", "totals": {"instances": len(records), "valid": valid, "invalid": len(records) - valid}, "warnings": loaded.warnings,
        "sqlite": sqlite_versions(), "elapsed": round(time.monotonic() - started, 3), "instances": records,
    }  # fmt: skip
    if fix_report is not None:
        _write_fix_report(fix_report, result)
    return result


def sqlite_versions() -> str:
    """The SQLite that runs SQL; Python's own, which runs Python tests, where it is another."""
    return apsw.sqlite_lib_version() + (f" (Python tests: {sqlite3.sqlite_version})" if sqlite3.sqlite_version != apsw.sqlite_lib_version() else "")


def examine(bench: Bench, task: Task) -> Record:
    """One instance: its record."""
    started = time.monotonic()
    record = _blank(task)
    try:
        if (task.dialect or "SQLite").lower() != "sqlite":
            record["problems"], record["detail"] = ["dialect"], f"dialect {task.dialect!r}: only SQLite is graded here"
        elif not any(split_statements(sql) for sql in task.sol_sql):
            record["problems"], record["detail"] = ["no_gold"], "there is no gold"
        else:
            _Instance(bench, task, bench.world.image(task), record).examine()
    except SetupError as error:
        record["problems"], record["detail"] = ["preprocess_error"], str(error)
    record["valid"] = not record["problems"]
    record["seconds"] = round(time.monotonic() - started, 3)
    return record


def _blank(task: Task) -> Record:
    return {
        "instance_id": task.instance_id, "db_id": task.db_id, "task": task.task, "category": task.category, "difficulty": task.difficulty, "valid": False,
        "gold": [], "issue": None, "probes": {}, "problems": [], "lints": [], "detail": "", "seconds": 0.0,
    }  # fmt: skip


def _lost(task: Task, why: str) -> Record:
    return {**_blank(task), "problems": ["infra"], "detail": why}


class _Instance:
    """One instance under examination. Problems and lints go into its record."""

    def __init__(self, bench: Bench, task: Task, image: BaseImage, record: Record) -> None:
        self.bench, self.task, self.image, self.record = bench, task, image, record
        self.grader: Grader = bench.grader
        # The form of the tests that does not decide must come to the same end.
        self.other: Task | None = None
        use_checks, use_python = self.grader.chosen_tests(task)
        if task.checks and task.test_cases and use_checks != use_python:
            self.other = replace(task, checks=()) if use_checks else replace(task, test_cases=())

    def examine(self) -> None:
        gold = self.grader.gold(self.image, self.task)
        if gold.run.failure is not None:
            self._problem(_GOLD_PROBLEMS.get(gold.run.failure.outcome, "gold_error"), f"the gold: {gold.run.failure.detail}")
            return
        self._gold(gold)
        self._issue()
        self._probes()
        self._clean_up()
        self._lints(gold)

    # ------------------------------------------------------------------ problems

    def _gold(self, gold: Gold) -> None:
        again = self.grader.run_gold(self.image, self.task, seed=1)
        if not same_rows(gold.run, again):
            self._problem("gold_varies", "the gold gives another result when it runs again")
        elif gold.fault is not None:
            self._problem("gold_empty", gold.fault.detail)
        verdicts = [self._verdict(self.task.sol_sql, "gold"), self.grader.grade(self.image, self.task, self.task.sol_sql)]
        self.record["gold"] = [verdict.outcome for verdict in verdicts]
        wrong = next((verdict for verdict in verdicts if verdict.outcome != "correct"), None)
        if wrong is not None and gold.fault is None:
            self._problem("infra" if wrong.outcome == "infra" else "gold_fails", f"the gold as a prediction: {wrong.outcome}: {wrong.detail}")

    def _issue(self) -> None:
        if not any(split_statements(sql) for sql in self.task.issue_sql):
            return
        verdict = self._verdict(self.task.issue_sql, "issue SQL")
        self.record["issue"] = verdict.outcome
        if verdict.outcome == "correct":
            self._problem("issue_passes", "the issue SQL is graded as correct")

    def _probes(self) -> None:
        for name, statements in probes(self._target()).items():
            verdict = self._verdict(statements, f"probe {name}")
            self.record["probes"][name] = verdict.outcome
            if verdict.outcome == "correct":
                self._problem(f"probe_passes:{name}", f"{'; '.join(statements)!r} is graded as correct")

    def _clean_up(self) -> None:
        if not self.task.clean_up_sql:
            return
        runner = self.grader.runner
        with runner.lease(self.image, f"clean-up {self.task.instance_id}", self.grader.clock(self.task)) as session:
            run = runner.run(session, self.task.sol_sql)
            if run.end is not None:
                session.restore(run.end)
            run = runner.run(session, self.task.clean_up_sql)
        if run.failure is not None:
            self._problem("cleanup_error", f"clean_up_sql: {run.failure.detail}")

    def _verdict(self, statements: Sequence[str], what: str) -> Verdict:
        """The verdict by the form that decides; a problem where the other form comes to another end."""
        verdict = self.grader.grade(self.image, self.task, statements)
        if verdict.outcome == "infra":
            self._problem("infra", f"{what}: {verdict.detail}")
        elif self.other is not None and verdict.outcome in _OF_TESTS:
            second = self.bench.grader_for("auto").grade(self.image, self.other, statements)
            if second.reward != verdict.reward:
                words = f"{verdict.outcome} ({verdict.detail}) by one form of the tests, {second.outcome} ({second.detail}) by the other"
                self._problem("forms_disagree", f"{what}: {words}")
        return verdict

    def _problem(self, name: str, detail: str) -> None:
        if name not in self.record["problems"]:
            self.record["problems"].append(name)
            self.record["detail"] = self.record["detail"] or detail

    def _target(self) -> str | None:
        """The table that probes attack: the first of the gold's, else the first there is."""
        with self.grader.runner.lease(self.image, "probes", self.grader.now) as session:
            tables = [entry.name for entry in read_schema(session).values() if entry.has_rows]
        named = {token.text.strip('"`[]').lower() for sql in self.task.sol_sql for token in tokens(sql) if token.kind in ("word", "name")}
        return next((name for name in tables if name.lower() in named), tables[0] if tables else None)

    # ------------------------------------------------------------------ lints

    def _lints(self, gold: Gold) -> None:
        found = [name for name, holds in (("uses_clock", self._uses_clock), ("order_dependent", self._order_dependent)) if holds(gold)]
        query = clauses(gold.run.query) if gold.run.rows is not None else None
        if query is not None and gold.run.rows:
            if query.limit and not query.order and self._cuts(gold):
                found.append("limit_without_order")
            if query.order and query.limit and self._cuts(gold):
                found.append("tie_at_limit")
            if query.order:
                found += self._key_lints(gold)
        self.record["lints"] = sorted(found)

    def _uses_clock(self, gold: Gold) -> bool:
        return not same_rows(gold.run, self.grader.run_gold(self.image, self.task, now=_OTHER_NOW))

    def _order_dependent(self, gold: Gold) -> bool:
        """Whether the gold, run with the order of unsorted rows reversed, is no longer right by its own comparison."""
        if gold.run.rows is None or not self.grader.compares_rows(self.task):
            return False
        other = self._run(["PRAGMA reverse_unordered_selects = 1", *self.task.sol_sql], readonly=False)
        if other.failure is not None:
            return False
        return self.grader.comparison(self.image, self.task, gold, other)(Rules(decimal=None)) is not None

    def _cuts(self, gold: Gold) -> bool:
        """Whether LIMIT or OFFSET leaves open which rows come."""
        groups = self.grader.groups(self.image, self.task, gold)
        return any(group.take < len(group.rows) and len(set(group.rows)) > 1 for group in groups or ())

    def _key_lints(self, gold: Gold) -> list[str]:
        """null_first: rows without a key lead an ascending order. text_numbers: a key sorts numbers as text."""
        keys = self._keys(gold)
        found = []
        if keys and any(first is None and any(row[i] is not None for row in keys) for i, first in enumerate(keys[0])):
            found.append("null_first")
        columns = list(zip(*keys, strict=True)) if keys else []
        if any(_numbers_as_text(column) for column in columns):
            found.append("text_numbers")
        return found

    def _keys(self, gold: Gold) -> list[tuple[object, ...]]:
        """The ORDER BY keys of the rows before LIMIT, in order."""
        sql = grouped_query(gold.run.query, gold.run.columns, keys=True)
        if sql is None:
            return []
        run = self._run([*gold.run.statements[: gold.run.position], sql], readonly=False)
        return [] if run.failure is not None else list(run.rows or ())

    def _run(self, statements: Sequence[str], *, readonly: bool) -> Run:
        runner = self.grader.runner
        with runner.lease(self.image, f"lint {self.task.instance_id}", self.grader.clock(self.task)) as session:
            return runner.run(session, statements, readonly=readonly)


# Outcomes that the tests of an instance may come to; the others do not depend on their form.
_OF_TESTS = frozenset({"correct", "wrong_result", "wrong_state", "wrong_form", "test_failed"})
_GOLD_PROBLEMS = {"timeout": "gold_timeout", "too_big": "gold_too_big", "infra": "infra"}


def probes(table: str | None) -> dict[str, list[str]]:
    """Answers that must never pass: nothing, a constant, and a constant after the data were deleted, dropped or hidden."""
    name = '"' + (table or "nothing").replace('"', '""') + '"'
    return {
        "empty": [], "noop": ["SELECT 1"], "delete": [f"DELETE FROM {name}", "SELECT 0"], "drop": [f"DROP TABLE {name}"],
        "shadow": [f"CREATE TEMP VIEW {name} AS SELECT 1 AS x", "SELECT 1"],
    }  # fmt: skip


def _numbers_as_text(values: Sequence[object]) -> bool:
    """Whether several different values are all text that reads as a number, of different lengths: sorted as text they come in a wrong order."""
    texts = {value for value in values if value is not None}
    if len(texts) < 2 or not all(isinstance(value, str) for value in texts):
        return False
    try:
        numbers = [float(str(value)) for value in texts]
    except ValueError:
        return False
    return [str(t) for t in sorted(texts, key=str)] != [str(t) for _, t in sorted(zip(numbers, texts, strict=True), key=lambda pair: pair[0])]


def _write_fix_report(path: Path, result: Record) -> None:
    """JSON: the ids to leave out with their reasons, and those to look at with their lints."""
    instances = result["instances"]
    report: dict[str, Any] = {
        "leave_out": [{"instance_id": r["instance_id"], "problems": r["problems"], "detail": r["detail"]} for r in instances if not r["valid"]],
        "look_at": [{"instance_id": r["instance_id"], "lints": r["lints"]} for r in instances if r["valid"] and r["lints"]],
    }
    try:
        write_atomically(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
