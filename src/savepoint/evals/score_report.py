"""The report of `savepoint score`, as Markdown and as one HTML file that needs no network. Everything that comes from a database or a model is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import savepoint
from savepoint.envs.sql.published import BINARY
from savepoint.envs.sql.verdict import OUTCOMES, UNSCORED
from savepoint.errors import UserError
from savepoint.files import write_atomically

MEANINGS = {
    "correct": "every check holds, and nothing else was touched", "wrong_result": "the rows are not the gold's",
    "wrong_state": "the database is left otherwise than it should be", "wrong_form": "right or not, not in the form that was asked for",
    "test_failed": "a Python test raised", "sql_error": "a statement failed", "timeout": "it ran out of time",
    "too_big": "its result or its changes were too big",
    "denied": "a statement does what answers may not do", "no_answer": "there was nothing to run", "gold_timeout": "the gold runs too long: not scored",
    "invalid_instance": "the instance cannot be graded: not scored", "infra": "our own failure: not scored",
}  # fmt: skip


def write_reports(folder: Path, result: dict[str, Any], *, tasks: str, predictions: str) -> None:
    """Write `report.md` and `report.html` into a folder. UserError when they cannot be written."""
    for name, text in (("report.md", markdown(result, tasks, predictions)), ("report.html", html(result, tasks, predictions))):
        try:
            write_atomically(folder / name, text)
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be written: {error.strerror or error}") from None


def percent(rate: dict[str, Any]) -> str:
    """`41.5 % (36.6 – 46.5)`; a dash without anything scored."""
    if rate["rate"] is None:
        return "–"
    return f"{100 * rate['rate']:.1f} % ({100 * rate['low']:.1f} – {100 * rate['high']:.1f})"


def disagreements(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Where an outcome and a published 0-or-1 metric differ: `{"instance_id", "metric", "value", "outcome", "detail"}` each."""
    return [
        {"instance_id": record["instance_id"], "metric": name, "value": value, "outcome": record["outcome"], "detail": record["detail"]}
        for record in result["instances"]
        for name, value in record["metrics"].items()
        if name in BINARY and bool(value) != (record["outcome"] == "correct")
    ]


def markdown(result: dict[str, Any], tasks: str, predictions: str) -> str:
    """The report as Markdown: figures, groups, disagreements, and every answer that is not right with its reason."""
    success, totals = result["success"], result["totals"]
    lines = [f"# {_cell(predictions)} on {_cell(tasks)}", "", f"**{percent(success)}**: {success['k']} of {success['n']} scored instances are right.", ""]
    lines += _table(("outcome", "instances", "meaning"), [(code, totals[code], MEANINGS[code]) for code in OUTCOMES if totals[code]])
    groups = [(name[3:], value, percent(rate), f"{rate['k']} / {rate['n']}") for name in _GROUPS for value, rate in result[name].items()]
    lines += _table(("group", "", "success (95 % interval)", "right"), groups)
    if result["metrics"]:
        lines += ["Published metrics, as their authors define them:", ""]
        lines += _table(("metric", "mean", "n"), [(name, _mean(name, found["mean"]), found["n"]) for name, found in result["metrics"].items()])
    different = disagreements(result)
    if different:
        lines += ["Where the outcome and a published metric differ:", ""]
        rows = [(d["instance_id"], f"{d['metric']} {d['value']:g}", d["outcome"], d["detail"]) for d in different]
        lines += _table(("instance", "metric", "outcome", "why"), rows)
    wrong = [r for r in result["instances"] if r["outcome"] != "correct"]
    if wrong:
        lines += ["## What is not right, and why", ""]
        lines += _table(("instance", "outcome", "why"), [(r["instance_id"], _outcome(r), r["detail"]) for r in wrong])
    for name, words in (("missing", "without a prediction"), ("unknown", "predicted, but no task")):
        if result[name]:
            lines += [f"{words}: " + ", ".join(map(_cell, result[name])), ""]
    lines += [*(f"- {_cell(warning)}" for warning in result["warnings"]), "", f"SQLite {result['sqlite']}, Savepoint {savepoint.__version__}."]
    return "\n".join(lines) + "\n"


_GROUPS = ("by_task", "by_category", "by_difficulty")


def _outcome(record: dict[str, Any]) -> str:
    return record["outcome"] if record["check"] is None else f"{record['outcome']} (test {record['check']})"


def _mean(name: str, value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if name == "r_ves" else f"{100 * value:.2f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(map(_cell, row))} |" for row in rows), ""]


def _cell(value: object) -> str:
    """Text that ends no cell and starts no markup."""
    text = " ".join(str(value).split())
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, "\\" + mark)
    return text


def html(result: dict[str, Any], tasks: str, predictions: str) -> str:
    """The page."""
    templates = Environment(loader=PackageLoader("savepoint", "evals"), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    assert templates.loader is not None
    source = {name: Markup(templates.loader.get_source(templates, name)[0]) for name in ("report.css", "score.css", "score.js")}  # noqa: S704
    totals = result["totals"]
    groups = [
        {"name": name[3:], "rows": [{"value": value, "rate": rate, "text": percent(rate)} for value, rate in result[name].items()]}
        for name in _GROUPS
        if result[name]
    ]
    return templates.get_template("score.html.j2").render(
        tasks=tasks, predictions=predictions, result=result, success=percent(result["success"]), groups=groups, version=savepoint.__version__,
        outcomes=[{"code": code, "count": totals[code], "meaning": MEANINGS[code], "scored": code not in UNSCORED} for code in OUTCOMES if totals[code]],
        metrics=[(name, _mean(name, found["mean"]), found["n"]) for name, found in result["metrics"].items()], differing=disagreements(result),
        css=source["report.css"] + source["score.css"], js=source["score.js"],
    )  # fmt: skip
