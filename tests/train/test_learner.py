"""The learner's settings: what they turn on is on, packed rows never leak, and what cannot be had is one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from savepoint.attention import hf
from savepoint.attention.backends import cpu_flash
from savepoint.errors import UserError
from savepoint.train.batches import pack
from savepoint.train.learner import LearnerSettings, check_attention, prepare
from savepoint.train.policy import Policy, TinyConfig

DOCUMENTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18]]
BATCH = pack(DOCUMENTS, [[True] * len(d) for d in DOCUMENTS])


def policy(**changes: Any) -> Policy:
    made = Policy.tiny(TinyConfig(hidden_size=32, layers=2, head_dim=8, vocab_size=40, sliding_window=4, **changes), vocab_size=40, pad_id=0, end_id=1, seed=0)
    with torch.no_grad():
        for layer in made.model.model.layers:
            layer.self_attn.sinks.uniform_(-3, 3)
    return made


def gradients(made: Policy) -> list[torch.Tensor]:
    made.model.zero_grad()
    made.packed_logprobs(BATCH).sum().backward()
    return [p.grad.clone() for p in made.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "settings", [{"attention": "eager"}, {"attention": "block"}, {"recompute": "layers"}, {"recompute": "host", "expert_tile": 3}, {"attention": "cpu_flash"}]
)
def test_settings_change_memory_and_not_what_is_learned(settings: dict[str, Any]):
    torch.manual_seed(0)
    plain = policy()
    torch.manual_seed(0)
    changed = policy()
    prepare(changed, LearnerSettings(**settings))
    changed.load_weights(plain.weights())
    for a, b in zip(gradients(plain), gradients(changed), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert hf.backend_of(changed.model) == settings.get("attention", "cpu_flash")


def test_packed_logprobs_are_those_of_each_sequence_alone():
    made = policy()
    packed = made.packed_logprobs(BATCH, temperature=0.7)
    alone = []
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        trained = torch.ones_like(ids, dtype=torch.bool)
        trained[:, 0] = False
        alone.append(made.logprobs(ids, torch.ones_like(ids), trained, temperature=0.7))
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


def test_a_policy_whose_attention_would_leak_is_refused_before_it_computes():
    made = policy()
    made.packed_logprobs(BATCH)
    made.model.set_attn_implementation("eager")  # found out again, since what was checked has changed
    with pytest.raises(UserError, match="'eager'"):
        made.packed_logprobs(BATCH)


def test_lost_sinks_are_noticed():
    made = policy()
    made.model.model.layers[1].self_attn.sinks = None
    with pytest.raises(UserError, match=r"attention: sinks: model\.layers\.1\.self_attn of this 'gpt_oss' model has none"):
        made.attend()
    made.model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    made.attend()


def test_what_cannot_be_had_is_one_line():
    with pytest.raises(UserError, match="attention: backend: unknown 'fastest'"):
        prepare(policy(), LearnerSettings(attention="fastest"))
    made = policy()
    for layer in made.model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
    with pytest.raises(UserError, match="learner: experts"):
        prepare(made, LearnerSettings(expert_tile=8))


def test_a_backend_that_is_not_here_is_refused_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf, "backends", lambda device="cpu": {"eager": None, "fa4": "needs a CUDA device"})
    with pytest.raises(UserError, match="attention backend 'fa4': needs a CUDA device"):
        prepare(policy(), LearnerSettings(attention="fa4"))


def test_a_window_of_nothing_is_refused():
    made = policy()
    made.model.model.layers[0].self_attn.sliding_window = 0
    with pytest.raises(UserError, match="window"):
        made.packed_logprobs(BATCH)


def test_a_backend_that_computes_something_else_is_refused_before_anything_is_learned(monkeypatch: pytest.MonkeyPatch):
    made = policy()
    assert check_attention(made)["backend"] == "cpu_flash"  # type: ignore[index]
    attend = cpu_flash.attend
    monkeypatch.setattr(cpu_flash, "attend", lambda q, k, v, sinks, problem: attend(q, k, v, sinks * problem.scale, problem))
    with pytest.raises(UserError, match="learner.attention: attention backend 'cpu_flash' is wrong on cpu"):
        check_attention(made)
    made.model.set_attn_implementation("eager")
    assert check_attention(made) is None
