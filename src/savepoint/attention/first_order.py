"""Gradients that are functions of their own, so that differentiating them again is an error and not a silent zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FirstOrder(torch.autograd.Function):
    """`FirstOrder.apply(function, *arguments)` is `function(*arguments)`, a tuple; its backward raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
        return function(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("sink_attention cannot be differentiated twice; backend 'eager' can")
