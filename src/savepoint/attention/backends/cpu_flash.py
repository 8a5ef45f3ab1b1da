"""torch's own CPU flash kernel, tile by tile. Exact sinks for less than torch's attention costs without them."""

from __future__ import annotations

import torch
from torch import Tensor

from savepoint.attention import tiles
from savepoint.attention.autograd import SinkAttention
from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem


class FlashTile:
    """One tile. Masks are always handed over: the kernel's own `is_causal` multiplies its -inf by the scale, which breaks for a scale <= 0."""

    equal_head_sizes = True  # the kernel demands them
    query_chunk = 192
    forward_keys: int | None = None  # the output of a tile does not grow with its keys
    backward_keys: int | None = 1024

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`."""
    return SinkAttention.apply(q, k, v, sinks, problem, tiles.Tiled(FlashTile()))


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    return device.absent or (None if device.kind == "cpu" else f"runs on the CPU only, not on {device.kind}")


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    return missing(call.device)
