"""The embedded engine against the learner: the same log-probs on every sampled token, whatever the shape of the rollout."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from savepoint.attention import sink_attention
from savepoint.attention.sinks import with_sinks
from savepoint.errors import UserError
from savepoint.rollout.engines import forward
from savepoint.rollout.engines.base import Sampled
from savepoint.rollout.engines.embedded import EmbeddedEngine
from savepoint.train.policy import Policy, TinyConfig

VOCABULARY, STOP = 50, 6


def tiny(architecture: str, **changes: object) -> Policy:
    shape = {"hidden_size": 32, "layers": 3, "head_dim": 16, "heads": 4, "kv_heads": 2, "sliding_window": 8, "vocab_size": VOCABULARY, **changes}
    if architecture in ("gpt_oss", "llama"):
        policy = Policy.tiny(TinyConfig(architecture=architecture, **shape), vocab_size=VOCABULARY, pad_id=0, end_id=STOP, seed=1)  # type: ignore[arg-type]
    else:
        config, model = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[architecture]
        torch.manual_seed(1)
        made = model(config(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
        policy = Policy(made, pad_id=0, end_id=STOP)
    if architecture == "gpt_oss":
        with torch.no_grad():
            for layer in policy.model.model.layers:
                layer.self_attn.sinks.normal_()
    policy.model.eval()
    return policy


def talk(slot: int, message: list[int], finish: str, turns: dict[int, int], most: int = 3) -> list[int] | None:
    """A tool's answer of a length that differs by slot and turn; slots end after different numbers of turns."""
    turns[slot] = turns.get(slot, 0) + 1
    if turns[slot] > slot % (most + 1) or finish == "length":
        return None
    return [7 + (slot + i) % 40 for i in range(1 + (3 * slot + turns[slot]) % 11)]


def generate(engine: EmbeddedEngine, prompts: list[list[int]], group: int, **settings: object) -> list[Sampled]:
    turns: dict[int, int] = {}
    given = {"temperature": 1.0, "max_message_tokens": 12, "max_tokens": 96, "seed": 3, **settings}
    return engine.generate(prompts, group, lambda s, m, f: talk(s, m, f, turns), stop_ids={STOP, 9, 11}, **given)  # type: ignore[arg-type]


def worst_gap(policy: Policy, sampled: list[Sampled], temperature: float = 1.0) -> float:
    gaps = []
    for one in sampled:
        ids, mask = torch.tensor([one.ids]), torch.tensor([one.mask])
        with torch.no_grad():
            ours = policy.logprobs(ids, torch.ones_like(ids), mask, temperature=temperature)
        gaps.append(float((ours - torch.tensor(one.logprobs)[mask[0]]).abs().max()))
    return max(gaps)


PROMPTS = [[10, 11, 12], list(range(20, 48)), [13] * 9, [10, 11, 12, 14]]


