"""torch's own CPU flash kernel, tile by tile. Exact sinks for less than torch's attention costs without them."""

from __future__ import annotations

import torch
from torch import Tensor

from savepoint.attention import tiles
from savepoint.attention.autograd import SinkAttention
from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem, group, statistics_dtype
from savepoint.attention.sinks import over_rows, scale_rows_
from savepoint.attention.tiles import last_contiguous


class FlashTile:
    """One tile. Masks are always handed over: the kernel's own `is_causal` multiplies its -inf by the scale, which breaks for a scale <= 0."""

    equal_head_sizes = True  # the kernel demands them
    query_chunk = 128
    forward_keys: int | None = None  # the output of a tile does not grow with its keys
    backward_keys: int | None = 256  # two gradients of so many keys are all that a tile makes beside its rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale)


class Flash(tiles.Tiled):
    """Tiles, but for the forward of one whole causal row, which the kernel does best by itself: it walks along the diagonal without a mask.

    Query heads share a key head there by a stride of zero. Not so in the backward pass: dk and dv would come out once a query head.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem, differentiable: bool
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        whole = q.shape[0] == 1 and problem.window is None and problem.boundaries is None and problem.queries == problem.keys
        # The kernel multiplies its own -inf by the scale.
        if not (whole and problem.scale > 0 and q.shape[3] == v.shape[3] and q.dtype == statistics_dtype(q.dtype)):
            return super().forward(q, k, v, sinks, problem, differentiable)
        queries = group(q, k.shape[1])[0]  # key heads take the place of the batch: [Hkv, G, T, D]
        keys, values = (last_contiguous(x)[0].unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(last_contiguous(queries), keys, values, 0.0, True, scale=problem.scale)
        out, lse = out.flatten(0, 1)[None], lse.flatten(0, 1)[None]
        if sinks is not None:
            rows = over_rows(sinks, 1, q.shape[2], lse.dtype)
            out, lse = scale_rows_(out, torch.sigmoid(lse - rows)), torch.logaddexp(lse, rows)
        return out, lse, ()


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`."""
    return SinkAttention.apply(q, k, v, sinks, problem, Flash(FlashTile()))


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    return device.absent or (None if device.kind == "cpu" else f"runs on the CPU only, not on {device.kind}")


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    return missing(call.device)
