"""The start-up self-check: is the backend right on this device and dtype, today? Small enough to run before every training run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from savepoint.attention.backends import eager
from savepoint.attention.call import Call
from savepoint.attention.problem import state
from savepoint.attention.select import automatic, choose

TOKENS = 64
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest difference allowed, relative to the largest entry. A dropped term is off by 1e-1 or more."""

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window of 1": {"window": 1},
    "window of 17": {"window": 17},
    "two documents": {"cu_seqlens": (0, 23, TOKENS)},
    "two documents, window of 9": {"cu_seqlens": (0, 23, TOKENS), "window": 9},
}


class SelfCheckFailed(RuntimeError):
    """The backend computes something else than attention with sinks here. `str()` names backend, case and tensor."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was checked and how far it was from f64, for the record of a run. errors: the worst over all cases by tensor, lse in absolute terms."""

    backend: str
    device: str
    dtype: str
    errors: dict[str, float]

    def record(self) -> dict[str, object]:
        """Plain JSON."""
        return asdict(self)


def self_check(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, *, backend: str = "auto", head_size: int = 64) -> SelfCheck:
    """Compare out, lse and the gradients to q, k, v and sinks with f64 eager: 64 tokens, sinks from -8 to 8 and one of -inf, windows, two documents.

    lse is also compared with log-sum-exp by a formula of its own, so that a kernel that speaks of lse in other units is caught. Raises SelfCheckFailed, or
    what `sink_attention` raises for a backend that cannot run here.
    """
    q, k, v, sinks, dout = _inputs(torch.device(device), dtype, head_size)
    name = automatic(Call.of(q, k, v, sinks, state(q, k, v, sinks))) if backend == "auto" else backend
    errors: dict[str, float] = {}
    for case, options in CASES.items():
        bounds = options.get("cu_seqlens")
        window = options.get("window")
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=q.device)
        found = _run(name, [q, k, v, sinks], dout, window, cu_seqlens)
        # the reference sees the same rounded inputs, on the CPU, where f64 always is
        moved = None if cu_seqlens is None else cu_seqlens.cpu()
        expected = _run("eager", [x.detach().cpu().double() for x in (q, k, v, sinks)], dout.cpu().double(), window, moved)
        expected["lse"] = _log_sum_exp(q, k, sinks, bounds or (0, TOKENS), window)
        for tensor, reference in expected.items():
            error = _difference(found[tensor], reference, relative=tensor != "lse")
            if not error <= BOUNDS[dtype]:
                raise SelfCheckFailed(
                    f"attention backend {name!r} is wrong on {device} in {dtype}: {tensor} differs by {error:.1e} (allowed {BOUNDS[dtype]:.0e}), {case}"
                )
            errors[tensor] = max(error, errors.get(tensor, 0.0))
    return SelfCheck(name, str(q.device), str(dtype).removeprefix("torch."), errors)


def _inputs(device: torch.device, dtype: torch.dtype, head_size: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    heads, kv_heads = 8, 2
    shapes = [(1, heads, TOKENS, head_size), (1, kv_heads, TOKENS, head_size), (1, kv_heads, TOKENS, head_size)]
    q, k, v = (torch.randn(*shape, generator=rng) for shape in shapes)
    sinks = torch.tensor([8.0, -8.0, -math.inf, 0.0, 2.0, -2.0, 4.0, 1.0])
    dout = torch.randn(shapes[0], generator=rng)
    return [*(x.to(device=device, dtype=dtype).requires_grad_() for x in (q, k, v, sinks)), dout.to(device=device, dtype=dtype)]


def _run(name: str, inputs: list[Tensor], dout: Tensor, window: int | None, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, sinks = leaves
    problem = state(q, k, v, sinks, window=window, cu_seqlens=cu_seqlens)
    module = eager if name == "eager" else choose(name, Call.of(q, k, v, sinks, problem))
    out, lse = module.attend(q, k, v, sinks, problem)
    dq, dk, dv, dsinks = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}


def _log_sum_exp(q: Tensor, k: Tensor, sinks: Tensor, bounds: tuple[int, ...], window: int | None) -> Tensor:
    """[1, H, T] in f64 by the definition, one token at a time."""
    q, k, sinks = (x.detach().cpu().double() for x in (q, k, sinks))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    columns = []
    for i in range(TOKENS):
        first = max(max(b for b in bounds if b <= i), 0 if window is None else i - window + 1)
        scores = torch.einsum("hd,hjd->hj", q[0, :, i], k[0, :, first : i + 1]) * q.shape[3] ** -0.5
        columns.append(torch.cat([scores, sinks[:, None]], 1).logsumexp(1))
    return torch.stack(columns, 1)[None]


def _difference(found: Tensor, reference: Tensor, *, relative: bool) -> float:
    difference = float((found.detach().cpu().double() - reference).abs().max())
    return difference / float(reference.abs().max()) if relative else difference
