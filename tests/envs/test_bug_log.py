"""Twenty-one public bug reports on text-to-SQL harnesses, by their numbers in the log: the reported input, and what becomes of it here."""

from __future__ import annotations

import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from grading_support import FEW, generation, verdict

from savepoint.envs.sql.compare import difference
from savepoint.envs.sql.grade import Grader, Limits
from savepoint.envs.sql.lexer import remove_comments, remove_distinct
from savepoint.envs.sql.predictions import read_predictions
from savepoint.envs.sql.published import soft_f1
from savepoint.envs.sql.tasks import Task
from savepoint.envs.sql.world import World
from savepoint.state import open_backend
from tests_support import debugging

RIGHT = "SELECT city FROM people WHERE age > 40"
CROSS = "SELECT count(*) FROM people a, people b, people c, people d, people e, people f"
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT x FROM c"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_report_1_an_error_is_a_status_and_an_empty_or_clock_bound_gold_is_refused(world: World):
    assert verdict(world, "SELECT x FROM nowhere", sol_sql=["SELECT id FROM people WHERE id < 0"]).reward is None
    by_clock = ["SELECT name FROM people WHERE date('now') = '2025-01-01' AND id < 4"]
    assert verdict(world, "SELECT name FROM people WHERE id < 4", sol_sql=by_clock).reward == 1.0  # the clock is pinned: whoever reads the question can pass


def test_report_2_duplicates_and_order_count(world: World):
    assert verdict(world, "SELECT city FROM people", sol_sql=["SELECT DISTINCT city FROM people"]).outcome == "wrong_result"
    assert verdict(world, "SELECT DISTINCT city FROM people ORDER BY 1 DESC", sol_sql=["SELECT DISTINCT city FROM people ORDER BY 1"]).outcome == "wrong_result"


def test_report_3_a_gold_that_is_too_slow_has_a_status_of_its_own(world: World):
    assert verdict(world, "SELECT 1", sol_sql=[CROSS]).outcome == "gold_timeout"


def test_report_4_mismatch_time_out_and_crash_are_told_apart(world: World):
    assert [verdict(world, sql).outcome for sql in ("SELECT 1", CROSS, "SELEC 1")] == ["wrong_result", "timeout", "sql_error"]


def test_report_5_a_time_out_leaves_neither_threads_nor_work(world: World):
    verdict(world, RIGHT)
    threads = threading.active_count()
    assert verdict(world, CROSS, limits=Limits(deadline_s=0.3)).outcome == "timeout"
    used = sum(psutil.Process().cpu_times()[:2])
    time.sleep(0.3)
    assert threading.active_count() <= threads and sum(psutil.Process().cpu_times()[:2]) - used < 0.15


def test_report_6_results_beyond_a_pipes_buffer_arrive(people: Path, tmp_path: Path):
    sql = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 20000) SELECT x, printf('%064d', x) FROM c"
    with open_backend("sqlite", store=tmp_path / "store", workers=1) as backend:
        assert verdict(World(people, backend=backend), sql, sol_sql=[sql], limits=Limits(deadline_s=20)).reward == 1.0


def test_report_7_one_cell_that_is_no_utf8_is_compared_and_shown(world: World):
    gold = ["SELECT CAST(X'41FF42' AS TEXT)"]
    assert verdict(world, gold[0], sol_sql=gold).reward == 1.0
    found = verdict(world, "SELECT CAST(X'41FE42' AS TEXT)", sol_sql=gold)
    assert found.outcome == "wrong_result" and found.detail.encode("utf-8")


def test_report_8_failing_queries_leak_no_descriptor(world: World):
    task, grader = debugging(), Grader(world.backend, FEW)
    image = world.image(task)
    grader.grade(image, task, ["SELECT * FROM missing"])
    gc.collect()
    before = descriptors()
    for _ in range(300):
        assert grader.grade(image, task, ["SELECT * FROM missing"]).outcome == "sql_error"
    assert descriptors() <= before + 2


def test_report_9_a_models_write_reaches_no_file_and_no_other_answer(people: Path, world: World):
    before = (people / "people.sqlite").read_bytes()
    task, grader = generation(sol_sql=["SELECT count(*) FROM people"]), Grader(world.backend, FEW)
    assert grader.grade(world.image(task), task, ["DROP TABLE people"]).outcome == "denied"
    assert grader.grade(world.image(task), task, ["SELECT 60"]).reward == 1.0
    assert (people / "people.sqlite").read_bytes() == before


def test_report_10_an_answer_that_makes_an_index_runs_once(world: World):
    assert verdict(world, ["CREATE INDEX ix ON people(age)", RIGHT]).reward == 1.0


def test_report_11_distinct_is_found_by_tokens():
    assert "DISTINCT" not in remove_distinct("SELECT\nDISTINCT a FROM t").upper() and remove_distinct("SELECT 'a distinct b'") == "SELECT 'a distinct b'"
    assert remove_distinct("SELECT -- comment\n DISTINCT a\nFROM t").split("\n")[0] == "SELECT -- comment"


