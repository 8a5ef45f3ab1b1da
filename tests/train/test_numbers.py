"""The learner's pure functions against their formulas, in the plainest arithmetic there is."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from savepoint.train.advantages import dr_grpo, from_optional, grpo, rloo, to_tokens
from savepoint.train.logprobs import chunked_logprobs
from savepoint.train.losses import PRESETS, aggregate, kl, policy_loss
from savepoint.train.muon import Muon, orthogonalise, split_parameters
from savepoint.train.policy import Policy, TinyConfig

members = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, None]), st.integers(-1, 2)), min_size=1, max_size=16)


@given(members)
def test_group_advantages_are_the_textbook_s(rows):
    rewards, valid = from_optional([reward for reward, _ in rows])
    ids = torch.tensor([group for _, group in rows])
    ours = {f: f(rewards, ids, valid).tolist() for f in (grpo, dr_grpo, rloo)}
    for i, (reward, group) in enumerate(rows):
        mates = [r for r, g in rows if g == group and r is not None]
        if reward is None or len(set(mates)) < 2:
            assert all(values[i] == 0.0 for values in ours.values())
            continue
        centred = reward - statistics.fmean(mates)
        assert ours[grpo][i] == pytest.approx(centred / (statistics.stdev(mates) + 1e-6))
        assert ours[dr_grpo][i] == pytest.approx(centred)
        assert ours[rloo][i] == pytest.approx(reward - (sum(mates) - reward) / (len(mates) - 1))


def test_rewards_that_are_no_numbers_are_named():
    with pytest.raises(ValueError, match="index 1"):
        from_optional([1.0, math.nan])
    with pytest.raises(ValueError, match="index 0"):
        grpo(torch.tensor([math.inf, 1.0]), torch.tensor([0, 0]), torch.tensor([True, True]))
    assert to_tokens(torch.tensor([2.0, 3.0]), torch.tensor([1, -1, 0])).tolist() == [3.0, 0.0, 2.0]


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [-0.5, -0.1, 0.0, 0.1, 0.5])
def test_ppo_clips_on_the_side_that_would_profit(advantage: float, log_ratio: float):
    new, old = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True), torch.zeros(1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.bool)
    loss, metrics = policy_loss(new, old, torch.tensor([advantage], dtype=torch.float64), one, torch.zeros(1, dtype=torch.long))
    ratio = math.exp(log_ratio)
    assert loss.item() == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    loss.backward()
    clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert metrics["clip_fraction"] == float(clipped) and new.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def by_hand(kind: str, lp: float, old: float, advantage: float, sequence_ratio: float) -> float:
    """The contract's formulas for one token, in plain floats."""
    r = math.exp(lp - old)
    if kind == "ppo":
        return max(min(r * advantage, min(max(r, 0.8), 1.2) * advantage), 3.0 * advantage if advantage < 0 else -math.inf) * -1
    if kind == "gspo":
        return -min(sequence_ratio * advantage, min(max(sequence_ratio, 0.8), 1.2) * advantage)
    if kind == "cispo":
        return -min(max(r, 0.8), 1.2) * advantage * lp
    if kind == "reinforce":
        return -advantage * lp
    tau = 1.0 if advantage > 0 else 1.05
    return -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * advantage


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce", "sapo"])
def test_every_loss_is_its_formula(kind: str):
    lp, old, advantages = [-1.0, -0.2, -2.5, -0.4, -0.7], [-1.6, -0.3, -1.0, -0.4, -0.1], [1.0, 1.0, -2.0, -2.0, -2.0]
    segments = [0, 0, 1, 1, 1]
    ratios = [math.exp(statistics.fmean(a - b for a, b, s in zip(lp, old, segments, strict=True) if s == mine)) for mine in segments]
    expected = [by_hand(kind, *row) for row in zip(lp, old, advantages, ratios, strict=True)]
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (lp, old, advantages)]
    mask, ids = torch.ones(5, dtype=torch.bool), torch.tensor(segments)
    for mode, value in (
        ("token-mean", statistics.fmean(expected)), ("sequence-mean", (statistics.fmean(expected[:2]) + statistics.fmean(expected[2:])) / 2),
        ("constant", sum(expected) / (2 * 7.0)),
    ):  # fmt: skip
        loss, _ = policy_loss(*tensors, mask, ids, kind=kind, dual_clip=3.0 if kind == "ppo" else None, aggregation=mode, constant=7.0)
        assert loss.item() == pytest.approx(value)


def test_a_sequence_ratio_has_the_gradient_of_its_own_tokens():
    lp = torch.tensor([-1.0, -0.2], dtype=torch.float64, requires_grad=True)
    old, ids = torch.tensor([-1.02, -0.24], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    policy_loss(lp, old, torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool), ids, kind="gspo")[0].backward()
    assert lp.grad.tolist() == pytest.approx([-math.exp(0.03) / 2] * 2)


def test_presets_are_accepted_and_unknown_names_are_named():
    lp, ids, mask = torch.tensor([-0.5, -0.1]), torch.tensor([0, 1]), torch.tensor([True, True])
    for name, preset in PRESETS.items():
        loss, _ = policy_loss(lp, lp - 0.01, torch.tensor([1.0, -1.0]), mask, ids, constant=4.0, **preset)
        assert loss.isfinite(), name
    for wrong in ({"kind": "trpo"}, {"aggregation": "median"}, {"aggregation": "constant"}, {"dual_clip": 0.5}):
        with pytest.raises(ValueError):
            policy_loss(lp, lp, lp, mask, ids, **wrong)


