"""What a sink does to a softmax that was computed without it, and the sink's own gradient. Every backend's sinks go through these functions.

A sink is the logit of one more key whose value is zero. With (o, l) the output and log-sum-exp without it:
    lse = log(exp(sink) + exp(l)),   out = o · exp(l - lse) = o · sigmoid(l - sink).
It receives probability exp(sink - lse) and, its value being zero, the gradient -exp(sink - lse) · <dout, out>.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

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


def sink_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """-Σ exp(sink - lse)·δ over what a sink is shared by, in the sinks' shape and dtype. lse (with the sink), delta = <dout, out>: [B, H, T]."""
    if sinks is None:
        return None
    rows = over_rows(sinks, lse.shape[0], lse.shape[2], lse.dtype)
    per_token = torch.exp(rows - lse).mul_(delta).neg_()
    return (per_token.sum((0, 2)) if sinks.ndim == 1 else per_token).to(sinks.dtype)


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """<left, right> over the last dimension, [B, H, T, D] -> [B, H, T] in fp32 (f64 for f64), a few tokens at a time: no upcast copy of either."""
    dtype = statistics_dtype(left.dtype)
    result = torch.empty(left.shape[:-1], dtype=dtype, device=left.device)
    step = max(1, ROWS_BYTES * left.shape[2] // (left.numel() * dtype.itemsize))
    for start in range(0, left.shape[2], step):
        part = slice(start, start + step)
        result[:, :, part] = (left[:, :, part].to(dtype) * right[:, :, part].to(dtype)).sum(-1)
    return result


def refuse_second_derivative() -> NoReturn:
    """What the backward of a backward does: an error where a silent zero would be wrong."""
    raise RuntimeError("sink_attention cannot be differentiated twice; backend 'eager' can")
