"""FlexAttention with renormalisation in fp32. CUDA through `torch.compile`; on the CPU forward only, as torch has no backward there.

The block mask is worked out from the documents and the window, T/128 x T/128 entries; torch's own `create_block_mask` would build it from a [T, T] one.
Not yet run on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem, full_precision
from savepoint.attention.sinks import Renormalise

BLOCK = 128
CPU_QUERIES = 256  # torch's CPU path makes a dense score matrix: of so many rows at a time
SMALLEST_HEAD = 16


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    return device.absent or (None if device.kind in ("cpu", "cuda") else f"needs a CUDA device (or the CPU, without gradients), not {device.kind}")


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    reason = missing(call.device)
    if reason is not None or call.device.kind == "cpu":
        return reason or ("FlexAttention has no backward on the CPU: inference only" if call.gradient else None)
    if call.dtype == torch.float64:
        return "computes in float32, bfloat16 or float16 on CUDA, not torch.float64"
    if call.dtype == torch.bfloat16 and (call.device.capability or (0, 0)) < (8, 0):
        return "bfloat16 needs compute capability 8.0 or newer"
    if min(call.head_sizes) < SMALLEST_HEAD:
        return f"has head sizes from {SMALLEST_HEAD}, not {min(call.head_sizes)}"
    group = call.heads[0] // call.heads[1]
    return None if group & (group - 1) == 0 else f"needs a power of two as the number of query heads a KV head, not {group}"


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`."""
    first = first_keys(problem, q.device)
    with full_precision(q.device):
        out, lse = _on_cpu(q, k, v, first, problem) if q.device.type == "cpu" else _flex(_compiled(), q, k, v, first, problem.keys - problem.queries, problem)
    return (out, lse.detach()) if sinks is None else Renormalise.apply(out, lse, sinks)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _flex(flex: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, first: Tensor, offset: int, problem: Problem) -> tuple[Tensor, Tensor]:
    mask = block_mask(first, offset, k.shape[2])
    out, aux = flex(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, first: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    q, k, v = q.detach(), k.detach(), v.detach()
    parts = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention.*torch.compile.*")
        for start in range(0, problem.queries, CPU_QUERIES):
            stop = min(start + CPU_QUERIES, problem.queries)
            offset = problem.keys - problem.queries + start
            seen = slice(0, offset + stop - start)
            parts.append(_flex(flex_attention, q[:, :, start:stop], k[:, :, seen], v[:, :, seen], first[start:stop], offset, problem))
    out, lse = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
    return out, lse


def first_keys(problem: Problem, device: torch.device) -> Tensor:
    """[Tq] int64: the lowest key that each query sees, by its document and its window. It sees all keys from there to its own position."""
    starts = torch.zeros(problem.queries, dtype=torch.int64, device=device)
    for document in problem.documents:
        starts[document.start : document.stop] = document.first_key
    if problem.window is None:
        return starts
    position = torch.arange(problem.keys - problem.queries, problem.keys, device=device)
    return torch.maximum(starts, position - problem.window + 1)


def block_mask(first: Tensor, offset: int, keys: int) -> BlockMask:
    """Of queries at positions offset, offset + 1, ... that see keys `first[i]` to their own. No mask is applied in blocks that all see wholly."""
    queries, device = first.shape[0], first.device
    begin = torch.arange(0, queries, BLOCK, device=device)
    end = (begin + BLOCK).clamp_max(queries) - 1
    block = torch.arange(0, keys, BLOCK, device=device)
    # `first` never falls, so the first query of a block has the lowest of them and the last one the highest
    touched = (block <= (end + offset)[:, None]) & (block + BLOCK > first[begin][:, None])
    full = (block + BLOCK - 1 <= (begin + offset)[:, None]) & (block >= first[end][:, None]) & (begin + BLOCK <= queries)[:, None]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= first[i]) & (j <= i + offset)

    return BlockMask.from_kv_blocks(*_listed(touched & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(queries, keys))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[query blocks, key blocks] bool -> how many are chosen in each row, and their indices first."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
