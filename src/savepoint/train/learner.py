"""How the learner computes, whatever it learns: its attention, and what it keeps in memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from savepoint.attention import SelfCheckFailed, self_check
from savepoint.attention.hf import backend_of, implementation
from savepoint.config import Settings
from savepoint.errors import UserError
from savepoint.train.experts import tile_experts
from savepoint.train.policy import Policy
from savepoint.train.recompute import recompute_layers


class LearnerSettings(Settings):
    """Time against memory: the defaults are for sequences that fit, `savepoint plan` says whether they do."""

    attention: str = Field("auto", description="backend of attention: auto, or one that `savepoint doctor` lists")
    recompute: Literal["off", "layers", "host"] = Field(
        "off", description="layers: run each layer again in the backward pass and keep its input alone; host: and let the inputs wait in host memory"
    )
    expert_tile: int | None = Field(None, ge=1, description="tokens that go through a mixture of experts at a time; none: all of them")


def check_attention(policy: Policy) -> dict[str, object] | None:
    """The self-check of the backend that computes the policy's attention, as plain JSON: its name, device, dtype, and how far from f64 each tensor was.

    None where attention is not ours. UserError when the backend computes something else here: nothing must be learned through it.
    """
    name = backend_of(policy.model)
    if implementation(policy.model) is None:
        return None
    try:
        return self_check(policy.device, policy.model.dtype, backend=name).record()
    except SelfCheckFailed as error:
        raise UserError(f"learner.attention: {error}; choose another backend, or torch build") from None


def prepare(policy: Policy, settings: LearnerSettings) -> None:
    """Let a policy compute so from now on. UserError that names the setting which its model or this machine cannot have."""
    policy.attend(settings.attention)
    try:
        if settings.expert_tile is not None:
            tile_experts(policy.model, settings.expert_tile)
        if settings.recompute != "off":
            recompute_layers(policy.model, offload=settings.recompute == "host")
    except ValueError as error:
        raise UserError(f"learner: {error}") from None
