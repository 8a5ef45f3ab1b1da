"""What a backend is asked for, as plain facts: choosing a backend is a pure function of them, and testable for devices that are not here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from savepoint.attention.problem import Problem


@dataclass(frozen=True, slots=True)
class Device:
    """kind: "cpu", "cuda", "mps", ...; capability: (major, minor) of a CUDA device, else None; absent: why torch cannot use it, else None."""

    kind: str
    capability: tuple[int, int] | None = None
    absent: str | None = None

    @staticmethod
    def of(device: str | torch.device) -> Device:
        """The facts about a device of this machine."""
        device = torch.device(device)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                return Device("cuda", absent="torch sees no CUDA device")
            return Device("cuda", capability=torch.cuda.get_device_capability(device))
        try:
            torch.empty(0, device=device)
        except Exception as error:  # noqa: BLE001 - each kind of device raises its own
            return Device(device.type, absent=f"torch cannot use device {device}: {str(error).splitlines()[0]}")
        return Device(device.type)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `sink_attention`. head_sizes: (D, Dv); heads: (Hq, Hkv); gradient: an input requires one and gradients are enabled."""

    device: Device
    dtype: torch.dtype
    heads: tuple[int, int]
    head_sizes: tuple[int, int]
    sinks: torch.dtype | None
    sinks_per_token: bool
    scale: float
    window: bool
    packed: bool
    cached: bool
    gradient: bool

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> Call:
        """The facts of these tensors."""
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        return Call(
            device=Device.of(q.device),
            dtype=q.dtype,
            heads=(q.shape[1], k.shape[1]),
            head_sizes=(q.shape[3], v.shape[3]),
            sinks=None if sinks is None else sinks.dtype,
            sinks_per_token=sinks is not None and sinks.ndim == 3,
            scale=problem.scale,
            window=problem.window is not None,
            packed=problem.boundaries is not None,
            cached=problem.keys > problem.queries,
            gradient=torch.is_grad_enabled() and any(x.requires_grad for x in inputs),
        )
