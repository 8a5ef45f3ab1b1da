"""torch's own CUDA flash kernels, which know no sinks: packed, windowed, cached and with exact sinks, and nothing to install.

The forward's (out, lse) is renormalised with the sinks; the stock backward is handed that (out, lse), from which it rebuilds the probabilities and δ of the
softmax with the sinks (docs/attention.md has the proof). Not yet run on a GPU: `savepoint.attention.self_check` is what says whether it is right on yours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from savepoint.attention.autograd import SinkAttention
from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem
from savepoint.attention.sinks import over_rows, row_dot, scale_rows_

LARGEST_HEAD = 256
"""Of the kernel; and it wants a multiple of 8, up to which heads are filled with zeros."""


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    if device.absent or device.kind != "cuda":
        return device.absent or f"needs a CUDA device, not {device.kind}"
    if device.capability is None or device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer (bfloat16), this GPU has {'.'.join(map(str, device.capability or ()))}"
    return None if torch.backends.cuda.is_flash_attention_available() else "this build of torch has no flash attention"


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    reason = missing(call.device)
    if reason is not None:
        return reason
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {call.dtype}"
    if max(call.head_sizes) > LARGEST_HEAD:
        return f"has head sizes up to {LARGEST_HEAD}, not {max(call.head_sizes)}"
    return None if call.scale > 0 else f"needs a positive scale, not {call.scale}"


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`."""
    return SinkAttention.apply(q, k, v, sinks, problem, VarlenFlash())


class VarlenFlash:
    """The kernel pair. A batch is a packed row whose documents are equally long, so that there is one path through the kernels."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem, differentiable: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        size = kernel_head_size(q, v)
        bounds = boundaries(problem, q)
        packed = (packed_rows(x, size) for x in (q, k, v))
        packed_out, packed_lse, rng_state, unused, _ = _forward_kernel(
            *packed, *bounds, *longest(problem), 0.0, True, False, scale=problem.scale, **window_sizes(problem)
        )
        out = unpacked_rows(packed_out, q.shape[0])[..., : v.shape[3]]
        lse = unpacked_lse(packed_lse, q)
        if sinks is not None:
            rows = over_rows(sinks, q.shape[0], q.shape[2], lse.dtype)
            out = scale_rows_(out, torch.sigmoid(lse - rows))
            lse = torch.logaddexp(lse, rows)
        return out, lse, (*bounds, rng_state, unused)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: tuple[Tensor, ...], problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *bounds, rng_state, unused = kept
        size = kernel_head_size(q, v)
        gradients = _backward_kernel(
            *(packed_rows(x, size) for x in (dout, q, k, v, out)), lse.transpose(0, 1).reshape(lse.shape[1], -1).contiguous(),
            *bounds, *longest(problem), 0.0, True, rng_state, unused, scale=problem.scale, **window_sizes(problem),
        )  # fmt: skip
        dq, dk, dv = (unpacked_rows(x, q.shape[0])[..., : like.shape[3]] for x, like in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv, row_dot(dout, out)


def _forward_kernel(*args: object, **options: object) -> tuple[Tensor, ...]:
    return torch.ops.aten._flash_attention_forward(*args, **options)


def _backward_kernel(*args: object, **options: object) -> tuple[Tensor, ...]:
    return torch.ops.aten._flash_attention_backward(*args, **options)


def kernel_head_size(q: Tensor, v: Tensor) -> int:
    """What both head sizes are filled up to: the kernel wants them equal, and a multiple of 8."""
    return (max(q.shape[3], v.shape[3]) + 7) // 8 * 8


def packed_rows(x: Tensor, size: int) -> Tensor:
    """[B, H, T, D] -> [B·T, H, size], the layout of transformers' projections: a view when x is their transpose."""
    rows = x.transpose(1, 2).flatten(0, 1)
    rows = torch.nn.functional.pad(rows, (0, size - rows.shape[-1])) if size > rows.shape[-1] else rows
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def unpacked_rows(x: Tensor, batch: int) -> Tensor:
    """[B·T, H, D] -> a view [B, H, T, D]."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def unpacked_lse(lse: Tensor, q: Tensor) -> Tensor:
    """The kernel's [Hq, B·Tq] -> [B, Hq, Tq]; another layout is refused, not guessed at."""
    if tuple(lse.shape) != (q.shape[1], q.shape[0] * q.shape[2]):
        raise RuntimeError(f"backend 'aten_flash' expects lse as [heads, tokens] of the kernel; torch {torch.__version__} returns {list(lse.shape)}")
    return lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)


def boundaries(problem: Problem, q: Tensor) -> tuple[Tensor, Tensor]:
    """(of queries, of keys), int32: those of the documents, or of the rows of the batch."""
    if problem.cu_seqlens is not None:
        return problem.cu_seqlens, problem.cu_seqlens
    rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return rows * problem.queries, rows * problem.keys


def longest(problem: Problem) -> tuple[int, int]:
    """(queries, keys) of the longest row or document."""
    return (problem.queries, problem.keys) if problem.boundaries is None else (problem.longest, problem.longest)


def window_sizes(problem: Problem) -> dict[str, int]:
    """The kernel counts the keys on either side of the query's own, so a window of W keys is (W - 1, 0)."""
    return {} if problem.window is None else {"window_size_left": problem.window - 1, "window_size_right": 0}
