"""Plain torch, tile by tile: any device, no kernel but matmul. For devices that have no flash kernel, and readable next to the formula."""

from __future__ import annotations

from torch import Tensor

from savepoint.attention import tiles
from savepoint.attention.autograd import SinkAttention
from savepoint.attention.call import Call, Device
from savepoint.attention.problem import Problem


class DenseTile:
    """One tile as a small dense softmax, recomputed in backward."""

    equal_head_sizes = False
    query_chunk = 128
    forward_keys: int | None = 512
    backward_keys: int | None = 512

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, mask, scale)
        lse = scores.logsumexp(-1)
        return scores.sub_(lse.unsqueeze(-1)).exp_() @ v, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = self._scores(q, k, mask, scale).sub_(lse.unsqueeze(-1)).exp_()
        dv = p.mT @ dout
        delta = (dout * out).sum(-1, keepdim=True)
        ds = (dout @ v.mT).sub_(delta).mul_(p).mul_(scale)
        return ds @ k, ds.mT @ q, dv

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        scores = (q @ k.mT).mul_(scale)
        return scores if mask is None else scores.add_(mask)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem) -> tuple[Tensor, Tensor]:
    """See `sink_attention`."""
    return SinkAttention.apply(q, k, v, sinks, problem, tiles.Tiled(DenseTile()))


def missing(device: Device) -> str | None:
    """Why nothing can be computed on this device, or None."""
    return device.absent


def refusal(call: Call) -> str | None:
    """Why this call cannot be done, or None."""
    return missing(call.device)
