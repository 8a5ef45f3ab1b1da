"""Evaluation: the policy acts on held-out tasks, through the same environments, rendering and grader as in training."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.tasks import Task
from savepoint.evals.metrics import over_tasks, pass_at_k, pass_hat_k, success_rate
from savepoint.evals.results import Scored
from savepoint.rollout.driver import SamplingLimits, rollout
from savepoint.rollout.engines.base import Sampler
from savepoint.rollout.render import Chat
from savepoint.rollout.trajectory import Trajectory


def evaluate(
    tasks: Sequence[Task], samples: int, engine: Sampler, chat: Chat, make_env: Callable[[], SqlEnv], limits: SamplingLimits, *,
    seed: int, batch: int = 32, each: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Any], list[Trajectory]]:  # fmt: skip
    """`samples` episodes of every task: the summary (see `summarise`) and the trajectories. `each` is told how many tasks are done."""
    trajectories: list[Trajectory] = []
    for at in range(0, len(tasks), batch):
        each(at)
        groups = rollout(tasks[at : at + batch], samples, engine, chat, make_env, limits, seed=seed + at)
        trajectories += [t for group in groups for t in group.trajectories]
    return summarise(trajectories), trajectories


def summarise(trajectories: Sequence[Scored]) -> dict[str, Any]:
    """Success with a 95 % interval (samples of one task are not independent), turns, outcomes; the same for renamed schemas and plain bugs, and by category
    (by kind of bug, where there is one category alone).

    What our infrastructure failed at is in `outcomes` and in no rate.
    """
    renamed = [t for t in trajectories if (t.kind or "").startswith("renamed")]
    other = [t for t in trajectories if not (t.kind or "").startswith("renamed")]
    valid = [t for t in trajectories if t.valid]
    by_category = defaultdict(list)
    several = len({t.category for t in trajectories}) > 1
    for t in trajectories:
        by_category[t.category or "none" if several else t.kind or t.category or "none"].append(t)
    return {
        **_rate(trajectories), "turns": fmean(t.assistant_turns for t in valid) if valid else None,
        "by": {name: _rate(part) for name, part in (("renamed", renamed), ("bug", other)) if part},
        "by_category": {name: _rate(part) for name, part in sorted(by_category.items())},
        "outcomes": dict(Counter(t.outcome or "none" for t in trajectories).most_common()),
    }  # fmt: skip


def _rate(trajectories: Sequence[Scored]) -> dict[str, Any]:
    by_task: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        if t.valid and t.reward is not None:
            by_task[t.task].append(float(t.reward == 1.0))
    looked = fmean(t.assistant_turns > 1 for t in trajectories) if trajectories else None
    return {**success_rate(list(by_task.values())), "looked": looked}


def passes(episodes: Sequence[Scored], samples: int) -> dict[str, dict[str, dict[str, Any]]]:
    """`{"pass_at": {k: rate}, "pass_hat": {k: rate}}` for k = 1, 2, 4, ... and `samples`: any of k succeeds, all of k do. Only valid episodes count."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        if episode.valid:
            by_task[episode.task].append(episode.reward == 1.0)
    counts = [(len(won), sum(won)) for won in by_task.values()]
    ks = sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
    ks = [k for k in ks if any(n >= k for n, _ in counts)]
    forms = {"pass_at": pass_at_k, "pass_hat": pass_hat_k}
    return {name: {str(k): over_tasks(estimate, counts, k) for k in ks} for name, estimate in forms.items()}
