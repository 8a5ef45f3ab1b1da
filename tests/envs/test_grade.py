"""Outcomes: one code an answer, in the order of the contract, and never the agent's for what is ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from grading_support import FEW, generation, verdict

from savepoint.envs.sql.grade import Grader, SelfTestFailed, Verdict
from savepoint.envs.sql.run import Limits, Run
from savepoint.envs.sql.tasks import read_tasks
from savepoint.envs.sql.world import World
from savepoint.state import StateError
from tests_support import debugging

SETUP = ["CREATE TABLE scores (name TEXT, points INTEGER); INSERT INTO scores VALUES ('a', 3), ('b', 3), ('c', 1), ('d', NULL), ('e', 3)"]
TOP = {"preprocess_sql": SETUP, "sol_sql": ["SELECT name FROM scores ORDER BY points DESC LIMIT 2"]}


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [
        ("SELECT name FROM scores WHERE points = 3 LIMIT 2", "correct"),
        ("VALUES ('e'), ('b')", "correct"),
        ("VALUES ('e'), ('c')", "wrong_result"),
        ("VALUES ('e'), ('e')", "wrong_result"),
        ("SELECT name FROM scores WHERE points = 3", "wrong_result"),
    ],
)
def test_where_a_limit_cuts_a_tie_any_choice_is_right(world: World, sql: str, outcome: str):
    assert verdict(world, sql, **TOP).outcome == outcome


def test_strict_ties_compare_row_by_row(world: World):
    task = debugging(**TOP)
    strict = Grader(world.backend, FEW, ties="strict")
    assert strict.grade(world.image(task), task, ["VALUES ('e'), ('b')"]).outcome == "wrong_result"
    assert strict.grade(world.image(task), task, task.sol_sql).outcome == "correct"


@pytest.mark.parametrize(
    ("sql", "conditions", "outcome"),
    [
        ("SELECT name FROM scores ORDER BY points", {}, "wrong_result"),
        ("SELECT name FROM scores ORDER BY points DESC, name DESC", {}, "correct"),
        ("SELECT name FROM scores ORDER BY points", {"order": False}, "correct"),
    ],
)
def test_the_golds_own_order_counts_and_conditions_win_over_it(world: World, sql: str, conditions: dict[str, object], outcome: str):
    gold = ["SELECT name FROM scores ORDER BY points DESC"]
    assert verdict(world, sql, preprocess_sql=SETUP, sol_sql=gold, conditions=conditions).outcome == outcome


def test_an_ordered_comparison_without_order_by_is_row_by_row(world: World):
    fields = {"preprocess_sql": SETUP, "sol_sql": ["SELECT name FROM scores"], "conditions": {"order": True}}
    assert verdict(world, "SELECT name FROM scores ORDER BY name", **fields).outcome == "correct"
    assert verdict(world, "SELECT name FROM scores ORDER BY name DESC", **fields).outcome == "wrong_result"


@pytest.mark.parametrize(
    ("conditions", "outcome"), [({}, "wrong_result"), ({"decimal": 2}, "correct"), ({"decimal": [2]}, "correct"), ({"decimal": -1}, "wrong_result")]
)
def test_decimal_says_which_digits_matter(world: World, conditions: dict[str, object], outcome: str):
    assert verdict(world, "SELECT 3.14", sol_sql=["SELECT 3.14159"], conditions=conditions).outcome == outcome


def test_the_last_statement_with_columns_answers_even_with_no_rows(world: World):
    gold = ["SELECT city FROM people WHERE age > 40"]
    assert verdict(world, ["SELECT 7", gold[0], "CREATE INDEX i ON people(city)"], sol_sql=gold).outcome == "correct"
    assert verdict(world, [gold[0], "SELECT 1 WHERE 0"], sol_sql=gold).outcome == "wrong_result"
    assert verdict(world, "CREATE INDEX i ON people(city)", sol_sql=gold).detail == "no statement gives rows"
    inserted = ["INSERT INTO notes VALUES (1, 'x') RETURNING text"]
    assert verdict(world, "INSERT INTO notes SELECT 1, 'x' RETURNING text", sol_sql=inserted).outcome == "correct"


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [
        ("", "no_answer"),
        (" ; -- nothing\n/* at all */;", "no_answer"),
        ("```sql\nSELECT 1\n```", "sql_error"),
        ("SELECT 1; that is all", "sql_error"),
        ("SELECT 1\0", "sql_error"),
        ("SELECT '\ud800'", "sql_error"),
        ("SELECT zeroblob(20000000)", "too_big"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c", "too_big"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT sum(x) FROM c", "timeout"),
        ("ATTACH 'x.db' AS x", "denied"),
        ("VACUUM INTO 'x.db'", "denied"),
        ("SELECT load_extension('x')", "denied"),
        ("PRAGMA journal_mode = off", "denied"),
        ("PRAGMA hard_heap_limit = 1", "denied"),
        ("PRAGMA temp_store_directory = '/tmp'", "denied"),
        ("PRAGMA writable_schema = 1", "denied"),
        ("SELECT nobody FROM people; DROP TABLE people", "sql_error"),
    ],
)
def test_each_way_to_fail_has_its_code(world: World, sql: str, outcome: str):
    assert verdict(world, sql).outcome == outcome


@pytest.mark.parametrize(
    "sql", ["VACUUM", "ANALYZE", "BEGIN; UPDATE people SET age = age; COMMIT", "SELECT REPLACE('a', 'a', 'b')", "PRAGMA foreign_keys = 1", "REINDEX"]
)
def test_what_is_harmless_is_allowed_in_debugging(world: World, sql: str):
    assert verdict(world, [sql, "SELECT city FROM people WHERE age > 40"]).outcome == "correct"


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM people RETURNING city",
        "WITH x AS (SELECT 1) UPDATE people SET age = 1",
        "CREATE TEMP TABLE t(a)",
        "CREATE TEMP VIEW people AS SELECT 1 AS city",
        "SELECT * FROM pragma_optimize(0x10002)",
        "PRAGMA user_version(9)",
        "PRAGMA user_version = 9",
        "VACUUM",
        "ANALYZE",
        "ATTACH '' AS x",
        "REPLACE INTO notes VALUES (1, 2)",
    ],
)
def test_generation_denies_the_whole_answer_for_one_statement_that_writes(world: World, sql: str):
    task = generation()
    assert Grader(world.backend, FEW).grade(world.image(task), task, [sql, "SELECT city FROM people"]).outcome == "denied"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT city FROM people WHERE 'DELETE' <> REPLACE('x', 'x', 'created_at')",
        "PRAGMA table_info(people); SELECT city FROM people",
        "SELECT name FROM sqlite_master; SELECT city FROM people",
    ],
)
def test_generation_judges_statements_not_words(world: World, sql: str):
    task = generation()
    assert Grader(world.backend, FEW).grade(world.image(task), task, [sql]).outcome == "correct"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"sol_sql": []}, "invalid_instance"),
        ({"sol_sql": ["SELECT nobody FROM people"]}, "invalid_instance"),
        ({"sol_sql": ["SELECT 1 WHERE 0"]}, "invalid_instance"),
        ({"sol_sql": ["SELECT random()"]}, "invalid_instance"),
        ({"sol_sql": ["SELECT id FROM people ORDER BY random() LIMIT 3"]}, "invalid_instance"),
        ({"sol_sql": ["WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT max(x) FROM c"]}, "gold_timeout"),
        ({"sol_sql": ["SELECT zeroblob(20000000)"]}, "invalid_instance"),
        ({"dialect": "PostgreSQL"}, "invalid_instance"),
        ({"checks": [{"type": "poetry"}]}, "invalid_instance"),
        ({"checks": [{"type": "state", "query": 7, "expect": []}]}, "invalid_instance"),
    ],
)
def test_an_instance_that_proves_nothing_is_never_scored(world: World, changes: dict[str, object], outcome: str):
    found = verdict(world, "SELECT 1", **changes)
    assert (found.outcome, found.reward) == (outcome, None)


def test_random_in_a_view_of_the_database_is_seen(world: World):
    fields = {"preprocess_sql": ["CREATE VIEW dice AS SELECT random() AS n"], "sol_sql": ["SELECT n FROM dice"]}
    assert verdict(world, "SELECT n FROM dice", **fields).outcome == "invalid_instance"


def test_the_clock_is_the_same_for_gold_and_prediction_and_the_task_may_set_it(world: World):
    sol = ["SELECT CURRENT_TIMESTAMP"]
    assert verdict(world, "SELECT datetime('now')", sol_sql=sol).outcome == "correct"
    assert verdict(world, "SELECT '2025-01-01 00:00:00'", sol_sql=sol).outcome == "correct"
    assert verdict(world, "SELECT '2031-02-03 04:05:06'", sol_sql=sol, conditions={"now": "2031-02-03T04:05:06Z"}).outcome == "correct"
    task = debugging(sol_sql=sol)
    assert Grader(world.backend, now="2024-02-29T00:00:00Z").grade(world.image(task), task, ["SELECT '2024-02-29 00:00:00'"]).outcome == "correct"


def test_infrastructure_is_tried_once_more_and_then_never_scored(world: World, monkeypatch):
    task, grader = debugging(), Grader(world.backend, FEW)
    image = world.image(task)
    assert grader.grade(image, task, task.sol_sql).outcome == "correct"
    lease, failures = world.backend.lease, [1]

    def unwell(*arguments: object, **options: object):
        if failures[0]:
            failures[0] -= 1
            raise StateError("no worker")
        return lease(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(world.backend, "lease", unwell)
    assert grader.grade(image, task, task.sol_sql).outcome == "correct"
    failures[0] = 2
    found = grader.grade(image, task, task.sol_sql)
    assert (found.outcome, found.reward) == ("infra", None)


def test_a_gold_that_failed_for_our_reasons_is_run_again(world: World, monkeypatch):
    task, grader = debugging(), Grader(world.backend, FEW)
    image = world.image(task)
    grader.self_test()
    lease = world.backend.lease
    monkeypatch.setattr(world.backend, "lease", lambda *a, **o: (_ for _ in ()).throw(StateError("down")))
    assert grader.grade(image, task, task.sol_sql).outcome == "infra"
    monkeypatch.setattr(world.backend, "lease", lease)
    assert grader.grade(image, task, task.sol_sql).outcome == "correct"


def test_a_gold_whose_run_was_infrastructure_is_not_kept(world: World, monkeypatch):
    task, grader = debugging(), Grader(world.backend, FEW)
    image = world.image(task)
    grader.self_test()
    with monkeypatch.context() as patched:
        patched.setattr(type(grader.runner), "run", lambda *a, **o: Run((), Verdict("infra", "worker died")))
        assert grader.grade(image, task, task.sol_sql).outcome == "infra"
    assert grader.grade(image, task, task.sol_sql).outcome == "correct"


def test_a_grader_that_cannot_tell_right_from_wrong_refuses_to_start(world: World, monkeypatch):
    monkeypatch.setattr("savepoint.envs.sql.grade.difference", lambda *a, **o: None)
    task = debugging()
    with pytest.raises(SelfTestFailed, match="self-test"):
        Grader(world.backend).grade(world.image(task), task, task.sol_sql)


def test_caches_go_by_the_exact_text(world: World):
    grader = Grader(world.backend, FEW)
    for text in ("x", "X", "x "):
        assert verdict(world, f"SELECT '{text}'", grader=grader, sol_sql=[f"SELECT '{text}'"]).outcome == "correct"
    assert verdict(world, "SELECT 'x'", grader=grader, sol_sql=["SELECT 'X'"]).outcome == "wrong_result"


def test_the_gold_runs_once_and_the_prediction_once(world: World, monkeypatch):
    task, grader = debugging(), Grader(world.backend, FEW)
    image = world.image(task)
    grader.self_test()
    ran = runs_of(monkeypatch, grader)
    for _ in range(3):
        grader.grade(image, task, ["SELECT city FROM people WHERE age >= 41"])
    assert ran.count(task.sol_sql[0]) == 1 and len(ran) == 4


def runs_of(monkeypatch: pytest.MonkeyPatch, grader: Grader) -> list[str]:
    """The first strings of all that the grader runs from now on."""
    ran: list[str] = []
    run = type(grader.runner).run
    monkeypatch.setattr(type(grader.runner), "run", lambda self, session, sql, **o: ran.append(sql[0]) or run(self, session, sql, **o))
    return ran


def test_runs_are_reused_for_the_exact_text_on_the_same_image_where_asked(world: World, monkeypatch):
    task, moved = debugging(), debugging(instance_id="d2", preprocess_sql=["UPDATE people SET age = age + 30"])
    grader = Grader(world.backend, FEW, reuse_runs=True)
    grader.self_test()
    ran = runs_of(monkeypatch, grader)
    wrong = "SELECT city FROM people WHERE age >= 70"
    for _ in range(3):
        assert grader.grade(world.image(task), task, task.sol_sql).outcome == "correct"
        assert grader.grade(world.image(task), task, [wrong]).outcome == "wrong_result"
        assert grader.grade(world.image(task), task, ["SELEC"]).outcome == "sql_error"
    assert ran == [task.sol_sql[0], wrong, "SELEC"]  # the gold's own run answers for the same text handed in
    first = grader.examine(world.image(task), task, [wrong]).run
    second = grader.examine(world.image(moved), moved, [wrong]).run
    assert first is not None and second is not None and first.rows != second.rows
    assert grader.grade(world.image(task), task, [wrong + " "]).outcome == "wrong_result"
    assert ran[3:] == [moved.sol_sql[0], wrong, wrong + " "]


@pytest.mark.parametrize("sql", ["WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c", "UPDATE people SET age = 1; SELECT 1"])
def test_runs_that_time_out_or_change_something_are_never_reused(sql: str, world: World, monkeypatch):
    task, grader = debugging(), Grader(world.backend, Limits(deadline_s=0.1), reuse_runs=True)
    grader.grade(world.image(task), task, task.sol_sql)
    ran = runs_of(monkeypatch, grader)
    outcomes = [grader.grade(world.image(task), task, [sql]).outcome for _ in range(2)]
    assert outcomes[0] == outcomes[1] != "correct" and ran == [sql, sql]


@pytest.mark.parametrize("name", ["critic_dev.jsonl", "bird_superhero_dev.jsonl"])
def test_every_gold_is_right_and_every_issue_wrong_on_real_instances(shared: Path, name: str, tmp_path_factory):
    data = shared / "data" / "sql"
    world = World(data / "db")
    grader = Grader(world.backend)
    for task in read_tasks(data / name):
        image = world.image(task)
        assert grader.grade(image, task, task.sol_sql).outcome == "correct", task.instance_id
        assert not task.issue_sql or grader.grade(image, task, task.issue_sql).reward == 0.0, task.instance_id
    world.close()
