"""One attention call, checked: what every backend is handed. The refusals of malformed input live here and nowhere else."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Document(NamedTuple):
    """Queries `start:stop`; query i stands at position `i + offset` and sees no key before `first_key`."""

    start: int
    stop: int
    first_key: int
    offset: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed, without the tensors themselves.

    window: None, or less than the number of keys. boundaries: `cu_seqlens` as Python integers, None when the row is one document. `cu_seqlens`: the tensor,
    int32, for kernels that read it on the device.
    """

    scale: float
    window: int | None
    queries: int
    keys: int
    boundaries: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = None

    @property
    def documents(self) -> list[Document]:
        """In order; together they hold every query once."""
        if self.boundaries is None:
            return [Document(0, self.queries, 0, self.keys - self.queries)]
        return [Document(start, stop, start, 0) for start, stop in zip(self.boundaries, self.boundaries[1:], strict=False)]

    @property
    def longest(self) -> int:
        """Keys of the longest document."""
        return self.keys if self.boundaries is None else max(b - a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, lse, renormalisation and δ: fp32, or f64 for f64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast: what the dtypes say is what is computed."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def group(heads: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, ...] -> a view [B, Hkv, Hq / Hkv, ...]: query head h reads key head h // (Hq / Hkv)."""
    return heads.unflatten(1, (kv_heads, heads.shape[1] // kv_heads))


def state(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float | None = None, window: int | None = None, cu_seqlens: Tensor | None = None
) -> Problem:
    """The `Problem`, or a `ValueError` or `TypeError` of one line that names the argument. Reads nothing of q, k, v and sinks but their metadata."""
    _check_types(q, k, v, sinks, cu_seqlens)
    _check_shapes(q, k, v)
    _check_sinks(q, sinks)
    queries, keys = q.shape[2], k.shape[2]
    width = _checked_window(window)
    return Problem(
        scale=_checked_scale(scale, q.shape[3]),
        window=width if width is not None and width < keys else None,
        queries=queries,
        keys=keys,
        boundaries=None if cu_seqlens is None else _checked_boundaries(cu_seqlens, q, keys),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int32),
    )


def _check_types(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None) -> None:
    given = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks}), **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    for name in ("q", "k", "v"):
        if given[name].dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, not {given[name].dtype}")
        if given[name].dtype != q.dtype:
            raise TypeError(f"q, k and v must share one dtype: {name} is {given[name].dtype}, q is {q.dtype}")
    if sinks is not None and not sinks.is_floating_point():
        raise TypeError(f"sinks must have a float dtype, not {sinks.dtype}")
    if cu_seqlens is not None and (cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool):
        raise TypeError(f"cu_seqlens must be an integer tensor (int32), not {cu_seqlens.dtype}")
    for name, value in given.items():
        if value.device != q.device:
            raise ValueError(f"all tensors must be on one device: {name} is on {value.device}, q is on {q.device}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, tokens, head size], not shape {list(tensor.shape)}")
        if tensor.shape[2] == 0:
            raise ValueError(f"{name} has no tokens: shape {list(tensor.shape)}")
        if 0 in tensor.shape:
            raise ValueError(f"{name} is empty: shape {list(tensor.shape)}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {tensor.shape[0]}, q has {q.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v has {v.shape[1]} heads, k has {k.shape[1]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v has {v.shape[2]} tokens, k has {k.shape[2]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head size {k.shape[3]}, q has {q.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is no multiple of the {k.shape[1]} heads of k")
    if k.shape[2] < q.shape[2]:
        raise ValueError(f"k has {k.shape[2]} tokens, fewer than the {q.shape[2]} of q")


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    per_head, per_token = (q.shape[1],), tuple(q.shape[:3])
    if sinks is not None and tuple(sinks.shape) not in (per_head, per_token):
        raise ValueError(f"sinks must have shape {list(per_head)} (per head) or {list(per_token)} (per token), not {list(sinks.shape)}")


def _checked_scale(scale: float | None, head_size: int) -> float:
    if scale is None:
        return head_size**-0.5
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a number, not {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}")
    return float(scale)


def _checked_window(window: int | None) -> int | None:
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, Integral):
        raise TypeError(f"window must be an integer, not {type(window).__name__}")
    if window <= 0:
        raise ValueError(f"window must be at least 1 (the query's own key), not {window}")
    return int(window)


def _checked_boundaries(cu_seqlens: Tensor, q: Tensor, keys: int) -> tuple[int, ...]:
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must have 1 dimension, not shape {list(cu_seqlens.shape)}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs batch size 1, q has {q.shape[0]}")
    if keys != q.shape[2]:
        raise ValueError(f"cu_seqlens needs as many keys as queries: k has {keys} tokens, q has {q.shape[2]}")
    bounds = tuple(cu_seqlens.tolist())
    if not bounds or bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, not at {bounds[0] if bounds else 'nothing'}")
    for index, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if stop <= start:
            raise ValueError(f"cu_seqlens must be strictly increasing: entry {index + 1} is {stop} after {start}")
    if bounds[-1] != keys:
        raise ValueError(f"cu_seqlens must end at the number of tokens, {keys}, not at {bounds[-1]}")
    return bounds
