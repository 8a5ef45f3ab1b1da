"""What a sink does to a softmax that was computed without it, and the sink's own gradient. Every backend's sinks go through these functions.

A sink is the logit of one more key whose value is zero. With (o, l) the output and log-sum-exp without it:
    lse = log(exp(sink) + exp(l)),   out = o · exp(l - lse) = o · sigmoid(l - sink).
It receives probability exp(sink - lse) and, its value being zero, the gradient -exp(sink - lse) · <dout, out>.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from savepoint.attention.first_order import FirstOrder
from savepoint.attention.problem import statistics_dtype

ROWS_BYTES = 32 << 20


def over_rows(sinks: Tensor, batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Sinks [H] or [B, H, T] -> a view [B, H, T] in `dtype`."""
    sinks = sinks.to(dtype)
    return sinks[None, :, None].expand(batch, -1, tokens) if sinks.ndim == 1 else sinks


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of the softmax that holds the sink too. out: [..., Dv]; lse, sinks: its leading shape, fp32 or f64. -inf changes nothing."""
    if sinks is None:
        return out, lse
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-Σ exp(sink - lse)·δ over what a sink is shared by, in the sinks' shape and dtype. lse (with the sink), delta = <dout, out>: [B, H, T]."""
    rows = over_rows(sinks, lse.shape[0], lse.shape[2], lse.dtype)
    per_token = torch.exp(rows - lse).mul_(delta).neg_()
    return (per_token.sum((0, 2)) if sinks.ndim == 1 else per_token).to(sinks.dtype)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """<left, right> over the last dimension, [B, H, T, D] -> [B, H, T] in fp32 (f64 for f64), a few tokens at a time: no upcast copy of either."""
    dtype = statistics_dtype(left.dtype)
    result = torch.empty(left.shape[:-1], dtype=dtype, device=left.device)
    for part in _slices(left):
        result[:, :, part] = (left[:, :, part].to(dtype) * right[:, :, part].to(dtype)).sum(-1)
    return result


def _slices(x: Tensor) -> Iterator[slice]:
    """Of the tokens of [B, H, T, D], so that an fp32 copy of one is about `ROWS_BYTES`."""
    step = max(1, ROWS_BYTES * x.shape[2] // (4 * x.numel()))
    for start in range(0, x.shape[2], step):
        yield slice(start, start + step)


def scale_rows_(out: Tensor, factor: Tensor) -> Tensor:
    """out [B, H, T, D] times factor [B, H, T], in place: fp32 arithmetic and one rounding, a few tokens at a time."""
    for part in _slices(out):
        out[:, :, part] = (out[:, :, part].to(factor.dtype) * factor[:, :, part].unsqueeze(-1)).to(out.dtype)
    return out


class Renormalise(torch.autograd.Function):
    """(out, lse) without sinks, both differentiable -> (out, lse) with them: for kernels whose own autograd carries the gradient of lse.

    With δ = <dout, out>: dout₀ = dout·exp(lse₀ - lse) and dlse₀ = δ·exp(sink - lse).
    Dropping dlse₀ leaves out, dv and dsinks exact, and dq and dk wrong by a tenth.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        rows = over_rows(sinks, lse.shape[0], lse.shape[2], lse.dtype)
        share = torch.sigmoid(lse - rows)
        both = torch.logaddexp(lse, rows)
        scaled = scale_rows_(out.clone(), share)
        ctx.save_for_backward(scaled, both, share, sinks)
        ctx.mark_non_differentiable(both)
        return scaled, both

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        return FirstOrder.apply(_renormalise_backward, dout, *ctx.saved_tensors)


def _renormalise_backward(dout: Tensor, out: Tensor, lse: Tensor, share: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    delta = row_dot(dout, out)
    rows = over_rows(sinks, lse.shape[0], lse.shape[2], lse.dtype)
    return scale_rows_(dout.clone(), share), delta * torch.exp(rows - lse), sink_gradient(sinks, lse, delta)


class TapSinkGradient(torch.autograd.Function):
    """out, unchanged; its backward adds the sinks' gradient: for kernels that know sinks in their forward and get dq, dk and dv from (out, lse)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        ctx.save_for_backward(out, lse, sinks)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return FirstOrder.apply(_tapped_backward, dout, *ctx.saved_tensors)


def _tapped_backward(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, None, Tensor]:
    return dout.clone(), None, sink_gradient(sinks, lse, row_dot(dout, out))
