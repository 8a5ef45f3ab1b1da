"""What the attention tests share: random problems, a dense f64 reference that owes nothing to the package, and errors against it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from savepoint.attention import sink_attention

NAMES = ("out", "dq", "dk", "dv", "dsinks")


@dataclass
class Case:
    """Inputs in f64, the gradient that comes in from above, and the options of the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    dout: Tensor
    scale: float | None = None
    window: int | None = None
    cu: list[int] | None = None


def case(
    *, batch: int = 1, heads: int = 4, kv_heads: int = 2, tokens: int = 70, keys: int | None = None, size: int = 8, value_size: int | None = None,
    sinks: str | None = "head", scale: float | None = None, window: int | None = None, cu: list[int] | None = None, seed: int = 0,
) -> Case:  # fmt: skip
    """Random inputs. sinks: "head" (large ones of both signs and a -inf among them), "mild", "token", or None."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    keys, value_size = keys or tokens, value_size or size
    logits = None
    if sinks == "head":
        logits = draw(heads) * 3
        logits[0], logits[-1] = 8.0, -8.0
        if heads > 3:
            logits[1] = -math.inf
    elif sinks == "mild":
        logits = draw(heads)
    elif sinks == "token":
        logits = draw(batch, heads, tokens) * 4
    return Case(
        draw(batch, heads, tokens, size), draw(batch, kv_heads, keys, size), draw(batch, kv_heads, keys, value_size), logits,
        draw(batch, heads, tokens, value_size), scale, window, cu,
    )  # fmt: skip


def seen(tokens: int, keys: int, window: int | None, cu: list[int] | None) -> Tensor:
    """[Tq, Tk] bool, in the words of the contract."""
    p, j = torch.arange(keys - tokens, keys)[:, None], torch.arange(keys)[None]
    document = torch.cat([torch.full((b - a,), d) for d, (a, b) in enumerate(pairwise(cu))]) if cu else torch.zeros(keys, dtype=torch.long)
    visible = (j <= p) & (document[j] == document[p])
    return visible if window is None else visible & (j > p - window)


def reference(c: Case) -> dict[str, Tensor]:
    """out, lse and the gradients by a dense softmax in f64."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (c.q, c.k, c.v, c.sinks)]
    q, k, v, sinks = leaves
    assert q is not None and k is not None and v is not None
    groups, (tokens, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    scale = q.shape[-1] ** -0.5 if c.scale is None else c.scale
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(groups, 1)) * scale
    scores = scores.masked_fill(~seen(tokens, keys, c.window, c.cu), -math.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1) if sinks.ndim == 1 else sinks.unsqueeze(-1)
        scores = torch.cat([scores, column], -1)
    out = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1)[..., :keys], v.repeat_interleave(groups, 1))
    out.backward(c.dout.double())
    result = {"out": out.detach(), "lse": scores.detach().logsumexp(-1)}
    return result | {f"d{name}": x.grad for name, x in zip(("q", "k", "v", "sinks"), leaves, strict=True) if x is not None and x.grad is not None}


def run(c: Case, backend: str, dtype: torch.dtype = torch.float64, *, sinks_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """out, lse and the gradients by `sink_attention`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (c.q, c.k, c.v))
    sinks = None if c.sinks is None else c.sinks.detach().to(sinks_dtype or dtype).requires_grad_()
    cu = None if c.cu is None else torch.tensor(c.cu, dtype=torch.int32)
    out, lse = sink_attention(q, k, v, sinks, scale=c.scale, window=c.window, cu_seqlens=cu, backend=backend)
    out.backward(c.dout.to(dtype))
    result = {"out": out.detach(), "lse": lse}
    return result | {f"d{name}": x.grad for name, x in zip(("q", "k", "v", "sinks"), (q, k, v, sinks), strict=True) if x is not None and x.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest |difference| / max |expected| over all tensors."""
    assert found.keys() == expected.keys()
    return max(error(found[name], expected[name]) for name in expected)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert not found.isnan().any()
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def fp32_error(found: dict[str, Tensor], expected: dict[str, Tensor], c: Case) -> float:
    """Largest L2 error. A sink's gradient is a sum over tokens of terms of both signs: its error is measured against the sum of their sizes."""
    errors = {name: l2(found[name], expected[name]) for name in expected if name != "dsinks"}
    if c.sinks is not None:
        terms = torch.exp(c.sinks[None, :, None] - expected["lse"]) * (c.dout * expected["out"]).sum(-1)
        errors["dsinks"] = float(((found["dsinks"].double() - expected["dsinks"]) / terms.abs().sum((0, 2))).abs().max())
    return max(errors.values())


def l2(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
