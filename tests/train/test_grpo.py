"""GRPO: the update follows the advantages, normalised over the whole step, and a failed trajectory is no part of it."""

from __future__ import annotations

import copy

import pytest
import torch

from savepoint.rollout.driver import SamplingLimits
from savepoint.rollout.trajectory import Group, Trajectory
from savepoint.train.grpo import Grpo, GrpoSettings, assign_advantages, rollout_metrics
from savepoint.train.policy import Policy, TinyConfig


class FakeChat:
    pad_id = 0


class FakeEngine:
    version = 0

    def load_weights(self, model: object, version: int) -> None:
        self.version = version


def policy() -> Policy:
    return Policy.tiny(TinyConfig(hidden_size=32, layers=2, head_dim=8, vocab_size=40), vocab_size=40, pad_id=0, end_id=1, seed=0)


def trajectory(model: Policy, ids: list[int], reward: float | None, status: str = "ok") -> Trajectory:
    mask = [False, False] + [True] * (len(ids) - 2)
    tensor = torch.tensor([ids])
    with torch.no_grad():
        sampled = model.logprobs(tensor, torch.ones_like(tensor), torch.tensor([mask])).tolist()
    return Trajectory("t", 0, 0, 0, ids, mask, [0.0, 0.0, *sampled], status=status, reward=reward, outcome="correct" if reward else "wrong_result")  # type: ignore[arg-type]


def groups(model: Policy) -> list[Group]:
    first = [trajectory(model, ids, r) for ids, r in (([2, 3, 4, 1], 1.0), ([2, 3, 5, 6, 1], 0.0), ([2, 3, 7, 1], 0.0))]
    second = [trajectory(model, [8, 9, 4, 1], 1.0), trajectory(model, [8, 9, 5, 1], 1.0)]
    return [Group("a", first), Group("b", second)]


def stage(model: Policy, **settings: object) -> Grpo:
    given = GrpoSettings(lr=1e-2, warmup_steps=0, **settings)  # type: ignore[arg-type]
    return Grpo.start(
        model, FakeEngine(), FakeChat(), given, limits=SamplingLimits(), make_env=lambda: None, draw=lambda k: [], seed_for=lambda k: 0  # type: ignore[arg-type, return-value]
    )


def test_what_was_rewarded_becomes_likelier_and_the_rest_less():
    model = policy()
    made = groups(model)
    assign_advantages(made)
    metrics = stage(model)._update(made, 1e-2)
    for t in made[0].trajectories:
        ids = torch.tensor([t.ids])
        new = model.logprobs(ids, torch.ones_like(ids), torch.tensor([t.mask])).sum()
        assert (new > sum(t.logprobs)) == (t.reward == 1.0)
    assert metrics["learned"] == 3 and metrics["logprob_gap"] < 1e-4 and metrics["grad_norm"] > 0


def test_the_split_into_microbatches_changes_nothing():
    updated = []
    for budget in (4096, 1):
        model = policy()
        made = groups(model)
        assign_advantages(made)
        grpo = stage(model, tokens_per_microbatch=budget)
        grpo.optimiser = torch.optim.SGD(list(model.parameters()), 1.0)  # Adam's first step would blow rounding up to its learning rate
        grpo._update(made, 1.0)
        updated.append(model.weights())
    for name in updated[0]:
        assert torch.allclose(updated[0][name], updated[1][name], atol=1e-5), name


def test_a_failed_member_changes_neither_advantages_nor_weights():
    updated = []
    for extra in (False, True):
        model = policy()
        made = groups(model)
        if extra:
            made[0].trajectories.append(trajectory(model, [2, 3, 9, 9, 1], None, "failed"))
        assign_advantages(made)
        stage(model)._update(made, 1e-2)
        updated.append(model.weights())
    assert all(torch.equal(updated[0][name], updated[1][name]) for name in updated[0])


def test_a_step_whose_groups_agree_changes_nothing():
    model = policy()
    made = groups(model)[1:]
    before = copy.deepcopy(model.weights())
    assign_advantages(made)
    metrics = stage(model)._update(made, 1e-2)
    assert metrics["learned"] == 0 and all(torch.equal(before[name], value) for name, value in model.weights().items())


def test_an_engine_with_other_weights_is_found_out():
    model = policy()
    made = groups(model)
    assign_advantages(made)
    for t in made[0].trajectories:
        t.logprobs = [lp - 0.1 if m else 0.0 for lp, m in zip(t.logprobs, t.mask, strict=True)]
    with pytest.raises(RuntimeError, match="they hold different weights"):
        stage(model)._update(made, 1e-2)


def test_a_divergence_from_the_start_holds_the_policy_back():
    moved = []
    for weight in (0.0, 5.0):
        model = policy()
        made = groups(model)
        start = copy.deepcopy(model.weights())
        assign_advantages(made)
        grpo = stage(model, kl=weight, epochs=8)
        metrics = grpo._update(made, 1e-2)
        moved.append(sum(float((model.weights()[n] - start[n]).abs().sum()) for n in start))
    assert metrics["kl"] > 0 and moved[1] < moved[0]


def test_metrics_count_what_happened():
    model = policy()
    made = groups(model)
    made[1].trajectories.append(trajectory(model, [8, 9, 9, 1], None, "failed"))
    metrics = rollout_metrics(made)
    assert metrics["success"] == pytest.approx(3 / 5) and metrics["mixed_groups"] == 0.5 and metrics["episodes"] == 6
    assert metrics["outcomes"] == {"correct": 3, "wrong_result": 3} and metrics["status"] == {"ok": 5, "failed": 1}
