"""What a run needs in memory, from its recipe: the process, the sampling engine, and the learner's plan for its largest micro-batch."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from savepoint.attention.memory import Learner, Shape, device_budget, largest_tokens, memory_plan
from savepoint.curriculum.plan import PolicySettings, Recipe, SftStage
from savepoint.errors import UserError
from savepoint.train.policy import tiny_config

PROCESS_BYTES = 450_000_000
"""Interpreter, libraries, databases, demonstrations and what the allocator does not give back, measured with the quickstart."""
_EVALUATION_SLOTS = 64


def run_memory(recipe: Recipe, device: str = "cpu") -> dict[str, Any]:
    """`{"device", "process", "engine", "learner": the plan's parts, "total", "budget", "largest_tokens"}`, in bytes.

    `total` is the most that the run can need, as if every trajectory were as long as it may be. `largest_tokens` is the longest micro-batch that would
    still fit in `budget`, all that the device has.
    UserError for a model folder that cannot be read and for settings that do not fit together.
    """
    settings = recipe.learner
    attention: Literal["eager", "flash"] = "eager" if settings.attention == "eager" else "flash"
    how = Learner(attention=attention, recompute=settings.recompute, expert_tile=settings.expert_tile, device=device)
    shape = _shape(recipe.policy)
    plan = memory_plan(shape, _largest_microbatch(recipe), how)
    copies = any(getattr(stage, "kl", 0.0) for stage in recipe.stages)
    engine, reference = _engine(recipe, shape), plan.weights if copies else 0
    besides = engine + reference + (PROCESS_BYTES if device == "cpu" else 0)
    budget = device_budget(device)
    return {
        "device": device, "process": PROCESS_BYTES, "engine": engine, "reference": reference, "learner": plan.to_json(), "total": besides + plan.peak,
        "budget": budget, "largest_tokens": largest_tokens(shape, max(0, budget - besides), how),
    }  # fmt: skip


def _shape(settings: PolicySettings) -> Shape:
    return _shape_of(settings.model_dump_json())


@lru_cache(maxsize=8)
def _shape_of(settings: str) -> Shape:
    policy = PolicySettings.model_validate_json(settings)
    if policy.model is None:
        return Shape.of(tiny_config(policy, vocab_size=policy.vocab_size, pad_id=0, end_id=1))
    from transformers import AutoConfig

    path = Path(policy.model) / "config.json"
    if not path.is_file():
        raise UserError(f"policy.model: {policy.model}: no such folder of a transformers model (it has no config.json)")
    try:
        return Shape.of(AutoConfig.from_pretrained(policy.model, local_files_only=True))
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: memory cannot be planned: {str(error).splitlines()[0]}") from None


def _largest_microbatch(recipe: Recipe) -> int:
    """Tokens of the largest micro-batch of any stage: a sequence that is longer than a micro-batch goes alone."""
    longest, most = recipe.environment.max_tokens, 1
    for stage in recipe.stages:
        sequences = stage.batch_size if isinstance(stage, SftStage) else stage.prompts_per_step * stage.group_size
        most = max(most, min(max(stage.tokens_per_microbatch, longest), sequences * longest))
    return most


def _engine(recipe: Recipe, shape: Shape) -> int:
    """Keys and values of every trajectory in flight, with the spare that growing takes, and a step's logits with their softmax and sums (in float64)."""
    slots = max([s.prompts_per_step * s.group_size for s in recipe.stages if not isinstance(s, SftStage)], default=_EVALUATION_SLOTS)
    _, key, value, _ = shape.attention_values
    return slots * (recipe.environment.max_tokens * (key + value) * 4 * (shape.layers + 1) + 16 * shape.vocabulary)
