"""Mixtures of experts a tile of tokens at a time: what the experts make in between does not grow with the sequence.

One function for every transformers model whose experts are stacked matrices (gpt_oss, qwen3_moe, mixtral, mimo_v2_flash, flint,
granitemoe_swa and others). The forward pass keeps its inputs and nothing else; the backward pass makes each expert's activations again,
for the tokens of one tile, and adds to one gradient per matrix in place. Plain torch, so the same on CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TILE = 1024
"""Tokens of a tile: enough rows for every expert's products, and little memory beside the weights."""


def tile_experts(model: Any, tile: int = TILE) -> int:
    """Let the mixtures of `model` run over tiles of `tile` tokens from now on; how many mixtures there are (0: the model is dense).

    Values and gradients are those of the model's own arithmetic, up to rounding. ValueError for tile < 1, and for a model whose experts
    cannot be run so (a norm after each expert, or experts that are no stacked matrices).
    """
    if tile < 1:
        raise ValueError(f"tile must be at least 1 token, not {tile}")
    found = [module for module in model.modules() if _is_experts(module)]
    if not found:
        if getattr(model.config, "num_local_experts", None) or getattr(model.config, "num_experts", None):
            raise ValueError(f"experts: those of a {model.config.model_type!r} model are no stacked matrices that transformers lets others run")
        return 0
    for module in found:
        if module.has_post_expert_norm:
            raise ValueError(f"experts: {type(module).__name__} has a norm after each expert, which tiles do not compute")
    model.set_experts_implementation(_register(tile))
    return len(found)


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("_apply_gate", "has_gate", "is_transposed", "has_post_expert_norm", "down_proj"))


def _register(tile: int) -> str:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = f"savepoint_tiles_{tile}"

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return tiled_experts(module, hidden_states, top_k_index, top_k_weights, tile=tile)

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    return name


def tiled_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, *, tile: int = TILE) -> Tensor:
    """sum_k weights[n, k] * expert_{chosen[n, k]}(hidden[n]), `tile` rows at a time: [N, H] in the type of `hidden`.

    module: a transformers experts module. hidden [N, H]; chosen [N, K] int64, distinct in a row; weights [N, K]. Differentiable once, in
    hidden, weights and the matrices of the module. Sums are float32 at least.
    """
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if module.has_gate else ("up_proj", "up_proj_bias")
    biases = [getattr(module, name) if module.has_bias else None for name in (up_bias, "down_proj_bias")]
    return _Tiled.apply(_Kind.of(module), tile, hidden, chosen, weights, getattr(module, up), biases[0], module.down_proj, biases[1])


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a module's experts are laid out and what stands between their two products."""

    module: Any
    gated: bool
    transposed: bool
    count: int

    @classmethod
    def of(cls, module: Any) -> _Kind:
        return cls(module, module.has_gate, module.is_transposed, module.num_experts)

    def between(self, z: Tensor) -> Tensor:
        return self.module._apply_gate(z) if self.gated else self.module.act_fn(z)

    def matrix(self, stacked: Tensor, expert: int) -> Tensor:
        """[in, out] of one expert."""
        return stacked[expert] if self.transposed else stacked[expert].T

    def add(self, total: Tensor, expert: int, x: Tensor, slope: Tensor) -> None:
        """total[expert] += d(x W)/dW for the slope of the product."""
        pair = (x, slope) if self.transposed else (slope, x)
        total[expert].addmm_(pair[0].T.to(total.dtype), pair[1].to(total.dtype))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: _Kind, tile: int, hidden: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(hidden)
        for span, groups in _tiles(chosen, kind.count, tile):
            x, share = hidden[span], weights[span]
            total = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
            for expert, rows, slots in groups:
                made = _linear(kind.between(_linear(x[rows], kind.matrix(up, expert), up_bias, expert)), kind.matrix(down, expert), down_bias, expert)
                # Within one expert every row is another token, so that the sum has one order on every device.
                total.index_add_(0, rows, (made * share[rows, slots, None]).to(total.dtype))
            out[span] = total.to(out.dtype)
        ctx.save_for_backward(hidden, chosen, weights, up, up_bias, down, down_bias)
        ctx.kind, ctx.tile = kind, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, chosen, weights, up, up_bias, down, down_bias = ctx.saved_tensors
        kind: _Kind = ctx.kind
        precise = torch.promote_types(hidden.dtype, torch.float32)
        wanted = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if wanted[2] else None
        to_weights = torch.zeros_like(weights) if wanted[4] else None
        totals = [torch.zeros_like(p, dtype=precise) if p is not None and wanted[i] else None for i, p in enumerate((up, up_bias, down, down_bias), 5)]
        for span, groups in _tiles(chosen, kind.count, ctx.tile):
            x, share, slope = hidden[span], weights[span], grad[span]
            to_x = x.new_zeros(x.shape, dtype=precise) if to_hidden is not None else None
            for expert, rows, slots in groups:
                inputs = x[rows]
                with torch.enable_grad():
                    before = _linear(inputs, kind.matrix(up, expert), up_bias, expert).detach().requires_grad_()
                    active = kind.between(before)
                made = active.detach()
                scaled = slope[rows] * share[rows, slots, None]
                if to_weights is not None:
                    to_weights[span][rows, slots] = (slope[rows] * _linear(made, kind.matrix(down, expert), down_bias, expert)).sum(-1).to(weights.dtype)
                (inner,) = torch.autograd.grad(active, before, scaled @ kind.matrix(down, expert).T)
                _add(kind, totals[:2], expert, inputs, inner)
                _add(kind, totals[2:], expert, made, scaled)
                if to_x is not None:
                    to_x.index_add_(0, rows, (inner @ kind.matrix(up, expert).T).to(precise))
            if to_hidden is not None and to_x is not None:
                to_hidden[span] = to_x.to(hidden.dtype)
        matrices = [None if t is None else t.to(p.dtype) for t, p in zip(totals, (up, up_bias, down, down_bias), strict=True)]
        return None, None, to_hidden, None, to_weights, *matrices


def _add(kind: _Kind, totals: list[Tensor | None], expert: int, x: Tensor, slope: Tensor) -> None:
    matrix, bias = totals
    if matrix is not None:
        kind.add(matrix, expert, x, slope)
    if bias is not None:
        bias[expert] += slope.sum(0, dtype=bias.dtype)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return x @ matrix if bias is None else torch.addmm(bias[expert], x, matrix)


def _tiles(chosen: Tensor, count: int, tile: int) -> Iterator[tuple[slice, list[tuple[int, Tensor, Tensor]]]]:
    """Spans of tokens, each with (expert, rows in the span, which of a row's choices it was) for every expert that somebody chose."""
    for at in range(0, len(chosen), tile):
        span = slice(at, at + tile)
        flat = chosen[span].flatten()
        order = flat.argsort(stable=True)
        sizes = torch.bincount(flat, minlength=count).tolist()
        rows, slots = order.div(chosen.shape[1], rounding_mode="floor"), order.remainder(chosen.shape[1])
        starts = [sum(sizes[:expert]) for expert in range(count)]
        yield span, [(e, rows[s : s + n], slots[s : s + n]) for e, (s, n) in enumerate(zip(starts, sizes, strict=False)) if n]