def test_report_12_a_gold_that_does_not_run_makes_its_instance_invalid(world: World):
    assert verdict(world, RIGHT, sol_sql=["SELECT city, FROM people"]).outcome == "invalid_instance"


def test_report_13_sorted_keys_change_nothing(tmp_path: Path):
    answers = {str(i): f"SELECT {i}" for i in range(12)}
    path = tmp_path / "p.json"
    path.write_text(json.dumps(answers, sort_keys=True), encoding="utf-8")
    assert {p.instance_id: p.statements[0] for p in read_predictions(path)} == answers


def test_report_14_a_limit_through_a_tie_takes_any_choice(world: World):
    fields = {
        "preprocess_sql": ["CREATE TABLE t AS SELECT 'a' AS name, 5 AS score UNION ALL SELECT 'b', 5"],
        "sol_sql": ["SELECT name FROM t ORDER BY score DESC LIMIT 1"],
    }
    assert (
        verdict(world, "SELECT 'a'", **fields).reward == 1.0
        and verdict(world, "SELECT 'b'", **fields).reward == 1.0
        and verdict(world, "SELECT 'c'", **fields).reward == 0.0
    )


def test_report_15_rows_in_any_order_are_right_and_scrambled_rows_are_not():
    assert difference([(1,), (2,), (3,)], [(3,), (1,), (2,)]) is None and soft_f1([(1,), (2,), (3,)], [(3,), (1,), (2,)]) == 0.0
    assert difference([(1, "b"), (2, "a")], [(1, "a"), (2, "b")]) is not None


@pytest.mark.parametrize("sql", ["SELECT zeroblob(200000000)", ENDLESS])
def test_report_16_results_are_bounded_in_rows_and_in_bytes(world: World, sql: str):
    before = psutil.Process().memory_info().rss
    assert verdict(world, sql).outcome == "too_big"
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_report_17_a_lock_is_nobodys_since_nobody_shares_a_file(world: World):
    image = world.image(debugging())
    with world.backend.lease(image, owner="other") as other:
        other.execute("BEGIN IMMEDIATE; UPDATE people SET age = 1")
        sql = "UPDATE people SET age = 2 WHERE id = 1"
        assert verdict(world, sql, sol_sql=[sql]).reward == 1.0


def test_report_18_answers_are_graded_from_any_thread(world: World):
    task = debugging()
    image = world.image(task)
    grader = Grader(world.backend, FEW)
    grader.grade(image, task, task.sol_sql)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: grader.grade(image, task, task.sol_sql).outcome, range(16)))
    assert set(found) == {"correct"}


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [
        (ENDLESS, "too_big"),
        (ENDLESS.replace("SELECT x FROM", "SELECT max(x) FROM"), "timeout"),
        ("WITH RECURSIVE d(x) AS (SELECT '2025-01-01' UNION ALL SELECT date(x) FROM d) SELECT count(*) FROM d", "timeout"),
    ],
)
def test_report_19_a_runaway_recursion_ends(world: World, sql: str, outcome: str):
    assert verdict(world, sql).outcome == outcome


def test_report_20_comments_end_at_their_line_and_no_sql_is_no_answer(world: World):
    assert remove_comments("SELECT 1 -- a\n, 2").split() == ["SELECT", "1", ",", "2"]
    for text in ("", "-- I cannot do that", "/* SELECT 1 */"):
        assert verdict(world, text, sol_sql=["SELECT 1"]).outcome == "no_answer"


def test_report_21_an_unparsable_answer_is_counted_by_its_own_code(world: World):
    assert verdict(world, "<solution>SELECT 1", sol_sql=["SELECT 1"]).outcome == "sql_error" and verdict(world, [], sol_sql=["SELECT 1"]).outcome == "no_answer"


def test_three_thousand_real_answers_pass_through_the_splitter_and_the_classifier(shared: Path, world: World):
    from savepoint.state import split_statements

    lines = (shared / "data" / "sql" / "critic_sqlite_predictions.jsonl").read_text(encoding="utf-8").splitlines()
    task = Task("none", "debugging", "people", "?", ["SELECT 1"], ["SELECT 2"])
    grader, image = Grader(world.backend, Limits(deadline_s=2)), world.image(task)
    empty = several = 0
    outcomes: dict[str, int] = {}
    for i, line in enumerate(lines):
        answer = json.loads(line)["pred_sqls"]
        parts = [split_statements(sql) for sql in answer]
        empty += not any(parts)
        several += any(len(part) > 1 for part in parts)
        assert all(piece in sql for sql, part in zip(answer, parts, strict=True) for piece in part)
        if i % 5 == 0:
            outcome = grader.grade(image, task, answer).outcome
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert (len(lines), empty) == (3000, 70) and several >= 95
    assert set(outcomes) <= {"sql_error", "no_answer", "wrong_result", "wrong_state", "correct", "denied", "timeout", "too_big"}
