"""How the learner computes, whatever it learns: its attention, and what it keeps in memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
