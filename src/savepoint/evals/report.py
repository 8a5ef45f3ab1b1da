"""`report.html`: what a run did, in one file that needs no network, and the table that ends a run in a terminal.

The page is made from what the run wrote (`summary.json`, `metrics.jsonl`, `traces/`), so it can be made again at any time, also of a run
that was interrupted. Everything that comes from a database or a model is escaped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from savepoint.errors import UserError
from savepoint.evals import charts, sections, words
from savepoint.evals.run_record import MODES, RunRecord, load_run
from savepoint.evals.transcripts import Record, behaviour, pairs, scan
from savepoint.files import write_atomically
from savepoint.progress import stage_table


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder, whole or not at all, and give its path. UserError for a folder that holds no readable run."""
    path = run_dir / "report.html"
    page = render(load_run(run_dir))
    try:
        write_atomically(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def render(run: RunRecord) -> str:
    """The page of a run."""
    loader = PackageLoader("savepoint", "evals")
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    figures = charts.figures(run)
    return templates.get_template("report.html.j2").render(
        **_content(run), charts=sorted(figures), figures=_json(figures), plotly=Markup(charts.plotly_source()),  # noqa: S704
        css=Markup(_source(templates, "report.css")), js=Markup(_source(templates, "report.js")),  # noqa: S704
    )  # fmt: skip


def _source(templates: Environment, name: str) -> str:
    assert templates.loader is not None
    return templates.loader.get_source(templates, name)[0]


def _json(value: Any) -> Markup:
    """JSON for a script element. Escaped so that no text in it can end the element."""
    return Markup(json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"))  # noqa: S704


def _content(run: RunRecord) -> dict[str, Any]:
    """What the template shows, in its order."""
    records = _records(run)
    counted = {key: behaviour(found) for key, found in records.items()}
    facts, schema, left_out = sections.database(run)
    before, final = run.before, run.final
    first, last = (records.get(e.done, []) if e else [] for e in (before, final))
    return {
        "recipe": run.summary.get("recipe") or run.folder.name, "where": dict(facts).get("name", ""),
        "seed": run.summary.get("seed", "–"), "version": run.summary.get("savepoint", ""),
        "notices": words.notices(run), "lede": words.lede(run), "cards": words.cards(run), "targets": sections.targets(run), "totals": sections.totals(run),
        "evaluations": sections.evaluations(run), "gain": words.gain_parts(run, counted), "behaviour": sections.behaviour(run, counted),
        "categories": sections.categories(run), "pairs": pairs(first, last), "before": before, "final": final, "curves": sections.curves(run),
        "outcomes": sections.outcomes(run), "stages": sections.stages(run), "times": sections.times(run), "database": facts, "schema": schema,
        "left_out": left_out, "settings": sections.settings(run), "environment": sections.environment(run),
    }  # fmt: skip


def _records(run: RunRecord) -> dict[int | str, list[Record]]:
    """The agentic evaluations' traces, as far as they are there, by number of stages done; and the demonstrator's."""
    names: dict[int | str, str] = {e.done: f"eval-{e.done}-agentic" for e in run.evaluations} | {"demonstrator": "demonstrator-agentic"}
    found = {key: run.traces(name) for key, name in names.items()}
    return {key: scan(path) for key, path in found.items() if path is not None}


def render_table(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print what a run did for people: a line a stage, the demonstrator, the gain and its parts, and the targets. On stdout unless told."""
    console = console or Console()
    run = RunRecord(Path(), summary, [])
    console.print(stage_table(run.stages))
    rates = {name: run.demonstrator.success(mode) for mode, name in MODES.items()}
    if any(rates.values()):
        console.print(Text("demonstrator: " + ", ".join(f"{name} {words.percent(rate['success'])}" for name, rate in rates.items() if rate)))
    gain = summary.get("gain")
    if gain:
        named = (("habit", "un-learning a habit"), ("looking", "learning to look"))
        parts = ", ".join(f"{words.points(gain[key])} {what}" for key, what in named if gain.get(key) is not None)
        whole = f"agentic success, {gain['from']} to {gain['to']}: {words.points(gain['agentic'])}"
        console.print(Text(f"{whole} = {parts}" if parts else whole))
    for target in sections.targets(run):
        mark, style = ("✓", "green") if target["holds"] else ("✗", "red")
        console.print(Text.assemble((mark, style), f" {target['figure']}: {target['value']} (target {target['bound']})"))