def test_masked_tokens_change_neither_value_nor_gradient_and_trained_nan_comes_out():
    segments, mask = torch.tensor([0, 0, 1]), torch.tensor([True, False, True])
    clean = torch.tensor([0.1, 0.0, -0.2], requires_grad=True)
    dirty = torch.tensor([0.1, math.nan, -0.2], requires_grad=True)
    advantages = torch.tensor([1.0, math.inf, -1.0])
    losses = [policy_loss(lp, torch.zeros(3), advantages, mask, segments)[0] for lp in (clean, dirty)]
    assert losses[0].item() == losses[1].item()
    losses[1].backward()
    assert dirty.grad[1].item() == 0.0 and dirty.grad.isfinite().all()
    assert policy_loss(dirty, torch.zeros(3), advantages.nan_to_num(1.0), torch.ones(3, dtype=torch.bool), segments)[0].isnan()


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
def test_microbatches_add_up_to_the_batch(mode: str):
    values, segments, mask = torch.rand(12, dtype=torch.float64), torch.arange(12) // 4, torch.rand(12) > 0.3
    whole = aggregate(values, mask, segments, mode=mode)
    trained = len({int(s) for s, m in zip(segments, mask, strict=True) if m})
    parts = sum(aggregate(values[i : i + 4], mask[i : i + 4], segments[i : i + 4], mode=mode, tokens=int(mask.sum()), sequences=trained) for i in (0, 4, 8))
    assert parts.item() == pytest.approx(whole.item())


def test_divergence_is_never_negative_and_zero_for_equal_policies():
    lp, mask = torch.randn(50), torch.ones(50, dtype=torch.bool)
    assert (kl(lp, lp + torch.randn(50), mask) >= 0).all() and kl(lp, lp, mask).abs().max() == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(1, 7), st.sampled_from([0.5, 1.0, 2.0]), st.booleans())
def test_chunked_logprobs_are_log_softmax_in_value_and_gradient(n: int, chunk: int, temperature: float, biased: bool):
    generator = torch.Generator().manual_seed(n)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in ((n, 5), (11, 5)))
    bias = torch.randn(11, dtype=torch.float64, generator=generator).requires_grad_() if biased else None
    labels = torch.randint(0, 11, (n,), generator=generator)
    logits = (hidden @ weight.T + (bias if bias is not None else 0.0)) / temperature
    plain = logits.log_softmax(-1)
    expected, entropy = plain.gather(1, labels[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    ours, ours_entropy = chunked_logprobs(hidden, weight, labels, bias=bias, temperature=temperature, chunk=chunk, entropy=True)
    assert torch.allclose(ours, expected) and torch.allclose(ours_entropy, entropy)
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    mine = torch.autograd.grad((ours * 2 + ours_entropy).sum(), inputs)
    theirs = torch.autograd.grad((expected * 2 + entropy).sum(), inputs)
    assert all(torch.allclose(a, b) for a, b in zip(mine, theirs, strict=True))


def test_logprobs_at_trained_positions_are_those_of_the_whole_model():
    policy = Policy.tiny(TinyConfig(hidden_size=32, layers=2, head_dim=8, vocab_size=40), vocab_size=40, pad_id=0, end_id=1, seed=0)
    ids = torch.randint(2, 40, (3, 9))
    attention = torch.ones_like(ids)
    attention[1, 6:] = 0
    trained = attention.bool() & (torch.rand(3, 9) > 0.4)
    trained[:, 0] = False
    with torch.no_grad():
        whole = policy.model(input_ids=ids, attention_mask=attention).logits.log_softmax(-1)
        ours = policy.logprobs(ids, attention, trained)
    rows, columns = trained.nonzero(as_tuple=True)
    assert torch.allclose(ours, whole[rows, columns - 1, ids[rows, columns]], atol=1e-5)


def test_muon_orthogonalises_each_matrix_of_a_stack_as_if_alone():
    stack = torch.randn(3, 8, 5)
    for matrix, one in zip(stack, orthogonalise(stack), strict=True):
        assert torch.allclose(one, orthogonalise(matrix), atol=1e-5)
        singular = torch.linalg.svdvals(one)
        assert singular.min() > 0.3 and singular.max() < 1.4


def test_muon_moves_a_matrix_as_torch_s_own():
    a, b = (torch.nn.Parameter(torch.randn(6, 9, generator=torch.Generator().manual_seed(0))) for _ in "ab")
    ours = Muon([a], lr=0.02)
    theirs = torch.optim.Muon([b], lr=0.02, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        gradient = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed))
        a.grad, b.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(a, b, atol=2e-3)  # torch's rounds to bfloat16 inside
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_muon_gets_the_hidden_matrices_and_nothing_else():
    policy = Policy.tiny(TinyConfig(hidden_size=32, layers=2, head_dim=8, vocab_size=40), vocab_size=40, pad_id=0, end_id=1, seed=0)
    names = {id(p): name for name, p in policy.model.named_parameters()}
    matrices, rest = split_parameters(policy.model)
    assert len(matrices) + len(rest) == len(names)
    assert {names[id(p)].rpartition(".")[2] for p in matrices} == {"weight", "gate_up_proj", "down_proj"}
    assert not any(word in names[id(p)] for p in matrices for word in ("embed", "router", "norm", "sinks", "bias"))
