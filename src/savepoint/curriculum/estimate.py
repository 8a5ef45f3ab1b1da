"""`savepoint plan`: what a run would do and roughly what it would cost, from the recipe alone."""

from __future__ import annotations

from typing import Any

from savepoint.curriculum.memory import run_memory
from savepoint.curriculum.plan import Recipe, SftStage

# Measured with the quickstart on one core (benchmarks/results/quickstart.json): tokens a second of each part for the tiny gpt-oss policy of
# 0.44 M parameters, tokens of an episode by mode, the share of them that is sampled, and the share of episodes whose advantage is not zero. A
# larger model is taken to be slower in proportion to its parameters.
_REFERENCE_PARAMETERS = 440_000
_RATE = {"train": 11_000.0, "sample": 12_000.0}
_EPISODE_TOKENS = {"single_turn": 63, "agentic": 82}
_SAMPLED_SHARE, _LEARNED_SHARE = 0.45, 0.5
_TASK_SECONDS = 0.002


def parameters_of(recipe: Recipe) -> int:
    """Parameters of the tiny policy of a recipe, from its settings."""
    p = recipe.policy
    attention = p.hidden_size * p.head_dim * (2 * p.heads + 2 * p.kv_heads)
    experts, width = (p.experts, p.intermediate or 64) if p.architecture == "gpt_oss" else (1, p.intermediate or 192)
    return p.vocab_size * p.hidden_size + p.layers * (attention + experts * 3 * p.hidden_size * width)


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Stages with their steps, batches, trajectories, tokens and seconds, and totals. Runs nothing, so seconds are rough: within 2x on like machines."""
    parameters = parameters_of(recipe) if recipe.policy.model is None else None
    slower = max(1.0, (parameters or _REFERENCE_PARAMETERS) / _REFERENCE_PARAMETERS)
    rows: list[dict[str, Any]] = []
    for stage in recipe.stages:
        tokens_each = _EPISODE_TOKENS[stage.mode]
        if isinstance(stage, SftStage):
            examples = stage.demonstrations + stage.single_turn_demonstrations
            steps, episodes = max(1, int(examples * stage.epochs / stage.batch_size)), examples
            batch = f"{stage.batch_size}"
            seconds = examples * _TASK_SECONDS + steps * stage.batch_size * tokens_each * slower / _RATE["train"]
        else:
            steps, episodes = stage.steps, stage.steps * stage.prompts_per_step * stage.group_size
            batch = f"{stage.prompts_per_step} x {stage.group_size}"
            tokens = episodes * tokens_each
            seconds = episodes * _TASK_SECONDS + slower * (tokens * _SAMPLED_SHARE / _RATE["sample"] + tokens * _LEARNED_SHARE * stage.epochs / _RATE["train"])
        rows.append(
            {"name": stage.name, "kind": stage.kind, "mode": stage.mode, "steps": steps, "batch": batch, "trajectories": episodes,
             "tokens": episodes * tokens_each, "seconds": round(seconds)}
        )  # fmt: skip
    evaluated = 2 * recipe.tasks.heldout * recipe.evaluation.samples * (len(rows) + 1)
    evaluation = evaluated * (_TASK_SECONDS + slower * _EPISODE_TOKENS["agentic"] * _SAMPLED_SHARE / _RATE["sample"])
    memory = run_memory(recipe)
    return {
        "recipe": recipe.name, "seed": recipe.seed, "stages": rows, "parameters": parameters,
        "evaluation": {"trajectories": evaluated, "seconds": round(evaluation)},
        "seconds": round(sum(row["seconds"] for row in rows) + evaluation),
        "memory_bytes": memory["total"], "memory": memory,
    }  # fmt: skip
