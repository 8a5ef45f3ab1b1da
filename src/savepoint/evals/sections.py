"""The report's tables: everything that its charts show, and what only a table can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from savepoint.evals.charts import outcome_codes
from savepoint.evals.run_record import MODES, PARTS, RunRecord
from savepoint.evals.words import interval, percent, points, size
from savepoint.progress import clock

_MANY = 60
"""Rows of a long table; of more steps, one in so many is shown."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. The first column is words; the others are figures unless `words`."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


def evaluations(run: RunRecord) -> Table:
    """Success in both modes with intervals, evaluation by evaluation, and the demonstrator's."""
    rows = []
    for e in [*run.evaluations, run.demonstrator]:
        agentic, row = e.success(), [e.name]
        for mode in MODES:
            rate = e.success(mode)
            row += [percent(rate.get("success")), interval(rate) or "–"]
        row += [percent((agentic.get("by") or {}).get(sort, {}).get("success")) for sort in ("renamed", "bug")]
        row += [_number(agentic.get("turns"), ".2f"), _number(agentic.get("n"), ",")]
        rows.append(row)
    head = ("after", "single-turn", "95 % interval", "agentic", "95 % interval", "renamed", "bug", "messages", "episodes")
    caption = "Success on held-out tasks. Renamed, bug, messages (of the agent, an episode) and episodes are of the agentic mode."
    return Table(caption, head, rows)


