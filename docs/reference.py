"""Writes `docs/reference.md` from the docstrings of what the outside uses, and from the settings of a recipe: `make docs`."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

PUBLIC = {
    "savepoint.state": ("open_backend", "SqliteBackend", "BaseImage", "Session", "ExecResult", "Snapshot", "StateTree", "TreeNode", "Pruned", "ResetProof", "Quota"),
    "savepoint.envs.sql.tasks": ("Task", "read_tasks", "write_tasks"),
    "savepoint.envs.sql.synth": ("Synthesizer", "synthesize"),
    "savepoint.envs.sql.env": ("SqlEnv", "Budget"),
    "savepoint.envs.sql.settings": ("EnvironmentSettings",),
    "savepoint.envs.sql.schema_text": ("SchemaFormat", "render_schema"),
    "savepoint.envs.sql.grade": ("Grader", "Verdict"),
    "savepoint.rollout.trajectory": ("Trajectory", "Turn", "Group"),
    "savepoint.rollout.driver": ("rollout", "audit"),
    "savepoint.rollout.converse": ("converse",),
    "savepoint.rollout.engines.embedded": ("EmbeddedEngine",),
    "savepoint.rollout.engines.openai": ("OpenAIEngine", "EndpointSettings"),
    "savepoint.rollout.engines.vllm": ("VllmEngine",),
    "savepoint.attention.hf": ("register", "check_packing", "check_sinks", "packed_arguments"),
    "savepoint.attention.memory": ("Shape", "Learner", "MemoryPlan", "memory_plan", "largest_tokens", "device_budget"),
    "savepoint.train.policy": ("Policy",),
    "savepoint.train.experts": ("tile_experts", "tiled_experts"),
    "savepoint.train.recompute": ("recompute_layers",),
    "savepoint.train.advantages": ("grpo", "dr_grpo", "rloo"),
    "savepoint.train.losses": ("policy_loss", "aggregate", "kl"),
    "savepoint.train.logprobs": ("chunked_logprobs",),
    "savepoint.curriculum.pipeline": ("run_recipe",),
    "savepoint.evals.command": ("evaluate_command", "EvalOptions"),
    "savepoint.evals.metrics": ("success_rate", "pass_at_k", "pass_hat_k", "wilson"),
}


def reference() -> str:
    """The page, as one text."""
    out = ["# Reference", "", "Made by `make docs` from the code itself."]
    for module, names in PUBLIC.items():
        out += ["", f"## {module}"]
        for name in names:
            out += entry(name, getattr(importlib.import_module(module), name))
    return "\n".join([*out, "", *settings()]) + "\n"


def entry(name: str, thing: object) -> list[str]:
    out = ["", f"### {name}{signature(thing)}", "", inspect.getdoc(thing) or ""]
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                out += ["", f"**{method}**`{inspect.signature(function)}`  ", inspect.getdoc(function) or ""]
    return out


def signature(thing: object) -> str:
    return "" if inspect.isclass(thing) else f"`{inspect.signature(thing)}`"  # type: ignore[arg-type]


def settings() -> list[str]:
    from savepoint.config import describe
    from savepoint.curriculum.plan import Recipe

    rows = [f"| `{key}` | `{default}` | {text} |" for key, default, text in describe(Recipe)]
    return ["## Settings of a recipe", "", "| key | default | meaning |", "|---|---|---|", *rows]


if __name__ == "__main__":
    (Path(__file__).parent / "reference.md").write_text(reference(), encoding="utf-8")
