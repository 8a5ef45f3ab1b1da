"""Files of predictions: answers belong to ids, and what is wrong with a file is said with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from savepoint.envs.sql.predictions import pair, read_predictions
from savepoint.envs.sql.tasks import Task
from savepoint.errors import UserError

TASKS = [Task(name, "generation", "d", "?", ["SELECT 1"]) for name in ("1", "2", "10")]


def read(tmp_path: Path, text: str) -> dict[str, tuple[str, ...]]:
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    return {p.instance_id: p.statements for p in read_predictions(path)}


@pytest.mark.parametrize("field", ["pred_sqls", "pred_sql", "sql"])
def test_each_spelling_of_the_answer_is_read_as_it_stands(tmp_path, field):
    assert read(tmp_path, json.dumps({"instance_id": 7, field: " SELECT 1 ;-- x"})) == {"7": (" SELECT 1 ;-- x",)}


def test_null_empty_and_absent_answers_are_no_statements(tmp_path):
    lines = ['{"instance_id": "a", "pred_sqls": null}', '{"instance_id": "b", "pred_sqls": []}', '{"instance_id": "c"}', "", '{"instance_id": "d", "sql": ""}']
    assert read(tmp_path, "\n".join(lines)) == {"a": (), "b": (), "c": (), "d": ("",)}


def test_birds_one_object_is_read_without_its_database(tmp_path):
    text = json.dumps({"0": "SELECT '\t'\t----- bird -----\tsuperhero", "1": "SELECT 2", "2": None}, indent=1)
    assert read(tmp_path, text) == {"0": ("SELECT '\t'",), "1": ("SELECT 2",), "2": ()}


def test_answers_are_paired_by_id_whatever_the_order(tmp_path):
    text = json.dumps({"10": "ten", "1": "one", "2": "two"})  # as sort_keys=True leaves them
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8")
    paired = pair(read_predictions(path), TASKS)
    assert {name: p.statements for name, p in paired.by_id.items()} == {"10": ("ten",), "1": ("one",), "2": ("two",)}


def test_tasks_without_a_line_are_missing_and_ids_without_a_task_are_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"instance_id": "2", "sql": "x"}\n{"instance_id": "nobody", "sql": "x"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"p.jsonl:2: no task has the id 'nobody'.*--ignore-unknown"):
        pair(read_predictions(path), TASKS)
    paired = pair(read_predictions(path), TASKS, ignore_unknown=True)
    assert (paired.missing, paired.unknown) == (["1", "10"], ["nobody"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"instance_id": "a", "sql": "x"}\n{"instance_id": "b"}\n{"instance_id": "a", "sql": "y"}', r":3: instance_id 'a' is predicted twice: also at .*:1"),
        ('{\n "0": "x",\n "1": "y",\n "0": "z"\n}', r":4: instance_id '0' is predicted twice: also at .*:2"),
        ('{"instance_id": "a", "sql": 7}', r":1: a prediction must be a string or a list of strings"),
        ('{"instance_id": "a"}\n{"sql": "x"}', r":2: instance_id is missing"),
        ('{"instance_id": "a"}\n{oops', r":2: not valid JSON"),
        ("[7]", r"item 1: a prediction must be a JSON object"),
    ],
)
def test_a_fault_is_one_line_with_the_place(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)
