"""Where tasks come from: held-out tasks are never trained on, and files are checked before anything starts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from savepoint.curriculum.plan import TaskSettings
from savepoint.curriculum.source import open_source
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.tasks import write_tasks
from savepoint.errors import UserError
from savepoint.state import open_backend
from tests_support import debugging, renamed


def test_no_training_task_is_a_held_out_one(tmp_path: Path):
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        source = open_source(TaskSettings(heldout=200), Grader(backend), tmp_path)
        kept = {(task.query, task.issue_sql) for task in source.heldout}
        assert len(kept) == 200
        rng = random.Random(1)
        assert not any((task.query, task.issue_sql) in kept for task in (source.draw(rng) for _ in range(1500)))


def test_no_deep_training_task_has_the_shape_of_a_held_out_one(tmp_path: Path):
    settings = TaskSettings(level="deep", bugs=("lost_partition", "integer_division", "lost_wildcard"), forms=("all",), heldout=8, renamed_share=0.1)
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        source = open_source(settings, Grader(backend), tmp_path)
        kept = {task.synth["shape"] for task in source.heldout}
        rng = random.Random(1)
        drawn = [source.draw(rng) for _ in range(60)]
        assert len(source.heldout) == 8 and kept.isdisjoint(task.synth["shape"] for task in drawn)
        assert {task.category for task in drawn} == {"Query"} and len({task.synth["kind"] for task in drawn}) >= 4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bugs": ("integer_division",)}, "unknown 'integer_division'"),
        ({"level": "deep", "bugs": ("nonsense",)}, "unknown 'nonsense'"),
        ({"level": "deep", "bugs": ()}, "bugs: empty"),
    ],
)
def test_a_recipe_names_only_kinds_that_its_level_has(settings, why):
    with pytest.raises(ValueError, match=why):
        TaskSettings(**settings)
    assert "integer_division" in TaskSettings(level="deep", bugs=("integer_division",)).known_bugs


def test_held_out_tasks_are_the_same_for_every_seed_of_a_run(tmp_path: Path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with open_backend("sqlite", store=tmp_path / "store") as backend:
            found.append([task.instance_id for task in open_source(TaskSettings(heldout=20), Grader(backend), tmp_path / name).heldout])
    assert found[0] == found[1]


def test_tasks_of_files_leave_out_what_is_held_out(people: Path, tmp_path: Path):
    write_tasks(tmp_path / "train.jsonl", [debugging(), renamed()])
    write_tasks(tmp_path / "held.jsonl", [debugging()])
    settings = TaskSettings(file=str(tmp_path / "train.jsonl"), heldout_file=str(tmp_path / "held.jsonl"), databases=str(people))
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        source = open_source(settings, Grader(backend), tmp_path)
        assert {source.draw(random.Random(i)).instance_id for i in range(9)} == {"p2"}
        write_tasks(tmp_path / "train.jsonl", [debugging()])
        with pytest.raises(UserError, match="train.jsonl: no task to use"):
            open_source(settings, Grader(backend), tmp_path)
