"""CUDA kernels' semantics in dense torch, for the CPU: what torch documents for its flash kernels, and a stand-in for the package of FlashAttention-4."""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def visible(queries: int, keys: int, left: int | None) -> Tensor:
    """Causal from the bottom right; `left` keys before the query's own, or all."""
    p, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    return (j <= p) & (j >= p - (keys if left is None else left))


def spans(cum_q: Tensor, cum_k: Tensor) -> list[tuple[slice, slice]]:
    return [(slice(*q), slice(*k)) for q, k in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist()), strict=True)]


def scores_of(q: Tensor, k: Tensor, scale: float, left: int | None) -> Tensor:
    """[H, queries, keys] of one document in [tokens, heads, size]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~visible(len(q), len(k), left), -math.inf)


def check(x: Tensor, cum_q: Tensor, max_q: int) -> None:
    """What the kernels demand of their arguments."""
    assert x.ndim == 3 and x.shape[2] % 8 == 0 and x.stride(-1) == 1
    assert cum_q.dtype == torch.int32 and int(cum_q.diff().max()) == max_q


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten._flash_attention_forward`."""
    for x, cum, longest in ((query, cum_seq_q, max_q), (key, cum_seq_k, max_k), (value, cum_seq_k, max_k)):
        check(x, cum, longest)
    assert query.shape[2] == value.shape[2] and is_causal and not dropout_p and not return_debug_mask
    assert (window_size_left is None) == (window_size_right is None) and not window_size_right
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0], dtype=query.dtype)
    for rows, cols in spans(cum_seq_q, cum_seq_k):
        scores = scores_of(query[rows], key[cols], scale, window_size_left)
        values = value[cols].repeat_interleave(query.shape[1] // value.shape[1], 1)
        out[rows], lse[:, rows] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values), scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.empty(0)


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten._flash_attention_backward`: everything from (out, lse), as the kernel does it."""
    assert rng_state.shape == (2,) and logsumexp.is_contiguous() and logsumexp.shape == (query.shape[1], query.shape[0])
    check(grad_out, cum_seq_q, max_q), check(out, cum_seq_q, max_q)
    groups = query.shape[1] // key.shape[1]
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for rows, cols in spans(cum_seq_q, cum_seq_k):
        p = (scores_of(query[rows], key[cols], scale, window_size_left) - logsumexp[:, rows, None]).exp()
        dp = torch.einsum("ihd,jhd->hij", grad_out[rows], value[cols].repeat_interleave(groups, 1))
        ds = p * (dp - (grad_out[rows] * out[rows]).sum(-1).T[..., None]) * scale
        dq[rows] = torch.einsum("hij,jhd->ihd", ds, key[cols].repeat_interleave(groups, 1))
        dk[cols] = torch.einsum("hij,ihd->jhd", ds, query[rows]).unflatten(1, (-1, groups)).sum(2)
        dv[cols] = torch.einsum("hij,ihd->jhd", p, grad_out[rows]).unflatten(1, (-1, groups)).sum(2)
    return dq, dk, dv


def flash_attention_4() -> ModuleType:
    """A module like `flash_attn.cute`: sinks in the forward, no gradient to them."""
    module = ModuleType("flash_attn.cute")

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[Any, Any] = (None, None), learnable_sink: Tensor | None = None, return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert causal and return_lse and softmax_scale is not None and window_size[1] in (None, 0)
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert learnable_sink is None or (learnable_sink.dtype == torch.bfloat16 and not learnable_sink.requires_grad)
        outs, lses = [], []
        for rows, cols in spans(cu_seqlens_q, cu_seqlens_k):
            scores = scores_of(q[rows], k[cols], softmax_scale, window_size[0])
            if learnable_sink is not None:
                scores = torch.cat([scores, learnable_sink.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], -1)
            values = v[cols].repeat_interleave(q.shape[1] // v.shape[1], 1)
            outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(values)], values))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses, 1)

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        (batch, queries), keys = q.shape[:2], k.shape[1]
        cu_q, cu_k = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (queries, keys))
        out, lse = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, queries, keys, **options)
        return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    return module
