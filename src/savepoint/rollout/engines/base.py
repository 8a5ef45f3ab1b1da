"""What a rollout asks of an engine, and the weights that the learner hands to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

Finish = Literal["stop", "length"]
Respond = Callable[[int, list[int], str], list[int] | None]
"""respond(slot, message, finish): the ids that follow a sampled message (an observation and the next assistant marker), or None: it is over."""


@dataclass(slots=True)
class Sampled:
    """One trajectory's tokens, prompt included. `mask[i]`: `ids[i]` was sampled, at log-prob `logprobs[i]` (0.0 elsewhere).

    finish: "stop" the responder ended it; "length" the budget of tokens did.
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    finish: Finish


class Sampler(Protocol):
    """Samples trajectories, token in and token out."""

    version: int
    seconds: dict[str, float]
    tokens: dict[str, int]

    def generate(
        self, prompts: list[list[int]], group_size: int, respond: Respond, *, stop_ids: Collection[int], temperature: float = 1.0,
        max_message_tokens: int, max_tokens: int, seed: int,
    ) -> list[Sampled]:  # fmt: skip
        """`group_size` trajectories for each prompt, in order: slot = prompt * group_size + member."""
        ...


class Engine(Sampler, Protocol):
    """A sampler whose weights the learner hands over: it samples with those that were loaded last."""

    def load_weights(self, model_or_state: nn.Module | Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on."""
        ...


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, each once (tied ones under their first name). They are the model's own memory, not a copy."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write `state` into the model's parameters, in place. ValueError that names what is missing, unknown or of another shape."""
    own = weights_of(model)
    for names, what in ((own.keys() - state.keys(), "missing"), (state.keys() - own.keys(), "unknown to this model")):
        if names:
            raise ValueError(f"weights: {', '.join(sorted(names)[:3])} {what}")
    for name, parameter in own.items():
        if parameter.shape != state[name].shape:
            raise ValueError(f"weights: {name} has shape {tuple(state[name].shape)}, not {tuple(parameter.shape)}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def checksum(state: Mapping[str, Tensor]) -> str:
    """A digest of names, shapes, types and every bit of the values: equal on both sides of a hand-over, or the weights differ."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name].detach().contiguous().cpu()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
