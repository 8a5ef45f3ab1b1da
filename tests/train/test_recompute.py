"""Checkpoints per layer: the same bits, with one input a layer kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from savepoint.train import recompute
from savepoint.train.policy import Policy, TinyConfig
from savepoint.train.recompute import recompute_layers

LAYERS, HIDDEN = 3, 32


def policy(architecture: str = "gpt_oss") -> Policy:
    config = TinyConfig(architecture=architecture, hidden_size=HIDDEN, layers=LAYERS, head_dim=8, sliding_window=8, vocab_size=40)  # type: ignore[arg-type]
    return Policy.tiny(config, vocab_size=40, pad_id=0, end_id=1, seed=0)


def gradients(model: Any, tokens: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (2, tokens), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    model.model(input_ids=ids, use_cache=False).last_hidden_state.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("architecture", ["gpt_oss", "llama"])
def test_gradients_stay_the_same_in_every_bit(architecture: str, offload: bool):
    model = policy(architecture).model
    expected = gradients(model)
    assert recompute_layers(model, offload=offload) == LAYERS
    got = gradients(model)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], slope) for name, slope in expected.items())


def kept_bytes(model: Any, tokens: int) -> int:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and x.is_floating_point():
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_keeps_its_input_alone(training: bool):
    model = policy().model.train(training)
    before = kept_bytes(model, 256) - kept_bytes(model, 128)
    recompute_layers(model)
    after = kept_bytes(model, 256) - kept_bytes(model, 128)
    assert after <= 4 * 128 * HIDDEN * (LAYERS + 4) < before / 8  # the inputs, and what the last norm keeps


def test_offloaded_inputs_wait_on_the_host_and_come_back(monkeypatch: pytest.MonkeyPatch):
    parked: list[tuple[int, ...]] = []
    back: list[Tensor] = []

    def to_host(x: Tensor) -> tuple[torch.device, Tensor]:
        parked.append(tuple(x.shape))
        return x.device, x.clone()  # as another device's memory: not the layer's own

    def to_device(held: tuple[torch.device, Tensor]) -> Tensor:
        back.append(held[1])
        return held[1]

    monkeypatch.setattr(recompute, "_to_host", to_host)
    monkeypatch.setattr(recompute, "_to_device", to_device)
    model = policy().model
    expected = gradients(model)
    recompute_layers(model, offload=True)
    got = gradients(model)
    assert [shape for shape in parked if shape == (2, 24, HIDDEN)] == [(2, 24, HIDDEN)] * LAYERS and len(back) >= LAYERS
    assert all(torch.equal(got[name], slope) for name, slope in expected.items())


def test_what_is_parked_is_a_copy_of_the_same_type_and_place():
    x = torch.arange(6.0).view(2, 3).bfloat16()
    place, parked = recompute._to_host(x)
    assert place == x.device and torch.equal(recompute._to_device((place, parked)), x)


def test_a_copy_of_the_policy_runs_its_own_layers():
    model = policy().model
    recompute_layers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    expected = gradients(other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(slope, expected[name]) for name, slope in gradients(other).items())


def test_nothing_is_run_twice_where_nothing_is_learned(monkeypatch: pytest.MonkeyPatch):
    model = policy().model
    recompute_layers(model)
    monkeypatch.setattr(recompute, "checkpoint", lambda *a, **k: pytest.fail("checkpointed without a gradient"))
    with torch.no_grad():
        model.model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)


def test_a_cache_that_would_be_filled_twice_is_refused():
    model = policy().model
    recompute_layers(model)
    with pytest.raises(ValueError, match="use_cache=False"):
        model.model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=True)


def test_a_model_without_such_layers_is_refused():
    class Plain(nn.Module):
        class config:
            model_type = "plain"

    with pytest.raises(ValueError, match="'plain' model has no layers"):
        recompute_layers(Plain())
