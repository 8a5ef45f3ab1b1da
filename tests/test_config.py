"""Settings are refused with one line that names the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from savepoint.curriculum.plan import load_recipe
from savepoint.errors import UserError

RECIPE = '[[stages]]\nkind = "sft"\nname = "one"\nmode = "single_turn"\ndemonstrations = 10\n[[stages]]\nkind = "grpo"\nname = "two"\nmode = "agentic"\n'


def recipe(tmp_path: Path, extra: str = "", stages: str = RECIPE) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\n{extra}\n{stages}', encoding="utf-8")
    return path


def test_the_recipes_that_come_with_it_can_be_read():
    loaded, profile = load_recipe("quickstart")
    assert [stage.kind for stage in loaded.stages] == ["sft", "sft", "grpo", "grpo"] and profile is None
    smoke, profile = load_recipe("quickstart", ["profile=smoke", "stages.4.steps=3"])
    assert profile == "smoke" and smoke.tasks.heldout < loaded.tasks.heldout and smoke.stages[3].steps == 3


@pytest.mark.parametrize(
    ("extra", "sets", "says"),
    [
        ("speed = 3", [], "mine.toml: unknown key 'speed' (known: "),
        ("[tasks]\nheldouts = 3", [], "mine.toml: unknown key 'tasks.heldouts' (known: bugs, database,"),
        ("seed = 'x'", [], "mine.toml: seed: input should be a valid integer, unable to parse string as an integer, not 'x'"),
        ("[tasks]\nforms = ['lists']", [], "mine.toml: tasks: forms: unknown 'lists' (known: "),
        ("", ["stages.2.group_size=1"], "mine.toml: stages.2.group_size: input should be greater than or equal to 2, not 1"),
        ("", ["stages.2.grup_size=1"], "mine.toml: unknown key 'stages.2.grup_size' (known: checkpoint_every, clip,"),
        ("", ["stages.3.steps=1"], "--set: stages.3.steps: '3' must be a number from 1 to 2"),
        ("", ["stages.1.kind=ppo"], "mine.toml: stages.1: "),
        ("", ["profile=fast"], "mine.toml: no profile 'fast' (known: none)"),
        ("", ["steps"], "--set steps: must be key=value"),
        ("", ["name.x=1"], "--set: name.x: 'name' is a value"),
        ("", ["stages.2.name=one"], "mine.toml: recipe: stages: two are called 'one'"),
        ("", ["tasks.file=a.jsonl"], "mine.toml: tasks: file, heldout_file and databases go together"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, extra: str, sets: list[str], says: str):
    with pytest.raises(UserError) as error:
        load_recipe(recipe(tmp_path, extra), sets)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path):
    (tmp_path / "broken.toml").write_text("name = ", encoding="utf-8")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, says in (("missing.toml", "no such file"), ("broken.toml", "not valid TOML"), ("binary.toml", "cannot be read")):
        with pytest.raises(UserError, match=says) as error:
            load_recipe(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_stage_without_stages_or_names_cannot_run(tmp_path: Path):
    with pytest.raises(UserError, match="stages: field required"):
        load_recipe(recipe(tmp_path, stages=""))
    with pytest.raises(UserError, match="stages.1.sft|stages.1"):
        load_recipe(recipe(tmp_path, stages='[[stages]]\nkind = "sft"\n'))
