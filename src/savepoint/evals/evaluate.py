"""Evaluation: the policy acts on held-out tasks, through the same environments, rendering and grader as in training."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.tasks import Task
from savepoint.evals.metrics import success_rate
from savepoint.rollout.driver import SamplingLimits, rollout
from savepoint.rollout.engines.base import Engine
from savepoint.rollout.render import Chat
from savepoint.rollout.trajectory import Trajectory


def evaluate(
    tasks: Sequence[Task], samples: int, engine: Engine, chat: Chat, make_env: Callable[[], SqlEnv], limits: SamplingLimits, *,
    seed: int, batch: int = 32, each: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Any], list[Trajectory]]:  # fmt: skip
    """`samples` episodes of every task: the summary (see `summarise`) and the trajectories. `each` is told how many tasks are done."""
    trajectories: list[Trajectory] = []
    for at in range(0, len(tasks), batch):
        each(at)
        groups = rollout(tasks[at : at + batch], samples, engine, chat, make_env, limits, seed=seed + at)
        trajectories += [t for group in groups for t in group.trajectories]
    return summarise(trajectories), trajectories


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Success with a 95 % interval (samples of one task are not independent), turns, outcomes; the same for renamed schemas and plain bugs.

    What our infrastructure failed at is in `outcomes` and in no rate.
    """
    renamed = [t for t in trajectories if (t.category or "").startswith("renamed")]
    other = [t for t in trajectories if not (t.category or "").startswith("renamed")]
    by_category = defaultdict(list)
    for t in trajectories:
        by_category[t.category or "none"].append(t)
    return {
        **_rate(trajectories), "turns": fmean(t.assistant_turns for t in trajectories) if trajectories else None,
        "by": {name: _rate(part) for name, part in (("renamed", renamed), ("bug", other)) if part},
        "by_category": {name: _rate(part) for name, part in sorted(by_category.items())},
        "outcomes": dict(Counter(t.outcome or "none" for t in trajectories).most_common()),
    }  # fmt: skip


def _rate(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    by_task: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.valid and t.reward is not None:
            by_task[t.task].append(float(t.reward == 1.0))
    looked = fmean(t.assistant_turns > 1 for t in trajectories) if trajectories else None
    return {**success_rate(list(by_task.values())), "looked": looked}
