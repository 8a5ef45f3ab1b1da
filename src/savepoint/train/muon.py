"""Muon: momentum whose matrices are orthogonalised before the step (Jordan et al., 2024, kellerjordan.github.io/posts/muon).

`torch.optim.Muon` takes 2-D parameters only; here a parameter `[..., m, n]` is a stack of matrices, as the experts of a mixture are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, as published: it takes singular values to about 0.7 .. 1.2, fast rather than exactly to 1."""
STEPS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and no weight decay. The update of each matrix has RMS `.2 lr`, which is about AdamW's (arXiv:2502.16982).

    ValueError for a parameter of fewer than two dimensions.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2:
                    raise ValueError(f"Muon moves matrices [..., m, n], not a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(average, group["momentum"])
                p.add_(orthogonalise(ahead), alpha=-0.2 * group["lr"] * max(p.shape[-2:]) ** 0.5)
        return loss


def orthogonalise(x: Tensor) -> Tensor:
    """About U V^T of each matrix's singular value decomposition U S V^T, by five Newton-Schulz steps. x: [..., m, n]."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(hidden matrices, for Muon; everything else, for AdamW: embeddings, the output head, routers, norms, sinks, biases)."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        aside = parameter.dim() < 2 or any(word in name for word in ("embed", "lm_head", "router", "bias"))
        (rest if aside else matrices).append(parameter)
    return matrices, rest
