"""Tiled mixtures are the model's own arithmetic, and keep nothing that grows with the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from savepoint.train.experts import tile_experts, tiled_experts

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=4, sliding_window=8)),  # interleaved, transposed, with biases
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=12)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
}


def made(architecture: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[architecture]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def gradients(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=ids).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tile", [1, 7, 64])
@pytest.mark.parametrize("architecture", MODELS)
def test_values_and_every_gradient_are_those_of_the_stock_module(architecture: str, tile: int):
    stock = made(architecture)
    ours = copy.deepcopy(stock)
    assert tile_experts(ours, tile) == 2
    ids = torch.randint(1, 40, (2, 17), generator=torch.Generator().manual_seed(1))
    (expected, slopes), (got, ours_slopes) = gradients(stock, ids), gradients(ours, ids)
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()
    for name, slope in slopes.items():
        assert slope is not None and (ours_slopes[name] - slope).abs().max() <= 1e-12 * max(1.0, float(slope.abs().max())), name


def test_frozen_experts_get_no_gradient_and_change_no_other():
    free, frozen = made("gpt_oss"), made("gpt_oss")
    for model in (free, frozen):
        tile_experts(model, 8)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    ids = torch.randint(1, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    (_, everything), (_, rest) = gradients(free, ids), gradients(frozen, ids)
    for name, slope in rest.items():
        assert slope is None if ".experts." in name else torch.equal(slope, everything[name]), name


def kept_bytes(run: Any) -> int:
    """Bytes that autograd keeps for the backward pass of `run()`, each storage once, parameters not counted."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and not isinstance(x._base, nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    assert out.requires_grad
    return sum(kept.values())


def largest_tensor(run: Any) -> int:
    """Elements of the largest floating-point tensor that any operation of `run()` makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor) and x.is_floating_point())
            return out

    with Watch():
        run()
    return max(sizes)


def test_nothing_but_the_inputs_is_kept_and_nothing_wider_than_a_tile_is_made():
    module = made("gpt_oss").model.layers[0].mlp.experts
    for parameter in module.parameters():
        parameter.requires_grad_(False)

    def run(tokens: int) -> Tensor:
        x = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
        chosen = torch.stack([torch.arange(tokens) % 4, (torch.arange(tokens) + 1) % 4], 1)
        weights = torch.rand(tokens, 2, dtype=torch.float64)
        return tiled_experts(module, x, chosen, weights, tile=32)

    for tokens in (256, 1024):
        inputs = 8 * tokens * (16 + 2 + 2)
        assert kept_bytes(lambda n=tokens: run(n)) == inputs
        assert largest_tensor(lambda n=tokens: run(n).sum().backward()) == tokens * 16  # the output itself: gate and up of all would be 48 a token


def test_a_token_that_is_repeated_counts_as_often_as_it_stands_there():
    module = made("mixtral").model.layers[0].mlp.experts
    x = torch.randn(1, 16, dtype=torch.float64)
    chosen, weights = torch.tensor([[2, 0]]), torch.tensor([[0.25, 0.5]], dtype=torch.float64)
    one = tiled_experts(module, x, chosen, weights)
    many = tiled_experts(module, x.expand(5, -1), chosen.expand(5, -1), weights.expand(5, -1), tile=2)
    assert torch.allclose(many, one.expand(5, -1), atol=1e-14)


def test_no_tokens_give_no_rows():
    module = made("gpt_oss").model.layers[0].mlp.experts
    x = torch.empty(0, 16, dtype=torch.float64, requires_grad=True)
    out = tiled_experts(module, x, torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2, dtype=torch.float64))
    out.sum().backward()
    assert out.shape == (0, 16) and x.grad is not None


def test_low_precision_is_no_worse_than_the_stock_module():
    exact = made("gpt_oss").model.layers[0].mlp.experts
    rough = copy.deepcopy(exact).bfloat16()
    x = torch.randn(200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen = torch.randint(0, 4, (200, 1), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    chosen[:, 1] = (chosen[:, 0] + 1) % 4
    weights = torch.rand(200, 2, dtype=torch.float64)
    exact = copy.deepcopy(rough).double()
    x, weights = x.bfloat16().double(), weights.bfloat16().double()
    truth = exact(x, chosen, weights)
    errors = [(f(x.bfloat16(), chosen, weights.bfloat16()).double() - truth).norm() for f in (rough, lambda *a: tiled_experts(rough, *a, tile=64))]
    assert errors[1] <= 1.05 * errors[0]


def test_a_dense_model_has_no_mixtures_to_tile():
    llama = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SHAPE.items() if k != "num_experts_per_tok"}))
    assert tile_experts(llama) == 0


def test_what_tiles_cannot_compute_is_refused():
    with pytest.raises(ValueError, match="tile must be at least 1"):
        tile_experts(made("mixtral"), 0)
    model = made("mixtral")
    model.model.layers[1].mlp.experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="norm after each expert"):
        tile_experts(model)
    model = made("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = nn.Identity()
    with pytest.raises(ValueError, match="no stacked matrices"):
        tile_experts(model)
