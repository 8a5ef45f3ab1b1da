"""FlashAttention-4 (`flash_attn.cute`), whose kernels know sinks per head, where the package is there. Its sinks are bfloat16; others are refused, not rounded.

dq, dk and dv come from the package, dsinks from the function that all backends share. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem
from savepoint.attention.sinks import TapSinkGradient

WANTED = ("softmax_scale", "causal", "window_size", "learnable_sink", "return_lse")


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    if device.absent or device.kind != "cuda":
        return device.absent or f"needs a CUDA device, not {device.kind}"
    if device.capability is None or device.capability < (9, 0):
        return f"needs compute capability 9.0 or newer, this GPU has {'.'.join(map(str, device.capability or ()))}"
    try:
        package = _package()
    except ImportError as error:
        return f"package flash-attn-4 cannot be imported: {str(error).splitlines()[0]}"
    lacking = [name for name in WANTED if name not in inspect.signature(package.flash_attn_varlen_func).parameters]
    return f"this version of flash-attn-4 has no {', '.join(lacking)}" if lacking else None


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    reason = missing(call.device)
    if reason is not None:
        return reason
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {call.dtype}"
    if call.sinks_per_token:
        return "has sinks per head, not per token"
    if call.sinks not in (None, torch.bfloat16):
        return f"takes sinks in bfloat16, not {call.sinks}"
    if call.head_sizes[0] % 8 or call.head_sizes[1] % 8 or max(call.head_sizes) > 128:
        return f"has head sizes that are multiples of 8 up to 128, not {call.head_sizes}"
    return None if call.scale > 0 else f"needs a positive scale, not {call.scale}"


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`."""
    window = (None, None) if problem.window is None else (problem.window - 1, 0)
    options: dict[str, Any] = {"softmax_scale": problem.scale, "causal": True, "window_size": window, "return_lse": True}
    options["learnable_sink"] = None if sinks is None else sinks.detach()
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
    if problem.cu_seqlens is None:
        out, lse = _package().flash_attn_func(*tokens_first, **options)
    else:
        lengths = {f"cu_seqlens_{side}": problem.cu_seqlens for side in "qk"} | {f"max_seqlen_{side}": problem.longest for side in "qk"}
        out, lse = _package().flash_attn_varlen_func(*(x[0] for x in tokens_first), **lengths, **options)
        out, lse = out[None], lse[None]
    out, lse = out.transpose(1, 2), lse.detach()
    return (out if sinks is None else TapSinkGradient.apply(out, lse, sinks)), lse


def _package() -> ModuleType:
    return importlib.import_module("flash_attn.cute")
