"""The reference: a dense softmax with the sink as one more column, which is then dropped. O(T²) memory, any device and dtype, autograd throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem, full_precision, statistics_dtype
from savepoint.attention.sinks import over_rows


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`; the arithmetic is fp32 (f64 for f64) whatever the inputs."""
    dtype = statistics_dtype(q.dtype)
    rows = None if sinks is None else over_rows(sinks, q.shape[0], q.shape[2], dtype)
    with full_precision(q.device):
        parts = []
        for start, stop, first_key, offset in problem.documents:
            part_k, part_v = k[:, :, first_key : stop + offset].to(dtype), v[:, :, first_key : stop + offset].to(dtype)
            position = torch.arange(start + offset - first_key, stop + offset - first_key, device=q.device)[:, None]
            part_q = q[:, :, start:stop].to(dtype)
            parts.append(_dense(part_q, part_k, part_v, None if rows is None else rows[:, :, start:stop], position, problem))
    out, lse = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
    return out.to(q.dtype), lse.detach()


def _dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, position: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    key = torch.arange(k.shape[2], device=q.device)
    hidden = key > position
    if problem.window is not None:
        hidden = hidden | (key <= position - problem.window)
    scores = (q @ k.repeat_interleave(groups, 1).mT * problem.scale).masked_fill(hidden, -torch.inf)
    logits = scores if sinks is None else torch.cat([scores, sinks.unsqueeze(-1)], -1)
    return logits.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(groups, 1), logits.detach().logsumexp(-1)


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    return device.absent


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    return missing(call.device)
