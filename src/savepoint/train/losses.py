"""Policy losses and their aggregation: pure functions over packed tokens.

Token tensors are `[N]`. `mask` [N] bool: True is trained. `segment_ids` [N]: which trajectory a token belongs to, -1 for padding. Whatever stands
where `mask` is False, NaN included, changes neither value nor gradient; a NaN at a trained token comes out. Nothing trained: 0, with
zero gradients. float32 at least. ValueError, one line, for lengths that do not fit, unknown names and values out of range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIMIT = 20.0
"""Log-ratios are clamped to this: exp(20) is beyond any clip, and still far from overflow."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence-mean"},
    "dr_grpo": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant"},
    "dapo": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
    "gspo": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence-mean"},
    "cispo": {"kind": "cispo", "clip_low": None, "clip_high": 4.0, "aggregation": "token-mean"},
    "sapo": {"kind": "sapo", "aggregation": "sequence-mean"},
}
"""Keyword arguments of `policy_loss` by the method's name: arXiv:2402.03300, 2503.20783, 2503.14476, 2507.18071, 2510.13786 (cap 5), 2511.20347."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """What stands at the trained tokens. `ratio` carries the gradient; `clip` is (lowest, highest) ratio."""

    logprobs: Tensor
    ratio: Tensor
    advantages: Tensor
    clip: tuple[float, float]
    dual_clip: float | None
    tau: tuple[float, float]

    def clipped(self) -> Tensor:
        return self.ratio.clamp(*self.clip)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, segment_ids: Tensor, *, kind: str = "ppo",
    clip_low: float | None = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, tau_pos: float = 1.0, tau_neg: float = 1.05,
    weights: Tensor | None = None, aggregation: str = "token-mean", constant: float | None = None, tokens: int | None = None,
    sequences: int | None = None,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """The loss of one micro-batch, and {"clip_fraction", "ratio_max"}. All tensors [N]; the gradient goes to `logprobs` alone.

    With r = exp(lp - old) and advantage A, per token and times `weights`:
    ppo        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with dual_clip = c > 1 and A < 0 the smaller of that and -c A
               (arXiv:1707.06347, 1912.09729)
    gspo       as ppo, r being the segment's geometric mean ratio, with each token's own gradient (arXiv:2507.18071, token form)
    cispo      -sg[clip(r)] A lp; clip_low None: no lower bound (arXiv:2506.13585)
    reinforce  -A lp
    sapo       -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv:2511.20347)
    Aggregated as `aggregate` says, with the same `constant`, `tokens` and `sequences`.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}: one of {', '.join(_KINDS)}")
    _check_range(kind, clip_low, clip_high, dual_clip, tau_pos, tau_neg)
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    _check_tokens(mask, segment_ids, **given, **({} if weights is None else {"weights": weights}))
    lp, old, advantage = _float(logprobs[mask]), _float(old_logprobs.detach()[mask]), _float(advantages.detach()[mask])
    ratio = _sequence_ratio(lp, old, segment_ids[mask]) if kind == "gspo" else (lp - old).clamp(-LIMIT, LIMIT).exp()
    clip = (float("-inf") if clip_low is None else 1 - clip_low, 1 + clip_high)
    trained = _Trained(lp, ratio, advantage, clip, dual_clip, (tau_pos, tau_neg))
    loss, outside = _KINDS[kind](trained)
    if weights is not None:
        loss = loss * _float(weights.detach()[mask])
    total = _aggregate(loss, segment_ids[mask], aggregation, constant, tokens, sequences)
    count = len(lp)
    return total, {
        "clip_fraction": outside.sum().item() / count if count else 0.0,
        "ratio_max": ratio.detach().max().item() if count else 1.0,
    }


def aggregate(
    values: Tensor, mask: Tensor, segment_ids: Tensor, *, mode: str, constant: float | None = None, tokens: int | None = None, sequences: int | None = None
) -> Tensor:
    """The trained values [N] as one number.

    token-mean: sum / trained tokens; sequence-mean: the mean over segments of each one's mean; constant: sum / (segments * constant).
    `tokens` and `sequences` are the counts of a whole optimiser step (those of this call when not given): then the sum over micro-batches
    equals the whole batch, however it is split between trajectories.
    """
    _check_tokens(mask, segment_ids, values=values)
    return _aggregate(_float(values[mask]), segment_ids[mask], mode, constant, tokens, sequences)


def kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str = "k3") -> Tensor:
    """Estimates of KL(policy | reference) from tokens that the policy sampled: [N], 0 where the mask is False.

    With d = ref - lp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, d clamped to +-20 in k3 (Schulman, "Approximating KL divergence", 2020).
    """
    _check_tokens(mask, None, logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = _float(ref_logprobs[mask]) - _float(logprobs[mask])
    if kind == "k1":
        estimate = -d
    elif kind == "k2":
        estimate = d**2 / 2
    elif kind == "k3":
        d = d.clamp(-LIMIT, LIMIT)
        estimate = d.expm1() - d
    else:
        raise ValueError(f"unknown kind {kind!r}: one of k1, k2, k3")
    return estimate.new_zeros(len(mask)).masked_scatter(mask, estimate)


def _ppo(t: _Trained) -> tuple[Tensor, Tensor]:
    objective = torch.minimum(t.ratio * t.advantages, t.clipped() * t.advantages)
    if t.dual_clip is not None:
        objective = torch.where(t.advantages < 0, torch.maximum(objective, t.dual_clip * t.advantages), objective)
    beyond = ((t.advantages > 0) & (t.ratio > t.clip[1])) | ((t.advantages < 0) & (t.ratio < t.clip[0]))
    return -objective, beyond


def _cispo(t: _Trained) -> tuple[Tensor, Tensor]:
    return -t.clipped().detach() * t.advantages * t.logprobs, (t.ratio < t.clip[0]) | (t.ratio > t.clip[1])


def _reinforce(t: _Trained) -> tuple[Tensor, Tensor]:
    return -t.advantages * t.logprobs, torch.zeros_like(t.ratio, dtype=torch.bool)


def _sapo(t: _Trained) -> tuple[Tensor, Tensor]:
    tau = torch.where(t.advantages > 0, t.tau[0], t.tau[1])
    return -(4 / tau) * torch.sigmoid(tau * (t.ratio - 1)) * t.advantages, torch.zeros_like(t.ratio, dtype=torch.bool)


_KINDS: dict[str, Callable[[_Trained], tuple[Tensor, Tensor]]] = {"ppo": _ppo, "gspo": _ppo, "cispo": _cispo, "reinforce": _reinforce, "sapo": _sapo}


def _sequence_ratio(lp: Tensor, old: Tensor, segments: Tensor) -> Tensor:
    """sg[s] exp(lp - sg[lp]), log s the mean of lp - old over the segment: s in value, and each token's share of its gradient."""
    index, counts = _segments(segments)
    mean = lp.new_zeros(len(counts)).index_add(0, index, (lp - old).detach()) / counts
    return mean.clamp(-LIMIT, LIMIT).exp()[index] * (lp - lp.detach()).exp()


def _aggregate(values: Tensor, segments: Tensor, mode: str, constant: float | None, tokens: int | None, sequences: int | None) -> Tensor:
    if mode not in ("token-mean", "sequence-mean", "constant"):
        raise ValueError(f"unknown aggregation {mode!r}: one of token-mean, sequence-mean, constant")
    if mode == "constant" and not (constant is not None and constant > 0):
        raise ValueError(f"constant must be given and positive for aggregation 'constant', not {constant}")
    for name, count in (("tokens", tokens), ("sequences", sequences)):
        if count is not None and (count < 0 or (count == 0 and len(values))):
            raise ValueError(f"{name} must be positive, not {count}: it counts what the whole optimiser step trains")
    index, counts = _segments(segments)
    if mode == "token-mean":
        return values.sum() / max(1, len(values) if tokens is None else tokens)
    trained = max(1, len(counts) if sequences is None else sequences)
    if mode == "constant":
        return values.sum() / (trained * constant)  # type: ignore[operator]
    return (values / counts[index]).sum() / trained


def _segments(segments: Tensor) -> tuple[Tensor, Tensor]:
    """(segment numbers without gaps, trained tokens of each)."""
    _, index, counts = torch.unique(segments, return_inverse=True, return_counts=True)
    return index, counts


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_tokens(mask: Tensor, segment_ids: Tensor | None, **tensors: Tensor) -> None:
    if mask.dim() != 1 or mask.dtype != torch.bool:
        raise ValueError(f"mask must be 1-D bool, not {mask.dtype} of shape {tuple(mask.shape)}")
    for name, tensor in tensors.items() if segment_ids is None else (*tensors.items(), ("segment_ids", segment_ids)):
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but mask {tuple(mask.shape)}")
    if segment_ids is not None and bool((segment_ids[mask] < 0).any()):
        raise ValueError("segment_ids: a trained token must belong to a trajectory, not to -1 (padding)")


def _check_range(kind: str, clip_low: float | None, clip_high: float, dual_clip: float | None, tau_pos: float, tau_neg: float) -> None:
    if clip_low is None and kind != "cispo":
        raise ValueError(f"clip_low must be given for kind {kind!r}: only cispo has no lower bound")
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must not be negative: {value}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be more than 1: {dual_clip}")
    for name, value in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not value > 0:
            raise ValueError(f"{name} must be positive: {value}")
