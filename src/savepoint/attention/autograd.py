"""The differentiable function around a kernel pair: saves q, k, v, out and one lse a row, and no probabilities."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from savepoint.attention.problem import Problem, full_precision
from savepoint.attention.sinks import refuse_second_derivative, sink_gradient


class KernelPair(Protocol):
    """A backend's forward and backward over whole tensors. `kept`: whatever else the backward wants of the forward."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...], problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class SinkAttention(torch.autograd.Function):
    """(out, lse) of `pair`, with exact gradients to q, k, v and sinks; lse is a constant."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem, pair: KernelPair) -> tuple[Tensor, Tensor]:
        with full_precision(q.device):
            out, lse, kept = pair.forward(q, k, v, sinks, problem)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *kept)
        ctx.mark_non_differentiable(lse)
        ctx.problem, ctx.pair = problem, pair
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        gradients = SinkAttentionBackward.apply(dout, *ctx.saved_tensors, ctx.problem, ctx.pair)
        return *(gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)), None, None


class SinkAttentionBackward(torch.autograd.Function):
    """The gradients, as a function of their own, so that differentiating them is an error and not a silent zero."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Any, ...]:
        *kept, problem, pair = rest
        with full_precision(q.device):
            dq, dk, dv, delta = pair.backward(dout, q, k, v, out, lse, tuple(kept), problem)
        return dq, dk, dv, sink_gradient(sinks, lse, delta)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()
