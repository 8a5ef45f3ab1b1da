"""Log-probabilities from hidden states, a block of rows at a time: the [N, V] logits of a language model never exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = {"cpu": 16 << 20}
"""Logits of one block; larger where a kernel launch costs more than the memory."""
SLICE_BYTES = 64 << 20
"""Of a head in half precision so much is widened at a time: all of gpt-oss's would be 2.3 GB."""
BLOCK_BYTES_ELSEWHERE = 128 << 20


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0, chunk: int | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z / temperature) at the labels and, where asked, the entropy -sum p log p of that distribution; z = hidden weight^T + bias.

    hidden [N, H], weight [V, H], labels [N] int64 in [0, V), bias [V] -> ([N], [N] | None), float32 (float64 for float64). Row i predicts
    labels[i]: the caller shifts, and selects the rows that are trained. Both are differentiable once, in hidden, weight and bias; the
    backward pass makes each block's logits again. A bias of -inf takes a token out. `chunk` is in rows; None: as many as fit
    16 MiB on the CPU. ValueError for shapes that do not fit, a label outside [0, V), temperature or chunk <= 0.
    """
    _check(hidden, weight, labels, bias, temperature, chunk)
    rows = chunk or max(1, BLOCK_BYTES.get(hidden.device.type, BLOCK_BYTES_ELSEWHERE) // (4 * len(weight)))
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, weight, bias, labels, temperature, rows, entropy)
    return logprobs, entropies if entropy else None


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float, chunk: int | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, H] and [V, H]")
    if labels.shape != hidden.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be {hidden.shape[0]} integers, not {labels.dtype} of shape {tuple(labels.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), not {tuple(bias.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: {temperature}")
    if chunk is not None and chunk <= 0:
        raise ValueError(f"chunk must be positive: {chunk}")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < len(weight)):
        raise ValueError(f"labels must lie in [0, {len(weight)}), not in [{int(labels.min())}, {int(labels.max())}]")


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, rows: int, entropy: bool) -> Any:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(labels), dtype=precise)
        entropies = hidden.new_empty(len(labels) if entropy else 0, dtype=precise)
        normaliser = torch.empty_like(logprobs)
        for span, z in _blocks(hidden, weight, bias, temperature, rows, precise):
            normaliser[span] = z.logsumexp(-1)
            logprobs[span] = z.gather(1, labels[span, None])[:, 0] - normaliser[span]
            if entropy:
                p = (z - normaliser[span, None]).exp()
                # p log p with p = 0 is 0, also where the logit is -inf.
                entropies[span] = normaliser[span] - p.mul_(z.masked_fill_(p == 0, 0)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, normaliser, entropies)
        ctx.temperature, ctx.rows, ctx.entropy = temperature, rows, entropy
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> Any:
        hidden, weight, bias, labels, normaliser, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        precise = normaliser.dtype
        to_hidden = torch.empty_like(hidden) if need_hidden else None
        to_weight = torch.zeros_like(weight, dtype=precise) if need_weight else None
        to_bias = torch.zeros_like(bias, dtype=precise) if need_bias else None
        for span, z in _blocks(hidden, weight, bias, ctx.temperature, ctx.rows, precise):
            log_p = z.sub_(normaliser[span, None])
            p = log_p.exp()
            slope = p * -grad[span, None]
            if ctx.entropy:
                # dH/dz_j = -p_j (log p_j + H)
                surplus = log_p.masked_fill_(p == 0, 0).add_(entropies[span, None])
                slope -= p.mul_(surplus).mul_(grad_entropy[span, None])
            slope.scatter_add_(1, labels[span, None], grad[span, None])
            slope.div_(ctx.temperature)
            if to_hidden is not None:
                to_hidden[span] = sum(slope[:, part] @ matrix for part, matrix in _slices(weight, precise)).to(hidden.dtype)  # type: ignore[union-attr]
            if to_weight is not None:
                to_weight.addmm_(slope.T, hidden[span].to(precise))
            if to_bias is not None:
                to_bias += slope.sum(0)
        as_given = [None if g is None else g.to(like.dtype) for g, like in ((to_weight, weight), (to_bias, bias))]
        return to_hidden, *as_given, None, None, None, None


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, rows: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Spans of rows with their logits / temperature [rows, V], which the caller may overwrite."""
    offset = None if bias is None else bias.detach().to(dtype)
    for at in range(0, len(hidden), rows):
        span = slice(at, at + rows)
        states = hidden[span].detach().to(dtype)
        if weight.dtype == dtype:
            z = torch.nn.functional.linear(states, weight.detach(), offset)
        else:
            z = states.new_empty(len(states), len(weight))
            for part, matrix in _slices(weight.detach(), dtype):
                z[:, part] = torch.nn.functional.linear(states, matrix, None if offset is None else offset[part])
        yield span, z.div_(temperature) if temperature != 1 else z


def _slices(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of the vocabulary with their rows of the head in `dtype`; the whole head where it is of that type."""
    rows = len(weight) if weight.dtype == dtype else max(1, SLICE_BYTES // (dtype.itemsize * weight.shape[1]))
    for at in range(0, len(weight), rows):
        part = slice(at, at + rows)
        yield part, weight[part].to(dtype)
