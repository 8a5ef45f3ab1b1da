"""The commands that grade without a model: what their arguments mean, and what they print for people."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from savepoint.envs.sql.run import Limits
from savepoint.envs.sql.verdict import OUTCOMES
from savepoint.evals.bench import GradingOptions
from savepoint.evals.score_report import disagreements, percent

_SHOWN = 40


def options_of(arguments: argparse.Namespace) -> GradingOptions:
    """The options that the arguments say."""
    limits = Limits(arguments.timeout, arguments.max_rows, arguments.max_bytes)
    return GradingOptions(tuple(arguments.databases), arguments.store, limits, arguments.tests, arguments.ties, arguments.now)


def print_score(result: dict[str, Any]) -> None:
    """`savepoint score` for people: figures, groups, and the first answers that are not right with their reasons."""
    console = Console()
    totals = result["totals"]
    console.print(f"[bold]{percent(result['success'])}[/]: {result['success']['k']} of {result['success']['n']} scored instances are right", highlight=False)
    console.print("outcomes: " + ", ".join(f"{code} {totals[code]}" for code in OUTCOMES if totals[code]), highlight=False, soft_wrap=True)
    groups = _table("group", "success (95 %)", "right")
    for name in ("by_task", "by_category", "by_difficulty"):
        for value, rate in result[name].items():
            groups.add_row(escape(str(value)), percent(rate), f"{rate['k']} / {rate['n']}")
    console.print(groups)
    for name, found in result["metrics"].items():
        mean = "–" if found["mean"] is None else f"{found['mean']:.4f}"
        console.print(f"{name}: {mean} over {found['n']}", highlight=False)
    different = disagreements(result)
    if different:
        names = ", ".join(d["instance_id"] for d in different[:10])
        console.print(f"{len(different)} answers on which a published metric differs: {escape(names)}", highlight=False, soft_wrap=True)
    wrong = [r for r in result["instances"] if r["outcome"] != "correct"]
    _print_instances(console, [(r["instance_id"], r["outcome"], r["detail"]) for r in wrong])
    for name, words in (("missing", "without a prediction"), ("unknown", "predicted, but no task")):
        if result[name]:
            console.print(f"{words}: {escape(', '.join(result[name][:20]))}{' …' if len(result[name]) > 20 else ''}", highlight=False, soft_wrap=True)
    _print_warnings(console, result)


def print_validation(result: dict[str, Any]) -> None:
    """`savepoint validate` for people: the count, then each instance with a problem or a lint."""
    console = Console()
    totals = result["totals"]
    console.print(f"[bold]{totals['valid']} of {totals['instances']} instances are valid[/]", highlight=False)
    invalid = [(r["instance_id"], ", ".join(r["problems"]), r["detail"]) for r in result["instances"] if not r["valid"]]
    _print_instances(console, invalid)
    _print_instances(console, [(r["instance_id"], "lint: " + ", ".join(r["lints"]), "") for r in result["instances"] if r["valid"] and r["lints"]])
    _print_warnings(console, result)


def _print_instances(console: Console, rows: list[tuple[str, str, str]]) -> None:
    for name, code, detail in rows[:_SHOWN]:
        console.print(f"  {escape(name)}  [yellow]{escape(code)}[/]  {escape(detail)}", highlight=False, soft_wrap=True)
    if len(rows) > _SHOWN:
        console.print(f"  … and {len(rows) - _SHOWN} more", highlight=False)


def _print_warnings(console: Console, result: dict[str, Any]) -> None:
    for warning in result["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return table
