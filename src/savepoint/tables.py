"""What commands print for people: tables on stdout. `--json` prints the same facts for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def percent(rate: dict[str, Any]) -> str:
    """A success rate with its interval, `41.5 % (36.6 – 46.5)`."""
    if rate.get("success") is None:
        return "–"
    return f"{100 * rate['success']:.1f} % ({100 * rate['low']:.1f} – {100 * rate['high']:.1f})"


def print_plan(plan: dict[str, Any]) -> None:
    """`savepoint plan` for people."""
    console = Console()
    table = _table(f"{plan['recipe']}, seed {plan['seed']}" + (f", profile {plan['profile']}" if plan["profile"] else ""),
                   "stage", "mode", "steps", "a step", "episodes", "tokens", "seconds")  # fmt: skip
    for number, row in enumerate(plan["stages"], 1):
        figures = (str(row["steps"]), row["batch"], f"{row['trajectories']:,}", f"{row['tokens']:,}", f"{row['seconds']:,}")
        table.add_row(f"{number} {escape(row['name'])}", row["mode"].replace("_", "-"), *figures)
    evaluation = plan["evaluation"]
    table.add_row("evaluations", "both", "", "", f"{evaluation['trajectories']:,}", "", f"{evaluation['seconds']:,}")
    console.print(table)
    settings = plan["settings"]
    model = settings["policy"]["model"] or f"{settings['policy']['architecture']} of {plan['parameters']:,} parameters"
    console.print(f"policy: {escape(model)}; tasks: {escape(settings['tasks']['file'] or settings['tasks']['database'])}", highlight=False)
    _print_memory(console, plan["memory"])
    console.print(f"in all about {duration(plan['seconds'])} and {plan['memory_bytes'] / 2**30:.1f} GiB of memory", highlight=False)


def _print_memory(console: Console, memory: dict[str, Any]) -> None:
    """Peak memory by part, and the longest micro-batch that would fit."""
    learner = memory["learner"]
    parts = {name: learner[name] for name in ("weights", "gradients", "optimiser", "checkpoints", "attention", "mlp", "logits")}
    parts |= {name: memory[name] for name in ("reference", "engine", "process")}
    console.print(f"[bold]memory, with a micro-batch of {learner['tokens']:,} tokens[/]", highlight=False)
    table = _table("", "part", "MB")
    for name, value in parts.items():
        if value:
            table.add_row(name, f"{value / 1e6:,.1f}")
    table.add_row("peak", f"{memory['total'] / 1e6:,.1f}")
    console.print(table)
    console.print(
        f"the longest micro-batch in this machine's {memory['budget'] / 2**30:.1f} GiB: {memory['largest_tokens']:,} tokens"
        if memory["device"] == "cpu" else f"the longest micro-batch on {memory['device']}: {memory['largest_tokens']:,} tokens", highlight=False,
    )  # fmt: skip


def print_evaluation(result: dict[str, Any]) -> None:
    """`savepoint eval` for people."""
    console = Console()
    table = _table(f"{result['model']}: {result['tasks']} tasks, {result['samples']} samples, {result['mode'].replace('_', '-')}", "", "success", "n")
    table.add_row("all", percent(result), str(result["n"]))
    for name, rate in result["by_category"].items():
        table.add_row(escape(name), percent(rate), str(rate["n"]))
    for name, form in (("pass_at", "pass@"), ("pass_hat", "pass^")):
        for k, rate in result[name].items():
            table.add_row(f"{form}{k}", percent(rate), f"{rate['n']} tasks")
    console.print(table)
    console.print("outcomes: " + ", ".join(f"{code} {count}" for code, count in result["outcomes"].items()), highlight=False)
    usage = result["usage"]
    if usage.get("requests"):
        read, said = (f"{usage.get(name, 0):,.0f}" for name in ("prompt_tokens", "completion_tokens"))
        price = f", price {usage['price']:.4f}" if usage.get("price") else ""
        console.print(f"{usage['requests']:,.0f} messages, {read} prompt and {said} completion tokens{price}", highlight=False)
    for episode, reason in list(result["faults"].items())[:5]:
        console.print(f"not counted: {escape(episode)}: {escape(str(reason))}", highlight=False, soft_wrap=True)
    if len(result["faults"]) > 5:
        console.print(f"... and {len(result['faults']) - 5} more", highlight=False)


def print_synthesis(result: dict[str, Any]) -> None:
    """`savepoint synth` for people."""
    console = Console()
    console.print(f"{result['written']} tasks in {escape(str(result['out']))}, over {escape(str(result['database']))}", highlight=False, soft_wrap=True)
    if result.get("heldout"):
        console.print(f"{result['heldout_written']} tasks of other shapes in {escape(result['heldout'])}", highlight=False, soft_wrap=True)
    if result.get("impossible"):
        console.print(f"  no place here for: {', '.join(result['impossible'])}", highlight=False)
    for title, key in (("categories", "categories"), ("difficulty", "difficulties"), ("kinds", "kinds"), ("forms", "forms"), ("rejected", "rejected")):
        if result.get(key):
            console.print(f"  {title}: " + ", ".join(f"{name} {count}" for name, count in result[key].items()), highlight=False)
    if result.get("part"):
        console.print(escape(result["part"]), highlight=False, soft_wrap=True)


def print_findings(findings: Sequence[dict[str, Any]]) -> None:
    """`savepoint doctor` for people."""
    console = Console()
    for finding in findings:
        mark = "[green]ok[/]  " if finding["works"] else "[red]no[/]  " if finding["needed"] else "[yellow]--[/]  "
        console.print(f"{mark}{escape(finding['what'])}: {escape(finding['detail'])}", highlight=False, soft_wrap=True)
