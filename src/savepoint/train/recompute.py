"""Checkpoints per layer: a decoder layer keeps its input alone and is run again in the backward pass; the inputs may wait in host memory."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recompute_layers(model: Any, *, offload: bool = False) -> int:
    """Run every decoder layer of `model` again in the backward pass from now on; how many layers there are.

    Values and gradients stay the same in every bit. Kept per layer: its input, [B, T, H], which `offload` moves to (pinned) host memory until it
    is needed; on the CPU that changes nothing. ValueError for a model whose layers transformers does not know how to checkpoint.

    The layer's own `forward` is replaced, and not transformers' switch set, because that one works in training mode only and
    would be off, without a word, for a policy that was loaded (which is in evaluation mode).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"checkpoint: a {model.config.model_type!r} model has no layers that can be run again")
    for layer in layers:
        # A bound method, and not a closure: a deep copy of the model then holds the copy's own layers.
        layer.forward = MethodType(_offloaded if offload else _recomputed, layer)
    return len(layers)


def _recomputed(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(layer).forward, layer, **kwargs)
    if not torch.is_grad_enabled():
        return forward(hidden_states, *args)
    if kwargs.get("cache") is not None:
        raise ValueError("checkpoint: a layer that fills a key-value cache cannot be run twice; call the model with use_cache=False")
    return checkpoint(forward, hidden_states, *args, use_reentrant=False)


def _offloaded(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    # `checkpoint` keeps its positional tensors through these hooks, and everything else of the layer through hooks of its own.
    with saved_tensors_hooks(_to_host, _to_device):
        return _recomputed(layer, hidden_states, *args, **kwargs)


def _to_host(x: Tensor) -> tuple[torch.device, Tensor]:
    if x.device.type == "cpu":
        return x.device, x
    parked = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda")
    return x.device, parked.copy_(x, non_blocking=True)


def _to_device(parked: tuple[torch.device, Tensor]) -> Tensor:
    # Same stream as the copy out, so that the host's bytes are there before they are read back.
    return parked[1].to(parked[0], non_blocking=True)
