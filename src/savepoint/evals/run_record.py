"""A run's folder, read for the report: its summary, its metrics, and where in it reinforcement learning began."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from savepoint.errors import UserError

MODES = {"single_turn": "single-turn", "agentic": "agentic"}
PARTS = ("generate", "environment", "grade", "update", "other")


@dataclass(frozen=True)
class Evaluation:
    """What the policy did on the held-out tasks after `done` stages; `name` is the last of them, with its number. `rates`: by mode."""

    done: int
    name: str
    rates: dict[str, dict[str, Any]]

    @property
    def after(self) -> str:
        """`after agentic RL`, for sentences."""
        return f"after {self.name.partition(' ')[2]}" if self.done else "before training"

    def success(self, mode: str = "agentic") -> dict[str, Any]:
        """`{"success", "low", "high", "n"}` and more of a mode; empty where nothing was measured."""
        rate = self.rates.get(mode) or {}
        return rate if rate.get("success") is not None else {}


@dataclass(frozen=True)
class RunRecord:
    """What a run left in `folder`. Stages that were not reached are absent, and so are their evaluations."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def stages(self) -> list[dict[str, Any]]:
        return list(self.summary.get("stages") or [])

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """In order, as many as there are: before the first stage, then after each."""
        stages = self.stages
        rates = [stages[0].get("before"), *(stage.get("after") for stage in stages)] if stages else []
        names = ["start", *(f"{number} {stage['name']}" for number, stage in enumerate(stages, 1))]
        return [Evaluation(done, name, found) for done, (name, found) in enumerate(zip(names, rates, strict=False)) if found]

    @property
    def before(self) -> Evaluation | None:
        """The evaluation that later ones are held against: after the last stage of imitation before RL; without one, the first."""
        first_rl = next((i for i, stage in enumerate(self.stages) if stage["kind"] == "grpo"), None)
        return next((e for e in self.evaluations if e.done == first_rl), self.evaluations[0] if self.evaluations else None)

    @property
    def final(self) -> Evaluation | None:
        """The last evaluation, where it is another than `before`."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if last != self.before else None

    @property
    def demonstrator(self) -> Evaluation:
        found = self.summary.get("demonstrator") or {}
        rates = {mode: found[mode] for mode in MODES if found.get(mode)}
        return Evaluation(0, "demonstrator", rates or {"agentic": found})

    def steps_of(self, index: int) -> list[dict[str, Any]]:
        """The metrics of stage `index`, from 1."""
        return [record for record in self.metrics if record["index"] == index]

    def traces(self, name: str) -> Path | None:
        path = self.folder / "traces" / f"{name}.jsonl"
        return path if path.is_file() else None


def load_run(folder: Path) -> RunRecord:
    """Read a run's folder. UserError that names the file (and line) that is missing or cannot be read."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {folder} holds no run that has come to its first summary") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(summary, dict):
        raise UserError(f"{path}: not a summary: it holds no JSON object")
    return RunRecord(folder, summary, _metrics(folder / "metrics.jsonl"))


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Every step, in order. A torn last line (the run was killed while it wrote) is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    out = []
    for number, line in enumerate(lines, 1):
        try:
            # NaN and Infinity, which a diverged run logs, are no JSON; nothing can be drawn at them.
            out.append(json.loads(line, parse_constant=lambda name: None))
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not JSON: {error}") from None
    return out
