"""`savepoint score`: somebody's predictions graded, with reasons, intervals and published metrics. No model is involved."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from savepoint.envs.sql.grade import Examination, Verdict
from savepoint.envs.sql.predictions import pair, read_predictions
from savepoint.envs.sql.published import METRICS, Metric, measure
from savepoint.envs.sql.tasks import Task, load_tasks
from savepoint.envs.sql.verdict import OUTCOMES, UNSCORED
from savepoint.errors import UserError
from savepoint.evals.bench import Bench, GradingOptions, Record, check_databases, run_all
from savepoint.evals.metrics import wilson
from savepoint.evals.score_report import write_reports
from savepoint.evals.validate import sqlite_versions
from savepoint.state import SetupError

RESULTS = "results.jsonl"


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One instance to grade: its task, what was handed in, and the published metrics that are wanted."""

    task: Task
    statements: tuple[str, ...]
    metrics: tuple[Metric, ...] = ()


@dataclass(slots=True)
class Journal:
    """Records as they are made, in a folder, so that a stopped scoring goes on: a line each, under a digest of all that decides it."""

    folder: Path
    resume: bool
    known: dict[str, Record] = field(default_factory=dict)

    def open(self) -> None:
        """Make the folder and read what is there. UserError when there is something and it is not to be gone on with."""
        path = self.folder / RESULTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and not self.resume:
                raise UserError(f"{path}: is there already; --resume goes on with it")
            # A line that was cut off by a kill is no JSON; its instance is graded again.
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                try:
                    entry = json.loads(line)
                    self.known[entry["key"]] = entry["record"]
                except (ValueError, KeyError, TypeError):
                    continue
        except OSError as error:
            raise UserError(f"{self.folder}: {error.strerror or error}") from None

    def add(self, key: str, record: Record) -> None:
        """A record of ours ("infra") is not kept: going on tries it again."""
        if record["outcome"] != "infra":
            with (self.folder / RESULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "record": record}) + "\n")


def score(
    tasks: str | Path, predictions: str | Path, options: GradingOptions, *, workers: int = 1, metrics: Sequence[Metric] = (), ignore_unknown: bool = False,
    out: Path | None = None, resume: bool = False, each: Callable[[int, int, Record], None] = lambda done, total, record: None,
) -> Record:  # fmt: skip
    """What `savepoint score --json` prints. UserError for bad input, before anything is graded.

    out: a folder for the records as they come, `report.md` and `report.html`. resume: take what that folder has of the same instances, answers and
    options. each: told (done, of how many, the record).
    """
    started = time.monotonic()
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise UserError(f"--metric {unknown[0]}: must be one of {', '.join(METRICS)}")
    loaded = load_tasks(tasks, complete=False)
    paired = pair(read_predictions(predictions), loaded.tasks, ignore_unknown=ignore_unknown)
    check_databases(loaded.tasks, options)
    given = {name: prediction.statements for name, prediction in paired.by_id.items()}
    items = [ScoreItem(task, given.get(task.instance_id, ()), tuple(metrics)) for task in loaded.tasks]
    records = _graded(items, options, workers, Journal(out, resume) if out is not None else None, each)
    result = {
        "command": "score", **summarise(records, metrics), "missing": paired.missing, "unknown": paired.unknown, "warnings": loaded.warnings,
        "sqlite": sqlite_versions(), "elapsed": round(time.monotonic() - started, 3), "instances": records,
    }  # fmt: skip
    if out is not None:
        write_reports(out, result, tasks=Path(tasks).name, predictions=Path(predictions).name)
    return result


def _graded(
    items: Sequence[ScoreItem], options: GradingOptions, workers: int, journal: Journal | None, each: Callable[[int, int, Record], None]
) -> list[Record]:
    keys = [_key(item, options) for item in items]
    if journal is not None:
        journal.open()
    known = journal.known if journal is not None else {}
    open_items = [i for i, key in enumerate(keys) if key not in known]
    done = len(items) - len(open_items)

    def note(position: int, record: Record) -> None:
        nonlocal done
        done += 1
        if journal is not None:
            journal.add(keys[open_items[position]], record)
        each(done, len(items), record)

    fresh = run_all(grade_one, [items[i] for i in open_items], options, workers=workers, lost=_lost, each=note)
    by_index = dict(zip(open_items, fresh, strict=True))
    return [by_index[i] if i in by_index else known[keys[i]] for i in range(len(items))]


def _key(item: ScoreItem, options: GradingOptions) -> str:
    """Digest of what decides a record: the instance, the answer, the rules, SQLite's versions."""
    rules = (options.limits, options.tests, options.ties, options.now, item.metrics, sqlite_versions())
    text = json.dumps([item.task.record(), item.task.instance_id, item.statements, repr(rules)], default=str, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def grade_one(bench: Bench, item: ScoreItem) -> Record:
    """One instance: its record."""
    started = time.monotonic()
    task = item.task
    measured: dict[str, float] = {}
    try:
        image = bench.world.image(task)
    except SetupError as error:
        found = Examination(Verdict("invalid_instance", str(error)))
    else:
        found = bench.grader.examine(image, task, item.statements)
        measured = measure(item.metrics, bench.grader, image, task, found)
    verdict = found.verdict
    if item.metrics and not measured and verdict.outcome not in UNSCORED:
        measured = dict.fromkeys(item.metrics, 0.0)
    return _record(item, verdict, measured, time.monotonic() - started)


def _record(item: ScoreItem, verdict: Verdict, measured: dict[str, float], seconds: float) -> Record:
    task = item.task
    return {
        "instance_id": task.instance_id, "db_id": task.db_id, "task": task.task, "category": task.category, "difficulty": task.difficulty,
        "outcome": verdict.outcome, "check": verdict.check, "detail": verdict.detail.encode("utf-8", "backslashreplace").decode("utf-8"),
        "metrics": measured, "seconds": round(seconds, 4),
    }  # fmt: skip


def _lost(item: ScoreItem, why: str) -> Record:
    return _record(item, Verdict("infra", why), {}, 0.0)


def summarise(records: Sequence[Record], metrics: Sequence[str]) -> dict[str, Any]:
    """Totals by code, success with Wilson intervals in all and by group, and the published metrics, all over the instances that are scored."""
    counts = Counter(record["outcome"] for record in records)
    scored = [record for record in records if record["outcome"] not in UNSCORED]
    totals: dict[str, int] = {"instances": len(records), "scored": len(scored), **{code: counts[code] for code in OUTCOMES}}
    groups = {f"by_{name}": _by(scored, name) for name in ("task", "category", "difficulty")}
    means: dict[str, Any] = {}
    for name in metrics:
        values = [record["metrics"][name] for record in scored]
        means[name] = {"mean": fmean(values) if values else None, "n": len(values)}
    return {"totals": totals, "success": rate(scored), **groups, "metrics": means}


def rate(records: Sequence[Record]) -> dict[str, Any]:
    """`{"k", "n", "rate", "low", "high"}`: right ones of scored ones, with Wilson's interval."""
    n, k = len(records), sum(record["outcome"] == "correct" for record in records)
    interval = wilson(k, n)
    low, high = interval if interval is not None else (None, None)
    return {"k": k, "n": n, "rate": k / n if n else None, "low": low, "high": high}


def _by(records: Sequence[Record], name: str) -> dict[str, Any]:
    """Rates by the values of a field, for the instances that have it."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record[name] is not None:
            groups[record[name]].append(record)
    return {value: rate(members) for value, members in sorted(groups.items())}
