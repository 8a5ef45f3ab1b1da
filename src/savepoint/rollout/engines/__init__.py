"""Engines: what turns prompts into sampled tokens. All of them are token in, token out."""

from savepoint.rollout.engines.base import Engine, Respond, Sampled, Sampler

__all__ = ["Engine", "Respond", "Sampled", "Sampler"]