@pytest.mark.parametrize("architecture", ["gpt_oss", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_over_turns(architecture: str, temperature: float):
    policy = tiny(architecture)
    sampled = generate(EmbeddedEngine(policy.model, slots=64, max_tokens=96, pad_id=0), PROMPTS, 8, temperature=temperature)
    assert worst_gap(policy, sampled, temperature) <= 1e-4
    assert max(len(s.ids) for s in sampled) > 40 and any(s.mask.index(True) < len(s.mask) and not all(s.mask[s.mask.index(True) :]) for s in sampled)


def test_more_trajectories_than_slots_are_served_and_nothing_changes():
    policy = tiny("gpt_oss")
    wide = generate(EmbeddedEngine(policy.model, slots=64, max_tokens=96, pad_id=0), PROMPTS, 8)
    narrow = generate(EmbeddedEngine(policy.model, slots=9, max_tokens=96, pad_id=0), PROMPTS, 8)
    assert [s.ids for s in wide] == [s.ids for s in narrow] and worst_gap(policy, narrow) <= 1e-4


def test_the_same_seed_says_the_same_and_another_does_not():
    policy = tiny("llama")
    engine = EmbeddedEngine(policy.model, slots=64, max_tokens=96, pad_id=0)
    first, again, other = (generate(engine, PROMPTS, 4, seed=seed) for seed in (5, 5, 6))
    assert [s.ids for s in first] == [s.ids for s in again] != [s.ids for s in other]


def test_greedy_is_the_likeliest_token_everywhere():
    policy = tiny("gpt_oss")
    (one,) = generate(EmbeddedEngine(policy.model, slots=4, max_tokens=96, pad_id=0), [PROMPTS[1]], 1, temperature=0.0)
    with torch.no_grad():
        logits = policy.model(torch.tensor([one.ids])).logits[0]
    likeliest = logits.argmax(-1)
    assert all(one.ids[t] == int(likeliest[t - 1]) for t, sampled in enumerate(one.mask) if sampled)


def test_what_is_not_sampled_is_what_was_given():
    policy = tiny("llama")
    turns: dict[int, int] = {}
    said: dict[int, list[list[int]]] = {}

    def respond(slot: int, message: list[int], finish: str) -> list[int] | None:
        answer = talk(slot, message, finish, turns)
        said.setdefault(slot, []).append(message)
        if answer is not None:
            said[slot].append(answer)
        return answer

    sampled = EmbeddedEngine(policy.model, slots=8, max_tokens=96, pad_id=0).generate(
        PROMPTS, 2, respond, stop_ids={STOP, 9, 11}, temperature=1.0, max_message_tokens=12, max_tokens=96, seed=0
    )
    for slot, one in enumerate(sampled):
        assert one.ids == PROMPTS[slot // 2] + [i for part in said[slot] for i in part]
        assert not any(one.mask[: len(PROMPTS[slot // 2])]) and all(lp == 0.0 for lp, m in zip(one.logprobs, one.mask, strict=True) if not m)


def test_new_weights_are_sampled_from_at_once():
    policy, other = tiny("llama"), tiny("llama")
    engine = EmbeddedEngine(policy.model, slots=8, max_tokens=96, pad_id=0)
    generate(engine, PROMPTS, 2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    before = engine.checksum
    engine.load_weights(other.weights(), version=4)
    assert engine.version == 4 and engine.checksum == other.checksum() != before
    assert worst_gap(other, generate(engine, PROMPTS, 2)) <= 1e-4


def test_what_the_responder_raises_comes_out():
    engine = EmbeddedEngine(tiny("llama").model, slots=8, max_tokens=96, pad_id=0)

    def respond(slot: int, message: list[int], finish: str) -> list[int] | None:
        raise KeyError("the environment is gone")

    with pytest.raises(KeyError):
        engine.generate(PROMPTS, 2, respond, stop_ids={STOP}, max_message_tokens=3, max_tokens=96, seed=0)
    assert generate(engine, PROMPTS, 2)


def test_what_cannot_be_served_is_refused():
    engine = EmbeddedEngine(tiny("llama").model, slots=8, max_tokens=32, pad_id=0)
    for prompts, changes in (([[]], {}), ([[1] * 32], {"max_tokens": 32}), ([[1]], {"max_tokens": 64}), ([[1]], {"temperature": -1.0, "max_tokens": 32})):
        with pytest.raises(ValueError):
            generate(engine, prompts, 1, **{"max_tokens": 32, **changes})

    class Unknown:
        model_type = "mamba"

    policy = tiny("llama")
    policy.model.config = Unknown()
    with pytest.raises((UserError, ValueError), match="llama"):
        EmbeddedEngine(policy.model, slots=8, max_tokens=32, pad_id=0)


@pytest.mark.parametrize("sinks", [-float("inf"), 0.0, 9.0])
def test_sinks_of_any_size_are_the_learners(sinks: float):
    policy = tiny("gpt_oss")
    with torch.no_grad():
        for layer in policy.model.model.layers:
            layer.self_attn.sinks.fill_(sinks)
    engine = EmbeddedEngine(policy.model, slots=16, max_tokens=96, pad_id=0)
    assert worst_gap(policy, generate(engine, PROMPTS, 2)) <= 1e-4


def test_prompts_are_read_and_tokens_sampled_with_the_learners_own_functions(monkeypatch: pytest.MonkeyPatch):
    policy = tiny("gpt_oss")
    read: list[tuple[int, int, int | None]] = []
    sinked: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, *rest: object, window: int | None) -> object:
        read.append((q.shape[2], k.shape[2], window))
        return sink_attention(q, k, *rest, window=window)  # type: ignore[arg-type]

    def renormalise(out: torch.Tensor, *rest: object) -> object:
        sinked.append(tuple(out.shape))
        return with_sinks(out, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "sink_attention", attend)
    monkeypatch.setattr(forward, "with_sinks", renormalise)
    generate(EmbeddedEngine(policy.model, slots=16, max_tokens=1200, pad_id=0), [[7] * 700, [8] * 9], 2, max_tokens=1200)
    pieces = [(queries, keys) for queries, keys, _ in read if queries > 150]
    assert (512, 512) in pieces and (188, 700) in pieces and {window for *_, window in read} == {None, 8}
    assert sinked and all(shape[2] >= 1 for shape in sinked)
