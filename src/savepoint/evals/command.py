"""`savepoint eval`: a model acts on tasks, through the same environment and rendering as in training."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from savepoint.envs.sql.env import Budget, SqlEnv
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.observation import ObservationFormat
from savepoint.envs.sql.tasks import Task, read_tasks
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.evals.evaluate import evaluate
from savepoint.evals.metrics import pass_at_k
from savepoint.progress import Progress
from savepoint.rollout.driver import SamplingLimits
from savepoint.rollout.engines.embedded import EmbeddedEngine
from savepoint.rollout.trajectory import Trajectory
from savepoint.state import open_backend
from savepoint.train.bundle import Bundle, load_bundle


def evaluate_command(
    model: Path, tasks: Path, databases: Path, *, samples: int, mode: Literal["agentic", "single_turn"], temperature: float, max_tokens: int | None,
    seed: int, traces: Path | None, store: Path | None, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate a policy folder on a task file: success with interval, by category, pass@k, outcomes. UserError for input that cannot be used."""
    if temperature < 0:
        raise UserError(f"--temperature must be 0 or more, not {temperature}")
    chosen = read_tasks(tasks)
    bundle = load_bundle(model)
    with open_backend("sqlite", store=store) as backend:
        world = World(databases, backend=backend)
        for task in chosen:
            world.base(task.db_id)
        summary, trajectories = _evaluate(bundle, chosen, world, samples, mode, temperature, max_tokens, seed, progress)
    if traces is not None:
        _write(traces, trajectories)
    return {
        "command": "eval", "model": str(model), "tasks": len(chosen), "samples": samples, "mode": mode, "temperature": temperature, "seed": seed,
        **summary, "pass_at": _pass_at(trajectories, samples),
    }  # fmt: skip


def _evaluate(
    bundle: Bundle, tasks: list[Task], world: World, samples: int, mode: Literal["agentic", "single_turn"], temperature: float, max_tokens: int | None,
    seed: int, progress: Progress,
) -> tuple[dict[str, Any], list[Trajectory]]:  # fmt: skip
    known = bundle.environment
    limits = SamplingLimits(known.get("max_message_tokens", 1024), max_tokens or known.get("max_tokens", 4096), temperature)
    form = ObservationFormat(known["rows_shown"], known["cell_shown"], digits=known["digits_shown"]) if known else ObservationFormat()
    budget = Budget(known.get("max_turns", 10), statement_s=known.get("statement_seconds", 5.0))
    grader = Grader(world.backend)
    batch = 32
    engine = EmbeddedEngine(bundle.policy.model, slots=min(batch, len(tasks)) * samples, max_tokens=limits.max_tokens, pad_id=bundle.chat.pad_id)

    def make_env() -> SqlEnv:
        return SqlEnv(mode=mode, budget=budget, observation=form, prompt=known.get("prompt", "full"), world=world, grader=grader)

    return evaluate(
        tasks, samples, engine, bundle.chat, make_env, limits, seed=seed, batch=batch, each=lambda done: progress.activity("evaluating", done, len(tasks))
    )


def _pass_at(trajectories: list[Trajectory], samples: int) -> dict[str, float]:
    """Unbiased pass@k for k = 1, 2, 4, ... up to the number of samples, over tasks whose every sample counts."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for t in trajectories:
        if t.valid:
            by_task[t.task].append(t.reward == 1.0)
    ks = [k for k in (2**i for i in range(20)) if k <= samples]
    return {str(k): fmean(pass_at_k(len(r), sum(r), k) for r in by_task.values() if len(r) >= k) for k in ks if any(len(r) >= k for r in by_task.values())}


def _write(path: Path, trajectories: list[Trajectory]) -> None:
    try:
        with path.open("w", encoding="utf-8", errors="replace") as file:
            for trajectory in trajectories:
                file.write(json.dumps(trajectory.to_json(), ensure_ascii=False, default=str) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
