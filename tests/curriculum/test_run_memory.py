"""A run's memory from its recipe: every part, the longest micro-batch, and one line for what cannot be planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from savepoint.curriculum.memory import run_memory
from savepoint.curriculum.plan import Recipe, load_recipe
from savepoint.errors import UserError


def recipe(*sets: str) -> Recipe:
    return load_recipe("quickstart", list(sets))[0]


def test_the_largest_microbatch_of_any_stage_is_planned():
    assert run_memory(recipe())["learner"]["tokens"] == 4096
    assert run_memory(recipe("stages.4.tokens_per_microbatch=9000"))["learner"]["tokens"] == 9000
    assert run_memory(recipe("stages.4.tokens_per_microbatch=100", "stages.3.tokens_per_microbatch=100", "stages.1.tokens_per_microbatch=100",
                             "stages.2.tokens_per_microbatch=100"))["learner"]["tokens"] == 400  # fmt: skip  # one whole trajectory goes alone


def test_saving_settings_save():
    plain, saving = run_memory(recipe()), run_memory(recipe("learner.recompute=layers", "learner.expert_tile=256"))
    assert saving["total"] < plain["total"] and saving["largest_tokens"] > plain["largest_tokens"]
    assert run_memory(recipe("learner.attention=eager"))["largest_tokens"] < plain["largest_tokens"] / 10


def test_a_divergence_needs_a_second_copy_of_the_weights():
    plain, charged = run_memory(recipe()), run_memory(recipe("stages.3.kl=0.1"))
    assert charged["reference"] == plain["learner"]["weights"] and charged["total"] == plain["total"] + charged["reference"]


def test_a_models_folder_is_read_and_a_missing_one_is_named(tmp_path: Path):
    from transformers import LlamaConfig

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(**shape, tie_word_embeddings=True).save_pretrained(tmp_path)
    planned = run_memory(recipe(f"policy.model={tmp_path}"))
    assert planned["learner"]["weights"] == 4 * (64 * 32 + 4 * 32 * 32 + 3 * 32 * 32 + 3 * 32)
    with pytest.raises(UserError, match=r"policy\.model: .*nowhere"):
        run_memory(recipe(f"policy.model={tmp_path / 'nowhere'}"))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        run_memory(recipe(f"policy.model={tmp_path}", "seed=1", "policy.layers=2"))
