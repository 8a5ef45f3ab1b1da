"""Task files: every published spelling is read, what we write is read back as it was, and a fault is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.envs.sql.tasks import Task, read_tasks, write_tasks
from savepoint.errors import UserError

RECORD = {"instance_id": "a", "db_id": "shop", "query": "it fails", "issue_sql": ["SELECT 1"], "sol_sql": ["SELECT 2"]}


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n", encoding="utf-8")
    return path


def read_one(tmp_path: Path, **changes: object) -> Task:
    record = {key: value for key, value in {**RECORD, **changes}.items() if value is not ...}
    (task,) = read_tasks(write(tmp_path / "tasks.jsonl", record))
    return task


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)
SQL = st.lists(TEXT, min_size=1, max_size=3)


@given(
    query=TEXT, issue=SQL, sol=SQL, setup=st.lists(TEXT, max_size=2), generation=st.booleans(), evidence=st.none() | TEXT,
    tags=st.lists(TEXT, max_size=2), conditions=st.dictionaries(TEXT, st.booleans(), max_size=2),
)  # fmt: skip
def test_what_is_written_is_read_back(tmp_path_factory, query, issue, sol, setup, generation, evidence, tags, conditions):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    task = Task(
        "shop-1", "generation" if generation else "debugging", "shop", query, sol, () if generation else issue, setup,
        evidence=evidence, tags=tags, conditions=conditions, synth={"kind": "wrong_table"}, extra={"source": "made"},
    )  # fmt: skip
    write_tasks(path, [task])
    assert read_tasks(path) == [task]
    before = path.read_bytes()
    write_tasks(path, read_tasks(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [("instance_id", "question_id", "a"), ("instance_id", "id", "a"), ("db_id", "selected_database", "shop"), ("db_id", "db", "shop"),
     ("issue_sql", "error_sql", ["SELECT 1"]), ("sol_sql", "SQL", "SELECT 2"), ("sol_sql", "gold_sql", "SELECT 2")],
)  # fmt: skip
def test_other_spellings_of_a_field_mean_the_same(tmp_path, old, new, value):
    assert read_one(tmp_path, **{old: ..., new: value}) == read_one(tmp_path)


def test_a_string_is_a_list_of_one_statement(tmp_path):
    assert read_one(tmp_path, issue_sql="SELECT 1", sol_sql="SELECT 2; SELECT 3").sol_sql == ("SELECT 2; SELECT 3",)


def test_null_and_absent_are_the_same(tmp_path):
    assert read_one(tmp_path, preprocess_sql=None, conditions=None, evidence=None, tags=None) == read_one(tmp_path)


def test_spiders_query_is_the_gold_where_a_question_stands_beside_it(tmp_path):
    (task,) = read_tasks(write(tmp_path / "dev.json", {"db_id": "pets", "question": "How many pets?", "query": "SELECT count(*) FROM pets"}))
    assert (task.task, task.query, task.sol_sql) == ("generation", "How many pets?", ("SELECT count(*) FROM pets",))


def test_a_task_with_buggy_sql_is_debugging_unless_it_says_otherwise(tmp_path):
    assert read_one(tmp_path).task == "debugging"
    assert read_one(tmp_path, issue_sql=...).task == "generation"
    assert read_one(tmp_path, task="generation").task == "generation"


def test_a_json_array_is_read_like_lines(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([RECORD, {**RECORD, "instance_id": "b"}], indent=2), encoding="utf-8")
    assert [task.instance_id for task in read_tasks(path)] == ["a", "b"]


def test_repeated_ids_are_numbered_in_file_order(tmp_path):
    path = write(tmp_path / "t.jsonl", *({**RECORD, "instance_id": name} for name in ("a", "a", "a#2", "a")))
    assert [task.instance_id for task in read_tasks(path)] == ["a", "a#2", "a#2#2", "a#3"]


def test_ids_are_text_and_come_from_the_line_where_there_is_none(tmp_path):
    path = write(tmp_path / "t.jsonl", {**RECORD, "instance_id": 7}, {key: value for key, value in RECORD.items() if key != "instance_id"})
    assert [task.instance_id for task in read_tasks(path)] == ["7", "shop:2"]


def test_unknown_fields_are_kept(tmp_path):
    task = read_one(tmp_path, efficiency=True, external={"x": [1]})
    assert task.extra == {"efficiency": True, "external": {"x": [1]}}
    assert task.record()["external"] == {"x": [1]}


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = write(tmp_path / "tasks.jsonl", RECORD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_tasks(path)) == 1


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    assert read_one(tmp_path, query="one\u2028two").query == "one\u2028two"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sol_sql": []}, "sol_sql is empty: an instance needs at least one gold statement"),
        ({"sol_sql": "  "}, "sol_sql is empty: an instance needs at least one gold statement"),
        ({"issue_sql": [], "task": "debugging"}, "issue_sql is empty: a debugging task needs the user's SQL"),
        ({"issue_sql": [1]}, "issue_sql must be a string or a list of strings, not [1]"),
        ({"query": ...}, "query is missing: a task needs the user's text"),
        ({"db_id": "../etc"}, "db_id must be a plain name, not '../etc'"),
        ({"db_id": ...}, "db_id is missing"),
        ({"task": "poetry"}, "task must be 'debugging' or 'generation', not 'poetry'"),
        ({"conditions": ["order"]}, "conditions must be an object, not ['order']"),
    ],
)
def test_a_fault_is_named_with_file_and_line(tmp_path, changes, message):
    wrong = {key: value for key, value in {**RECORD, **changes}.items() if value is not ...}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(RECORD) + "\n\n" + json.dumps(wrong) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_tasks(path)
    assert str(error.value) == f"{path}:3: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", ": holds no task"), (b"\xff\xfe{}", ": not UTF-8 text"), (b"[1, 2", ": not valid JSON"),
     (b"[7]", ": item 1: an instance must be a JSON object, not int"), (b"{oops}\n", ":1: not valid JSON")],
)  # fmt: skip
def test_a_file_that_holds_no_tasks_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_tasks(path)
    assert str(error.value).startswith(f"{path}{message}") and "\n" not in str(error.value)


def test_a_missing_file_and_an_unwritable_one_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.jsonl: no such file"):
        read_tasks(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        write_tasks(tmp_path / "no" / "folder.jsonl", [])
