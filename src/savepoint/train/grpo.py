"""GRPO (arXiv:2402.03300): sample groups on the live environment, turn rewards into advantages, update, hand the weights over.

Left out of the textbook on purpose: a value model (the group is the baseline) and a reference pass when `kl == 0`.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from savepoint.config import Settings
from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.tasks import Task
from savepoint.rollout.driver import SamplingLimits, rollout
from savepoint.rollout.engines.base import Engine
from savepoint.rollout.render import Chat
from savepoint.rollout.trajectory import Group, Trajectory
from savepoint.train.advantages import from_optional, grpo
from savepoint.train.batches import microbatches, pack
from savepoint.train.losses import aggregate, kl, policy_loss
from savepoint.train.policy import Policy
from savepoint.train.sft import clip_gradients


class GrpoSettings(Settings):
    """How to learn from rewards."""

    steps: int = Field(30, ge=1, description="updates of the weights; each samples anew")
    prompts_per_step: int = Field(32, ge=1, description="tasks a step")
    group_size: int = Field(8, ge=2, description="trajectories a task: one another's baseline")
    lr: float = Field(6e-4, gt=0, description="learning rate of AdamW (betas .9, .99; no weight decay)")
    warmup_steps: int = Field(5, ge=0, description="steps of linear warm-up")
    clip_norm: float = Field(1.0, gt=0, description="gradient norm is clipped to this")
    clip: float = Field(0.2, gt=0, description="ratio of new to old probability is clipped to 1 - clip .. 1 + clip")
    epochs: int = Field(1, ge=1, description="passes over a step's trajectories, an optimiser step each")
    kl: float = Field(0.0, ge=0, description="weight of the k3 divergence from the policy that the stage started with")
    tokens_per_microbatch: int = Field(4096, ge=1, description="tokens of a micro-batch; a longer trajectory goes alone")
    max_logprob_gap: float = Field(1e-2, gt=0, description="stop when engine and learner differ by more: they then hold different weights")


@dataclass(slots=True)
class Grpo:
    """One GRPO stage. `step(k)` is a function of k, the weights and the optimiser; nothing else moves."""

    policy: Policy
    engine: Engine
    chat: Chat
    settings: GrpoSettings
    limits: SamplingLimits
    make_env: Callable[[], SqlEnv]
    draw: Callable[[int], Sequence[Task]]
    seed_for: Callable[[int], int]
    optimiser: torch.optim.Optimizer
    reference: Policy | None = None

    @classmethod
    def start(cls, policy: Policy, engine: Engine, chat: Chat, settings: GrpoSettings, **rest: Any) -> Grpo:
        """A stage with a fresh optimiser, and a frozen copy of the policy when a divergence from it is charged."""
        optimiser = torch.optim.AdamW(list(policy.parameters()), settings.lr, betas=(0.9, 0.99), weight_decay=0.0)
        return cls(policy, engine, chat, settings, optimiser=optimiser, reference=copy.deepcopy(policy) if settings.kl else None, **rest)

    def step(self, k: int) -> tuple[dict[str, Any], list[Group]]:
        """Step k (from 0): its metrics, and the groups that it learned from."""
        settings = self.settings
        started = time.perf_counter()
        groups = rollout(self.draw(k), settings.group_size, self.engine, self.chat, self.make_env, self.limits, seed=self.seed_for(k))
        rolled = time.perf_counter()
        assign_advantages(groups)
        metrics = self._update(groups, settings.lr * min(1.0, (k + 1) / max(1, settings.warmup_steps)))
        self.engine.load_weights(self.policy.model, version=self.engine.version + 1)
        environment = sum(t.cost["environment_s"] for g in groups for t in g.trajectories)
        metrics |= rollout_metrics(groups) | {"environment_s": environment, "generate_s": rolled - started - environment}
        return metrics | {"update_s": time.perf_counter() - rolled}, groups

    def _update(self, groups: Sequence[Group], lr: float) -> dict[str, float]:
        """Clipped policy-gradient steps on the trajectories whose advantage is not zero. Token mean over what is trained."""
        settings = self.settings
        learned = [t for group in groups for t in group.trajectories if t.advantage]
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        tokens = sum(sum(t.mask) for t in learned)
        totals: dict[str, float] = defaultdict(float)
        for epoch in range(settings.epochs if learned else 0):
            for rows in microbatches([len(t.ids) for t in learned], settings.tokens_per_microbatch):
                loss, metrics = self._loss([learned[row] for row in rows], tokens, first=epoch == 0)
                loss.backward()
                totals["loss"] += loss.item()
                for name, value in metrics.items():
                    totals[name] = max(totals[name], value) if name.endswith(("gap", "max")) else totals[name] + value
            totals["grad_norm"] = clip_gradients(self.policy, settings.clip_norm)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
        if totals["logprob_gap"] > settings.max_logprob_gap:
            raise RuntimeError(f"engine and learner differ by {totals['logprob_gap']:.1e} in a token's log-prob: they hold different weights")
        return {"lr": lr, "learned": len(learned), "loss": 0.0, "grad_norm": 0.0, "logprob_gap": 0.0, **totals}

    def _loss(self, chosen: Sequence[Trajectory], tokens: int, *, first: bool) -> tuple[Tensor, dict[str, float]]:
        """The loss of one micro-batch, normalised by the trained tokens of the whole step; its metrics, likewise shares of the whole."""
        settings = self.settings
        batch = pack([t.ids for t in chosen], [t.mask for t in chosen])
        logprobs = self.policy.packed_logprobs(batch, temperature=self.limits.temperature or 1.0)
        everywhere = torch.ones_like(logprobs, dtype=torch.bool)
        segments = batch.segments().to(logprobs.device)
        gap = 0.0
        if first:
            sampled = batch.flat([t.logprobs for t in chosen]).to(logprobs.device)
            gap = float((logprobs.detach() - sampled).abs().max())
            _keep_learner_logprobs(chosen, logprobs.detach())
        old = batch.flat([t.learner_logprobs or [] for t in chosen]).to(logprobs.device)
        advantages = batch.flat([[t.advantage or 0.0] * len(t.ids) for t in chosen]).to(logprobs.device)
        loss, metrics = policy_loss(
            logprobs, old, advantages, everywhere, segments, kind="ppo", clip_low=settings.clip, clip_high=settings.clip, tokens=tokens
        )
        share = len(logprobs) / tokens
        out = {"logprob_gap": gap, "ratio_max": metrics["ratio_max"], "clip_fraction": metrics["clip_fraction"] * share / settings.epochs}
        if self.reference is not None:
            with torch.no_grad():
                reference = self.reference.packed_logprobs(batch, temperature=self.limits.temperature or 1.0)
            divergence = aggregate(kl(logprobs, reference, everywhere), everywhere, segments, mode="token-mean", tokens=tokens)
            loss, out["kl"] = loss + settings.kl * divergence, divergence.item() / settings.epochs
        return loss, out


def assign_advantages(groups: Sequence[Group]) -> None:
    """Write each trajectory's advantage, from the valid members of its group. A failed trajectory gets 0 and moves nobody."""
    flat = [t for group in groups for t in group.trajectories]
    rewards, valid = from_optional([t.reward if t.valid else None for t in flat])
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.trajectories])
    for trajectory, advantage in zip(flat, grpo(rewards, ids, valid).tolist(), strict=True):
        trajectory.advantage = advantage


def _keep_learner_logprobs(chosen: Sequence[Trajectory], logprobs: Tensor) -> None:
    """Write the learner's own log-probs onto the trajectories: the old policy of the later epochs, and part of every trace."""
    values = iter(logprobs.tolist())
    for trajectory in chosen:
        trajectory.learner_logprobs = [next(values) if sampled and i else 0.0 for i, sampled in enumerate(trajectory.mask)]


def rollout_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """What a step's trajectories say: reward and success over valid ones, mixed groups, lengths, and counts of outcomes and statuses."""
    flat = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in flat if t.valid and t.reward is not None]
    mixed = [len({r for r in group.rewards if r is not None}) > 1 for group in groups]
    return {
        "reward_mean": fmean(rewards) if rewards else None, "success": fmean(r == 1.0 for r in rewards) if rewards else None,
        "mixed_groups": fmean(mixed), "turns_mean": fmean(t.assistant_turns for t in flat), "length_mean": fmean(len(t.ids) for t in flat),
        "tokens": sum(len(t.ids) for t in flat), "episodes": len(flat),
        "outcomes": dict(Counter(t.outcome or "none" for t in flat)), "status": dict(Counter(t.status for t in flat)),
    }  # fmt: skip
