"""Declarative checks: each holds for what it asks, fails for what it does not, and looks through a connection of its own."""

from __future__ import annotations

from typing import Any

import pytest
from grading_support import verdict

from savepoint.envs.sql.world import World

GOLD = ["UPDATE people SET age = 1 WHERE city = 'Rome'"]
COUNT = {"type": "state", "query": "SELECT count(*) FROM people WHERE age = 1 AND city = 'Rome'", "expect": [[0]]}


def checked(world: World, sql: str, *checks: dict[str, Any], **changes: Any):
    return verdict(world, sql, **{"checks": list(checks), "sol_sql": ["SELECT city FROM people WHERE age > 40"], **changes})


def test_a_result_check_says_its_own_rules(world: World):
    gold = {"sol_sql": ["SELECT 1.004 AS x UNION ALL SELECT 2 ORDER BY x"]}
    rules = {"order": False, "multiset": False, "places": 2}
    assert checked(world, "SELECT 2 UNION ALL SELECT 1 UNION ALL SELECT 1", {"type": "result", **rules}, **gold).outcome == "correct"
    for changed in ({"multiset": True}, {"order": True}, {"places": None}):
        found = checked(world, "SELECT 2 UNION ALL SELECT 1 UNION ALL SELECT 1", {"type": "result", **rules, **changed}, **gold)
        assert (found.outcome, found.check) == ("wrong_result", 0), changed


def test_a_state_check_sees_what_was_committed_and_nothing_else(world: World):
    n = "SELECT count(*) FROM notes"
    one = {"type": "state", "query": n, "expect": [[1]], "before": []}
    gold = {"sol_sql": ["INSERT INTO notes VALUES (1, 'x')"]}
    assert checked(world, "INSERT INTO notes VALUES (1, 'x')", one, **gold).outcome == "correct"
    for sql in (
        "BEGIN; INSERT INTO notes VALUES (1, 'x')",
        "SAVEPOINT s; INSERT INTO notes VALUES (1, 'x')",
        "CREATE TEMP TABLE notes AS SELECT 1",
        "SELECT 1",
    ):
        assert checked(world, sql, one, **gold).outcome == "wrong_state", sql


def test_pragmas_of_the_prediction_are_gone_when_checks_look(world: World):
    check = {"type": "state", "query": "SELECT foreign_keys FROM pragma_foreign_keys", "expect": [[0]]}
    assert checked(world, "PRAGMA foreign_keys = 1", check, sol_sql=["SELECT 1"]).outcome == "correct"


def test_before_statements_change_a_fork_that_no_other_check_sees(world: World):
    n = "SELECT count(*) FROM notes"
    insert = {"type": "state", "before": ["INSERT INTO notes VALUES (1, 'x')"], "query": n, "expect": [[1]]}
    empty = {"type": "state", "query": n, "expect": [[0]]}
    raises = {"type": "raises", "query": "INSERT INTO notes VALUES (2, 'y')", "error": False}
    assert checked(world, "SELECT 1", insert, empty, raises, empty, insert).outcome == "correct"


def test_a_before_statement_that_fails_fails_its_check(world: World):
    check = {"type": "state", "before": ["INSERT INTO nowhere VALUES (1)"], "query": "SELECT 1", "expect": [[1]]}
    found = checked(world, "SELECT 1", check)
    assert found.outcome == "wrong_state" and "nowhere" in found.detail


@pytest.mark.parametrize(
    ("error", "sql", "outcome"),
    [
        (True, "ALTER TABLE people ADD COLUMN x INTEGER NOT NULL DEFAULT 1", "correct"),
        (True, "ALTER TABLE people ADD COLUMN x INTEGER", "wrong_state"),
        (False, "ALTER TABLE people ADD COLUMN x INTEGER", "correct"),
        (False, "ALTER TABLE people ADD COLUMN x INTEGER NOT NULL DEFAULT 1", "wrong_state"),
    ],
)
def test_raises_asks_for_an_error_or_for_none(world: World, error: bool, sql: str, outcome: str):
    check = {"type": "raises", "query": "UPDATE people SET x = NULL", "error": error}
    assert checked(world, sql, check, sol_sql=["ALTER TABLE people ADD COLUMN x INTEGER DEFAULT 2"]).outcome == outcome


