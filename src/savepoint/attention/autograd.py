"""The differentiable function around a kernel pair: saves q, k, v, out and one lse a row, and no probabilities."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from savepoint.attention.first_order import FirstOrder
from savepoint.attention.problem import Problem, full_precision
from savepoint.attention.sinks import sink_gradient


class KernelPair(Protocol):
    """A backend's forward and backward over whole tensors. `kept`: whatever else the backward wants of the forward, when there will be one (differentiable)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem, differentiable: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...], problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class SinkAttention(torch.autograd.Function):
    """(out, lse) of `pair`, with exact gradients to q, k, v and sinks; lse is a constant."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem, pair: KernelPair) -> tuple[Tensor, Tensor]:
        with full_precision(q.device):
            out, lse, kept = pair.forward(q, k, v, sinks, problem, any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, sinks, out, lse, *kept)
        ctx.mark_non_differentiable(lse)
        ctx.problem, ctx.pair = problem, pair
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        gradients = FirstOrder.apply(_gradients, ctx.problem, ctx.pair, dout, *ctx.saved_tensors)
        return *(gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)), None, None


def _gradients(
    problem: Problem, pair: KernelPair, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *kept: Tensor
) -> tuple[Tensor | None, ...]:
    with full_precision(q.device):
        dq, dk, dv, delta = pair.backward(dout, q, k, v, out, lse, kept, problem)
    return dq, dk, dv, None if sinks is None else sink_gradient(sinks, lse, delta)
