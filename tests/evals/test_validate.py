"""`savepoint validate`: each way in which an instance is no instance has its name, and good ones pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from savepoint.cli import main
from savepoint.envs.sql.grade import Limits
from savepoint.evals.bench import Bench, GradingOptions
from savepoint.evals.validate import examine, validate
from savepoint.state import open_backend
from tests_support import debugging


@pytest.fixture
def bench(people: Path, tmp_path: Path):
    options = GradingOptions((people,), tmp_path / "store", Limits(deadline_s=1.0, max_rows=5000))
    made = Bench(options, open_backend("sqlite", store=tmp_path / "store"))
    yield made
    made.close()


def record(bench: Bench, **changes: Any) -> dict[str, Any]:
    return examine(bench, debugging(**changes))


def test_a_good_instance_is_valid_and_says_what_was_tried(bench: Bench):
    found = record(bench, clean_up_sql=["DROP TABLE notes"])
    assert found["valid"] and not found["problems"] and not found["lints"]
    assert (found["gold"], found["issue"]) == (["correct", "correct"], "sql_error")
    assert found["probes"] == {"empty": "no_answer", "noop": "wrong_result", "delete": "wrong_state", "drop": "wrong_state", "shadow": "wrong_result"}


SLOW = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT max(x) FROM c"
FAILS = "def test_case(pred_sqls, sol_sqls, db_path, conn):\n    assert 0\n"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sol_sql": []}, "no_gold"),
        ({"sol_sql": [" ;-- none"]}, "no_gold"),
        ({"preprocess_sql": ["INSERT INTO nowhere VALUES (1)"]}, "preprocess_error"),
        ({"sol_sql": ["SELECT city, FROM people"]}, "gold_error"),
        ({"sol_sql": [SLOW]}, "gold_timeout"),
        ({"sol_sql": ["SELECT zeroblob(20000000)"]}, "gold_too_big"),
        ({"sol_sql": [SLOW.replace("max(x)", "x")]}, "gold_too_big"),
        ({"sol_sql": ["SELECT 1 WHERE 0"]}, "gold_empty"),
        ({"sol_sql": ["SELECT random()"]}, "gold_varies"),
        ({"checks": [{"type": "state", "query": "SELECT 1", "expect": [[2]]}]}, "gold_fails"),
        ({"checks": [{"type": "poetry"}]}, "gold_fails"),
        ({"issue_sql": ["SELECT city FROM people WHERE age >= 41"]}, "issue_passes"),
        ({"sol_sql": ["SELECT 1"]}, "probe_passes:noop"),
        ({"clean_up_sql": ["DROP TABLE nowhere"]}, "cleanup_error"),
        ({"dialect": "MySQL"}, "dialect"),
        ({"checks": [{"type": "result"}], "test_cases": [FAILS]}, "forms_disagree"),
    ],
)
def test_each_problem_has_its_name(bench: Bench, changes: dict[str, Any], problem: str):
    found = record(bench, **changes)
    assert problem in found["problems"] and not found["valid"] and found["detail"]


TABLE = ["CREATE TABLE t (name TEXT, score INTEGER, code TEXT); INSERT INTO t VALUES ('a', 5, '9'), ('b', 5, '10'), ('c', NULL, '100'), ('d', 1, '8')"]


@pytest.mark.parametrize(
    ("gold", "lints"),
    [
        ("SELECT name FROM t ORDER BY score DESC LIMIT 1", ["tie_at_limit"]),
        ("SELECT name FROM t WHERE score = 5 ORDER BY score LIMIT 1 OFFSET 1", ["tie_at_limit"]),
        ("SELECT name FROM t LIMIT 2", ["limit_without_order"]),
        ("SELECT name, score FROM t ORDER BY score", ["null_first"]),
        ("SELECT code FROM t ORDER BY code", ["text_numbers"]),
        ("SELECT name, date('now') FROM t", ["uses_clock"]),
        ("SELECT group_concat(name) FROM t", ["order_dependent"]),
        ("SELECT name FROM t ORDER BY name LIMIT 3", []),
        ("SELECT name FROM t ORDER BY score DESC", []),
    ],
)
def test_each_lint_points_at_its_habit_and_makes_nothing_invalid(bench: Bench, gold: str, lints: list[str]):
    found = record(bench, preprocess_sql=TABLE, sol_sql=[gold])
    assert (found["lints"], found["problems"]) == (lints, [])


def test_the_command_prints_the_contract_and_exits_by_validity(people: Path, tmp_path: Path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    records = [debugging().record(), debugging(instance_id="p1").record(), {**debugging(instance_id="bad").record(), "sol_sql": []}]
    tasks.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    arguments = [
        "validate",
        str(tasks),
        "--databases",
        str(people),
        "--store",
        str(tmp_path / "store"),
        "--fix-report",
        str(tmp_path / "fix.json"),
        "--workers",
        "2",
    ]
    assert main([*arguments, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"command", "totals", "warnings", "sqlite", "elapsed", "instances"}
    assert result["totals"] == {"instances": 3, "valid": 2, "invalid": 1} and "'p1#2'" in result["warnings"][0]
    assert [list(r) for r in result["instances"]] == [
        ["instance_id", "db_id", "task", "category", "difficulty", "valid", "gold", "issue", "probes", "problems", "lints", "detail", "seconds"]
    ] * 3
    fix = json.loads((tmp_path / "fix.json").read_text())
    assert [entry["instance_id"] for entry in fix["leave_out"]] == ["bad"]
    tasks.write_text(json.dumps(records[0]) + "\n", encoding="utf-8")
    assert main(arguments) == 0 and "1 of 1 instances are valid" in capsys.readouterr().out


@pytest.mark.slow
def test_all_seventy_three_instances_and_seventy_seven_questions_are_valid(shared: Path, tmp_path: Path):
    data = shared / "data" / "sql"
    for name, count in (("critic_dev.jsonl", 73), ("bird_superhero_dev.jsonl", 77)):
        result = validate(data / name, GradingOptions((data / "db",), tmp_path / "store"), workers=2)
        assert result["totals"] == {"instances": count, "valid": count, "invalid": 0}, [r for r in result["instances"] if not r["valid"]]
        assert all(code != "correct" for r in result["instances"] for code in r["probes"].values())
