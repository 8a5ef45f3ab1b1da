"""Attention with learned sinks: the one public function, and which backend it would take."""

from __future__ import annotations

from torch import Tensor

from savepoint.attention.call import Call
from savepoint.attention.problem import state
from savepoint.attention.select import automatic, choose


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention in which each softmax holds one more logit, the sink, whose value is zero: (out, lse), with exact gradients to q, k, v and sinks.

    lse_i = log(exp(sink) + Σ_j exp s_ij) with s_ij = scale·<q_i, k_j>, and out_i = Σ_j exp(s_ij - lse_i) v_j, over the keys that query i sees.

    - q: [B, Hq, Tq, D], k: [B, Hkv, Tk, D], v: [B, Hkv, Tk, Dv], any strides, one dtype of f64, f32, bf16, f16. Query head h reads key head h // (Hq / Hkv).
      out: [B, Hq, Tq, Dv] in q's dtype. lse: [B, Hq, Tq] in fp32 (f64 for f64), a constant: no gradient flows through it.
    - sinks: [Hq], [B, Hq, Tq], or None; not multiplied by `scale` (default D**-0.5). None and -inf mean no sink, and a -inf sink's gradient is exactly 0.
    - Query i stands at position p = Tk - Tq + i (a KV cache when Tk > Tq) and sees keys j <= p; with `window` W also j > p - W: W keys, itself among them.
    - cu_seqlens: int32 [n+1] from 0 to N, strictly increasing, for n documents packed into a row of N tokens (B = 1): nothing passes between them.
    - backend: "auto" (see `resolve_backend`), or one of `backends()`. A named backend never turns into another one.

    Memory is linear in T and, for a fixed window, so is the work (except `eager`). Raises ValueError or TypeError for malformed input, naming the argument,
    and BackendUnavailable (a RuntimeError) for what the named backend cannot do; all of them before any work.
    """
    problem = state(q, k, v, sinks, scale=scale, window=window, cu_seqlens=cu_seqlens)
    return choose(backend, Call.of(q, k, v, sinks, problem)).attend(q, k, v, sinks, problem)


def resolve_backend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, window: int | None = None, cu_seqlens: Tensor | None = None) -> str:
    """The backend that `auto` takes for this call; raises what the call would raise."""
    return automatic(Call.of(q, k, v, sinks, state(q, k, v, sinks, window=window, cu_seqlens=cu_seqlens)))