def test_a_statement_that_runs_out_of_time_is_not_the_error_that_was_asked_for(world: World):
    trigger = "CREATE TRIGGER slow BEFORE INSERT ON notes BEGIN SELECT (WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT sum(x) FROM c); END"
    check = {"type": "raises", "query": "INSERT INTO notes VALUES (1, 'x')", "error": True}
    assert checked(world, trigger, check, sol_sql=["SELECT 1"]).outcome == "timeout"


@pytest.mark.parametrize(
    ("check", "sql", "outcome"),
    [
        ({"type": "uses", "keywords": ["OVER"]}, "SELECT row_number() OVER () FROM people", "correct"),
        ({"type": "uses", "keywords": ["OVER"]}, "SELECT 'OVER' /* OVER */", "wrong_form"),
        ({"type": "forbids", "keywords": ["JOIN"]}, "SELECT 'JOIN' -- JOIN", "correct"),
        ({"type": "forbids", "keywords": ["JOIN"]}, "SELECT 1 FROM people a join notes b", "wrong_form"),
        ({"type": "columns", "names": ["a", "b"]}, "SELECT 1 AS a, 2 AS b; CREATE INDEX i ON people(age)", "correct"),
        ({"type": "columns", "names": ["a", "b"]}, "SELECT 2 AS b, 1 AS a", "wrong_form"),
        ({"type": "columns", "names": ["a"]}, "CREATE INDEX i ON people(age)", "wrong_form"),
        (
            {"type": "plan", "must": ["SEARCH people"], "must_not": [], "query": None},
            "CREATE INDEX i ON people(age); SELECT * FROM people WHERE age = 3; ANALYZE",
            "correct",
        ),
        ({"type": "plan", "must": ["SEARCH people"], "must_not": [], "query": None}, "SELECT * FROM people WHERE age = 3", "wrong_form"),
        ({"type": "plan", "must": [], "must_not": ["SCAN"], "query": "SELECT * FROM people WHERE age = 3"}, "SELECT 1", "wrong_form"),
    ],
)
def test_the_form_of_an_answer(world: World, check: dict[str, Any], sql: str, outcome: str):
    assert checked(world, sql, check, sol_sql=["SELECT 1"]).outcome == outcome


def test_efficiency_counts_vm_steps_against_the_issue_sql_and_no_seconds(world: World):
    slow, quick = "SELECT count(*) FROM people a JOIN people b ON a.id = b.id + 0", "SELECT 60"
    check = {"type": "vm_steps", "max_ratio": 0.5}
    fields = {"issue_sql": [slow], "sol_sql": [quick]}
    assert checked(world, quick, check, **fields).outcome == "correct"
    found = [checked(world, slow, check, **fields) for _ in range(2)]
    assert found[0].outcome == "wrong_form" and found[0] == found[1]


def test_steps_against_an_issue_that_does_not_run_make_the_instance_invalid(world: World):
    assert checked(world, "SELECT 1", {"type": "vm_steps", "max_ratio": 1}, issue_sql=["SELEC"]).outcome == "invalid_instance"


def test_the_first_failing_check_decides_and_is_named(world: World):
    wrong, form = {"type": "state", "query": "SELECT 1", "expect": [[2]]}, {"type": "uses", "keywords": ["OVER"]}
    assert checked(world, "SELECT 1", form, wrong).outcome == "wrong_form"
    assert checked(world, "SELECT 1", {"type": "state", "query": "SELECT 1", "expect": [[1]]}, wrong, form).check == 1