def behaviour(run: RunRecord, counted: Mapping[int | str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """What the agent did on each sort of task, evaluation by evaluation."""
    rows = []
    shown: list[tuple[int | str, str]] = [*((e.done, e.name) for e in run.evaluations), ("demonstrator", "demonstrator")]
    for key, name in shown:
        renamed, bug = (counted.get(key, {}).get(sort, {}) for sort in ("renamed", "bug"))
        if renamed or bug:
            shares = [renamed.get("looked"), renamed.get("when_looked"), renamed.get("when_not"), bug.get("looked"), bug.get("unchanged")]
            rows.append([name, *map(percent, shares)])
    head = ("after", "renamed: ran a query first", "success when it did", "when it did not", "bug: ran a query first", "handed back unchanged")
    return Table("What the agent did, counted in the traces of the agentic evaluations.", head, rows)


def categories(run: RunRecord) -> Table:
    """Agentic success by category, before RL and at the end."""
    known = [e for e in (run.before, run.final) if e]
    found = [e.success().get("by_category") or {} for e in known]
    rows = []
    for name in sorted({name for part in found for name in part}):
        rates = [part.get(name, {}) for part in found]
        values = [rate.get("success") for rate in rates]
        change = [points(values[-1] - values[0])] if len(values) == 2 and None not in values else ["–"] * (len(values) == 2)
        rows.append([name.replace("_", " "), *map(percent, values), *change, _number(rates[-1].get("n"), ",")])
    head = ("category", *(e.after for e in known), *(["change"] if len(known) == 2 else []), "episodes")
    return Table("Agentic success by kind of task.", head, rows)


def outcomes(run: RunRecord) -> list[Table]:
    """Counts of outcome codes, a table a mode."""
    out = []
    for mode, name in MODES.items():
        known = [(e.name, e.rates[mode]["outcomes"]) for e in [*run.evaluations, run.demonstrator] if e.rates.get(mode, {}).get("outcomes")]
        codes = outcome_codes([counts for _, counts in known])
        rows = [[label, *(f"{counts.get(code, 0):,}" for code in codes)] for label, counts in known]
        out.append(Table(f"Outcomes of {name} episodes on held-out tasks.", ("after", *(code.replace("_", " ") for code in codes)), rows))
    return [table for table in out if table.rows]


def stages(run: RunRecord) -> Table:
    """What each stage was and what it cost."""
    rows = []
    for number, s in enumerate(run.stages, 1):
        speed = s["tokens"] / s["seconds"] if s["seconds"] else 0.0
        rows.append([f"{number} {s['name']}", s["kind"].upper(), MODES.get(s["mode"], s["mode"]), f"{s['steps']:,}", f"{s['episodes']:,}", f"{s['tokens']:,}",
                     f"{speed:,.0f}", clock(s["seconds"]), f"{s['cpu_seconds']:,.0f}"])  # fmt: skip
    head = ("stage", "method", "mode", "steps", "episodes", "tokens", "tokens/s", "time", "CPU s")
    return Table("Stages. Evaluation between them is not in their time.", head, rows)


def times(run: RunRecord) -> Table:
    """Seconds of each stage by part."""
    rows = [[f"{number} {s['name']}", *(f"{s['time'].get(part, 0.0):,.1f}" for part in PARTS)] for number, s in enumerate(run.stages, 1) if s.get("time")]
    return Table("Seconds of each stage by part.", ("stage", *PARTS), rows)


def totals(run: RunRecord) -> list[tuple[str, str]]:
    """What the whole run cost."""
    s = run.summary
    cost = [("whole run", f"{clock(s['seconds'])} min" if s.get("seconds") else ""), ("CPU time", f"{s['cpu_seconds']:,.0f} s" if s.get("cpu_seconds") else ""),
            ("peak memory", size(s["peak_memory_bytes"]) if s.get("peak_memory_bytes") else ""),
            ("planned memory", size(s["planned_memory"]["total"]) if s.get("planned_memory") else "")]  # fmt: skip
    return [(name, value) for name, value in cost if value]


def curves(run: RunRecord) -> list[Table]:
    """The learning curves, stage by stage; of long stages one step in several."""
    out = []
    for index, stage in enumerate(run.stages, 1):
        records = run.steps_of(index)
        if not records:
            continue
        every = -(-len(records) // _MANY)
        chosen = [record for record in records if record["step"] % every == 0 or record is records[-1]]
        columns = _SFT if stage["kind"] == "sft" else _GRPO
        rows = [[f"{record['step']:,}", *(_number(record.get(key), form) for _, key, form in columns)] for record in chosen]
        which = f"every {every}th step; all are in metrics.jsonl" if every > 1 else "every step"
        out.append(Table(f"{index} {stage['name']}: {which}.", ("step", *(head for head, _, _ in columns)), rows))
    return out


_SFT = (("loss on own tokens", "own_loss", ".4f"), ("loss", "loss", ".4f"), ("gradient norm", "grad_norm", ".3f"), ("learning rate", "lr", ".2e"))
_GRPO = (
    ("mean reward", "reward_mean", ".3f"), ("success", "success", ".1%"), ("mixed groups", "mixed_groups", ".0%"), ("messages an episode", "turns_mean", ".2f"),
    ("tokens an episode", "length_mean", ".1f"), ("gradient norm", "grad_norm", ".3f"), ("clipped", "clip_fraction", ".2%"),
    ("engine − learner, log-prob", "logprob_gap", ".1e"),
)  # fmt: skip


def database(run: RunRecord) -> tuple[list[tuple[str, str]], Table, list[str]]:
    """The database: facts, the part of it that tasks use, and what was left out."""
    d = run.summary.get("database") or {}
    tables: Mapping[str, Sequence[str]] = d.get("tables") or {}
    columns = sum(len(names) for names in tables.values())
    used = f"{len(tables)} table{'s' * (len(tables) != 1)}, {columns} columns" if tables else ""
    facts = [("name", str(d.get("name") or "")), ("size", size(d["size"]) if d.get("size") else ""), ("used", used), ("digest", str(d.get("digest") or ""))]
    rows = [[name, ", ".join(names)] for name, names in tables.items()]
    table = Table("The part of the schema that tasks use.", ("table", "columns used"), rows, words=True)
    return [(name, value) for name, value in facts if value], table, _left_out(d.get("left_out"))


def _left_out(left_out: Mapping[str, str] | Sequence[object] | None) -> list[str]:
    """What of a schema is not used, with reasons where they are known."""
    if not isinstance(left_out, Mapping):
        return [str(item) for item in left_out or ()]
    reasons = sorted(left_out.items(), key=lambda item: str(item[1]))
    return [f"{', '.join(name for name, _ in group)}: {reason}" for reason, group in groupby(reasons, key=lambda item: str(item[1]))]


def targets(run: RunRecord) -> list[dict[str, Any]]:
    """What a run of this recipe is held to, and whether it got there."""
    return [
        {"figure": str(t["figure"]), "value": _number(t["value"], ".3g"), "bound": _number(t["bound"], ".3g"), "holds": bool(t["holds"])}
        for t in run.summary.get("targets") or ()
    ]


def settings(run: RunRecord) -> list[Table]:
    """Every setting, a table a group; those of a stage under the stage's name."""
    given: Mapping[str, Any] = run.summary.get("settings") or {}
    groups: list[tuple[str, Mapping[str, Any]]] = [("run", {key: value for key, value in given.items() if not _is_group(value)})]
    for name, value in given.items():
        if isinstance(value, Mapping):
            groups.append((name, value))
        elif _is_group(value):
            groups += [(f"{name}.{number}: {item['name']}" if "name" in item else f"{name}.{number}", item) for number, item in enumerate(value, 1)]
    return [Table(name, ("setting", "value"), [[key, _value(value)] for key, value in group.items()], words=True) for name, group in groups if group]


def environment(run: RunRecord) -> Table:
    """Versions and levels that the figures depend on."""
    given = {"savepoint": run.summary.get("savepoint"), **(run.summary.get("environment") or {})}
    return Table("Environment of the run.", ("what", "value"), [[key.replace("_", " "), _value(value)] for key, value in given.items()], words=True)


def _is_group(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value))


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any, form: str) -> str:
    """A figure in a format; a dash for none, and texts as they are."""
    return "–" if value is None else value if isinstance(value, str) else format(value, form)
