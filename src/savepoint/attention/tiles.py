"""Attention in tiles: the same walk for any kernel that can do one tile (backends `cpu_flash` and `block`).

The query heads that share a KV head become rows of one block, so K and V are never repeated, and queries go in chunks. A chunk sees its keys in at most three
ranges: the lower edge of the window and the diagonal, which need a mask, and the middle, which needs none. The ranges' results are joined by their lse.
Backward hands the kernel the *final* (out, lse), sink included: it rebuilds P = exp(s - lse) and δ = <dout, out> from them, and those are the ones of the
softmax with the sink, so dq, dk and dv come out exact (docs/attention.md has the proof).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from savepoint.attention.problem import Problem, group, statistics_dtype
from savepoint.attention.sinks import over_rows, with_sinks

NARROWEST, WIDEST = 128, 512  # queries of a chunk in a windowed layer: about as many as the window, so that few pairs of a tile are masked
NARROW = 4  # a window of up to so many chunks is one masked range: fewer calls win over the work in the masked corners


class Kernel(Protocol):
    """One tile. q: [B, Hkv, rows, D], k: [B, Hkv, keys, D], v: [B, Hkv, keys, Dv], mask: additive [1, 1, rows, keys] or None; every row sees a key.

    query_chunk: queries of a chunk. forward_keys, backward_keys: most keys of a range without a mask (None: any number), which bounds what a tile allocates.
    """

    equal_head_sizes: bool
    query_chunk: int
    forward_keys: int | None
    backward_keys: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Keys(NamedTuple):
    """A range of keys; `masked` when not every query of the chunk sees all of it. Every query sees at least one."""

    start: int
    stop: int
    masked: bool


class Chunk(NamedTuple):
    """Queries `start:stop` at positions `start + offset ...`, and the ranges of keys that they see."""

    start: int
    stop: int
    offset: int
    keys: list[Keys]


def chunks(problem: Problem, query_chunk: int, key_chunk: int | None) -> Iterator[Chunk]:
    """The walk: every query once, every visible (query, key) pair in exactly one range."""
    width = query_chunk if problem.window is None else min(max(problem.window, NARROWEST), WIDEST)
    for document in problem.documents:
        for start in range(document.start, document.stop, width):
            stop = min(start + width, document.stop)
            first, last = start + document.offset, stop + document.offset
            yield Chunk(start, stop, document.offset, list(visible(document.first_key, first, last, problem.window, width, key_chunk)))


def visible(first_key: int, first: int, last: int, window: int | None, width: int, key_chunk: int | None) -> Iterator[Keys]:
    """Ranges of keys for the queries at positions first .. last-1 of a document whose keys begin at `first_key`."""
    low = first_key if window is None else max(first_key, first - window + 1)
    if last - first == 1:
        yield from _split(low, last, key_chunk)
    elif window is None or last - window <= first_key:  # no query of the chunk has lost a key to the window
        yield from _split(first_key, first, key_chunk)
        yield Keys(first, last, True)
    elif window <= NARROW * width:
        yield Keys(low, last, True)
    else:
        edge = last - window + 1  # the first key that every query sees; the edge holds it too, since the last query must see something there
        yield Keys(low, edge, True)
        yield from _split(edge, first, key_chunk)
        yield Keys(first, last, True)


def _split(start: int, stop: int, size: int | None) -> Iterator[Keys]:
    for begin in range(start, stop, size or max(stop - start, 1)):
        yield Keys(begin, min(begin + size, stop) if size else stop, False)


class Masks:
    """Additive masks of one call: few differ, since only the distance between queries and keys matters."""

    def __init__(self, window: int | None, repeats: int, like: Tensor) -> None:
        self.window, self.repeats, self.like = window, repeats, like
        self._made: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, chunk: Chunk, keys: Keys) -> Tensor | None:
        """[1, 1, repeats * queries, keys]: 0 where seen, -inf elsewhere."""
        if not keys.masked:
            return None
        shape = (chunk.stop - chunk.start, keys.stop - keys.start, chunk.start + chunk.offset - keys.start)
        if shape not in self._made:
            self._made[shape] = self._make(*shape)
        return self._made[shape]

    def _make(self, queries: int, keys: int, ahead: int) -> Tensor:
        device = self.like.device
        position = torch.arange(ahead, ahead + queries, device=device)[:, None]
        key = torch.arange(keys, device=device)[None]
        hidden = key > position
        if self.window is not None:
            hidden |= key <= position - self.window
        mask = torch.zeros(hidden.shape, dtype=self.like.dtype, device=device).masked_fill_(hidden, -math.inf)
        return mask.repeat(self.repeats, 1)[None, None]


def _rows(whole: Tensor, chunk: Chunk, dtype: torch.dtype, size: int = 0) -> Tensor:
    """[B, Hkv, G, T, ...] -> [B, Hkv, G * queries, ...] of one chunk, the last dimension filled up with zeros to `size`."""
    part = whole[:, :, :, chunk.start : chunk.stop]
    return _padded(part.reshape(*part.shape[:2], -1, *part.shape[4:]).to(dtype), size)


def _put(whole: Tensor, rows: Tensor, chunk: Chunk) -> None:
    """The way back: rows [B, Hkv, G * queries, ...] into [B, Hkv, G, T, ...]."""
    whole[:, :, :, chunk.start : chunk.stop] = rows.unflatten(2, (whole.shape[2], -1))


def _padded(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, size - x.shape[-1])) if size > x.shape[-1] else x


def _prepared(k: Tensor, v: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, int]:
    """K and V as the kernel wants them, and the head size that queries and outputs are filled up to (0: as they are).

    Half precision is computed in fp32: there the CPU's own half kernels round at every tile, and are slower.
    """
    size = max(k.shape[-1], v.shape[-1]) if kernel.equal_head_sizes else 0
    dtype = statistics_dtype(k.dtype)
    k, v = (_padded(x.to(dtype), size) for x in (k, v))
    return last_contiguous(k), last_contiguous(v), size


def last_contiguous(x: Tensor) -> Tensor:
    """What kernels ask of strides: the last one is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the union of disjoint ranges of keys."""
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        both = torch.logaddexp(lse, other_lse)
        out = out.mul_(torch.exp(lse - both).unsqueeze(-1)).add_(other.mul_(torch.exp(other_lse - both).unsqueeze(-1)))
        lse = both
    return out, lse


class Tiled:
    """A tile kernel as a kernel pair over whole tensors (see `autograd.KernelPair`)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem, differentiable: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, lse, and for half precision what rounding took off out: δ = <dout, out> sums many terms of both signs, and wants it back."""
        kv_heads, dtype = k.shape[1], statistics_dtype(q.dtype)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        rest = torch.empty_like(out) if differentiable and q.dtype != dtype else None
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        whole_q, whole_lse = group(q, kv_heads), group(lse, kv_heads)
        whole_sinks = None if sinks is None else group(over_rows(sinks, q.shape[0], q.shape[2], dtype), kv_heads)
        k, v, size = _prepared(k, v, self.kernel)
        masks = Masks(problem.window, whole_q.shape[2], k)
        for chunk in chunks(problem, self.kernel.query_chunk, self.kernel.forward_keys):
            queries = _rows(whole_q, chunk, dtype, size)
            parts = []
            for keys in chunk.keys:
                span = slice(keys.start, keys.stop)
                parts.append(self.kernel.forward(queries, k[:, :, span], v[:, :, span], masks(chunk, keys), problem.scale))
            part_out, part_lse = with_sinks(*_joined(parts), None if whole_sinks is None else _rows(whole_sinks, chunk, dtype))
            _put(whole_lse, part_lse, chunk)
            _put(group(out, kv_heads), part_out[..., : out.shape[3]], chunk)
            if rest is not None:
                _put(group(rest, kv_heads), (part_out - part_out.to(out.dtype))[..., : out.shape[3]], chunk)
        return out, lse, () if rest is None else (rest,)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...], problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtypes of q, k, v, and δ [B, Hq, T]. out and lse hold the sinks."""
        kv_heads, dtype = k.shape[1], lse.dtype
        delta, dq = torch.empty_like(lse), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        whole_q, whole_dout, whole_lse, *whole_out = (group(x, kv_heads) for x in (q, dout, lse, out, *kept))
        padded_k, padded_v, size = _prepared(k, v, self.kernel)
        masks = Masks(problem.window, whole_q.shape[2], padded_k)
        for chunk in chunks(problem, self.kernel.query_chunk, self.kernel.backward_keys):
            queries, dout_rows, out_rows, *rest = (_rows(x, chunk, dtype, size) for x in (whole_q, whole_dout, *whole_out))
            out_rows = out_rows + rest[0] if rest else out_rows
            lse_rows = _rows(whole_lse, chunk, dtype)
            _put(group(delta, kv_heads), (dout_rows * out_rows).sum(-1), chunk)
            part_q = torch.zeros_like(queries)
            for keys in chunk.keys:
                span = slice(keys.start, keys.stop)
                tile = padded_k[:, :, span], padded_v[:, :, span], out_rows, lse_rows, masks(chunk, keys), problem.scale
                tile_q, tile_k, tile_v = self.kernel.backward(dout_rows, queries, *tile)
                part_q += tile_q
                dk[:, :, span] += tile_k[..., : k.shape[3]]
                dv[:, :, span] += tile_v[..., : v.shape[3]]
            _put(group(dq, kv_heads), part_q[..., : q.shape[3]], chunk)
        return dq, dk.to(k.dtype), dv.to(v.dtype), delta
