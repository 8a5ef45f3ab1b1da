"""Imitation: it learns what is weighted, and its steps are a function of position and state."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from savepoint.rollout.render import Part
from savepoint.train.batches import pack
from savepoint.train.policy import Policy, TinyConfig
from savepoint.train.sft import Example, Sft, SftSettings


def policy(seed: int = 0) -> Policy:
    return Policy.tiny(TinyConfig(hidden_size=32, layers=2, head_dim=8, vocab_size=40), vocab_size=40, pad_id=0, end_id=1, seed=seed)


def examples(n: int = 24) -> list[Example]:
    """A context token, then three own tokens that follow from it."""
    rng = random.Random(0)
    out = []
    for _ in range(n):
        k = rng.randrange(2, 8)
        out.append(Example([k, k + 10, k + 20, 1], [Part.CONTEXT, Part.OWN, Part.OWN, Part.OWN]))
    return out


def sft(model: Policy, **settings: object) -> Sft:
    return Sft(model, examples(), SftSettings(epochs=20, batch_size=8, warmup_steps=2, **settings), random.Random(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("muon_lr", [0.02, 0.0])
def test_it_learns_to_say_what_was_demonstrated(muon_lr: float):
    stage = sft(policy(), muon_lr=muon_lr)
    losses = [stage.step(k)["own_loss"] for k in range(stage.steps)]
    assert losses[0] > 2 and losses[-1] < 0.2


def test_tokens_of_weight_zero_have_no_gradient():
    model = policy()
    stage = sft(model, context_weight=0.0, quoted_weight=0.0, muon_lr=0.0)
    other = Sft(copy.deepcopy(model), [Example(e.ids[:1] + e.ids[1:], e.parts) for e in examples()], stage.settings, random.Random(1))
    for example in other.examples:
        example.parts[1] = Part.QUOTED
    a, b = stage.step(0), other.step(0)
    assert a["loss"] != b["loss"] and a["own_loss"] != b["own_loss"]  # the second token no longer counts
    assert a["tokens"] == b["tokens"] == 32


def test_a_stage_goes_on_from_its_state_to_the_same_bits():
    whole = sft(policy())
    for k in range(6):
        whole.step(k)
    first = sft(policy())
    for k in range(3):
        first.step(k)
    weights, state = copy.deepcopy(first.policy.weights()), copy.deepcopy(first.state())
    second = sft(policy(seed=9))
    second.policy.load_weights(weights)
    second.load_state(state)  # type: ignore[arg-type]
    for k in range(3, 6):
        second.step(k)
    for name, value in whole.policy.weights().items():
        assert torch.equal(value, second.policy.weights()[name]), name


def test_an_epoch_shows_every_example_once():
    stage = Sft(policy(), examples(24), SftSettings(epochs=2, batch_size=8), random.Random(3))
    assert sorted(stage.order[:24]) == list(range(24)) == sorted(stage.order[24:]) and stage.order[:24] != stage.order[24:]


def test_the_schedule_warms_up_and_cools_down():
    stage = sft(policy())
    rates = [stage._schedule(k) for k in range(stage.steps)]
    assert rates[0] < rates[1] and max(rates) <= 1.0 and 0.1 <= rates[-1] < 0.12


def test_the_split_into_microbatches_changes_nothing():
    made = []
    for budget in (4096, 1):
        model = policy()
        stage = sft(model, muon_lr=0.0, context_weight=0.3, tokens_per_microbatch=budget)
        stage.optimisers = [(torch.optim.SGD(list(model.parameters()), 1.0), 1.0)]  # Adam's first step would blow rounding up to its learning rate
        made.append((stage.step(0), model.weights()))
    (whole, weights), (split, split_weights) = made
    assert whole["loss"] == pytest.approx(split["loss"], rel=1e-5) and whole["own_loss"] == pytest.approx(split["own_loss"], rel=1e-5)
    assert all(torch.allclose(weights[name], split_weights[name], atol=1e-6) for name in weights)


def test_what_stands_beside_a_demonstration_does_not_change_its_loss():
    model = policy()
    chosen = examples(3)
    losses = []
    for beside in ([], chosen[1:]):
        stage = Sft(copy.deepcopy(model), [chosen[0], *beside], SftSettings(epochs=1, batch_size=1 + len(beside)), random.Random(0))
        batch = pack([e.ids for e in (chosen[0], *beside)], [[True] * 4] * (1 + len(beside)))
        losses.append(stage.policy.packed_logprobs(batch)[:3])
    assert torch.allclose(losses[0], losses[1], atol=1e-6)
