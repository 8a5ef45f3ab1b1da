"""Python tests: run as published, on a real file, in a process that reaches nothing else; what they try never ends a grading."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grading_support import FEW

from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.verdict import Verdict
from savepoint.envs.sql.world import World
from tests_support import debugging

HEAD = "def test_case(pred_sqls, sol_sqls, db_path, conn, conditions=None):\n"
DEFAULT = HEAD + (
    "    pred_sqls, sol_sqls = (remove_round(remove_distinct(remove_comments(sqls))) for sqls in (pred_sqls, sol_sqls))\n"
    "    assert ex_base(pred_sqls, sol_sqls, db_path, conn, conditions) == 1\n"
)
# A way round the list of imports, as one finds it on the web: only the kernel stands in its way.
ESCAPE = "    os = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__\n"


@pytest.fixture
def grader(world: World) -> Iterator[Grader]:
    made = Grader(world.backend, FEW)
    yield made
    made.close()


def run(world: World, grader: Grader, *bodies: str, sql: str | list[str] = "SELECT city FROM people WHERE age > 40", **changes: object) -> Verdict:
    texts = [body if body.startswith(("def", "import", "x")) else HEAD + body for body in bodies]
    task = debugging(test_cases=texts, **changes)
    return grader.grade(world.image(task), task, [sql] if isinstance(sql, str) else sql)


def test_the_published_default_test_pays_for_the_gold_and_not_for_others(world: World, grader: Grader):
    assert run(world, grader, DEFAULT).outcome == "correct"
    assert run(world, grader, DEFAULT, sql="SELECT DISTINCT city FROM people WHERE age > 40 -- as published, sets").outcome == "correct"
    found = run(world, grader, DEFAULT, sql="SELECT name FROM people")
    assert (found.outcome, found.check) == ("test_failed", 0) and found.detail == "line 3: AssertionError"


def test_each_test_has_a_database_of_its_own_on_which_the_prediction_ran_once(world: World, grader: Grader):
    count = (
        "    n = conn.execute('SELECT count(*) FROM notes').fetchone()[0]\n    conn.execute(\"INSERT INTO notes VALUES (9, 'test')\")\n    assert n == 1, n\n"
    )
    insert = "INSERT INTO notes VALUES (1, 'once')"
    assert run(world, grader, count, count, sql=insert, sol_sql=[insert]).outcome == "correct"


def test_statements_come_one_a_string_and_rows_of_the_single_run_are_there(world: World, grader: Grader):
    body = (
        "    assert pred_sqls == ['SELECT 1;', 'SELECT 2, NULL'] and sol_sqls == ['SELECT 3;', 'SELECT 4'], pred_sqls\n"
        "    assert pred_query_result == [(2, None)]\n"
    )
    assert run(world, grader, body, sql="SELECT 1; SELECT 2, NULL", sol_sql=["SELECT 3; SELECT 4"]).outcome == "correct"


def test_helpers_run_prediction_and_gold_on_the_task_image_and_the_rest_on_the_connection(world: World, grader: Grader):
    body = (
        "    for sqls in (pred_sqls, remove_comments(pred_sqls)):\n"
        "        assert execute_queries(sqls, db_path, conn) == ([(2,)], False, False)\n"
        "    assert execute_queries(sol_sqls, db_path, conn)[0] == [(2,)]\n"
        "    assert execute_queries('SELECT count(*) FROM made', db_path, conn)[0] == [(1,)]\n"
        "    assert execute_queries(['SELECT nobody'], db_path, conn) == (None, True, False)\n"
    )
    gold = "CREATE TABLE made(a); INSERT INTO made VALUES (1); SELECT 2"
    assert run(world, grader, body, sql=gold + " AS mine -- mine", sol_sql=[gold]).outcome == "correct"


def test_a_temp_view_of_the_prediction_hides_nothing_from_the_gold(world: World, grader: Grader):
    found = run(world, grader, DEFAULT, sql="CREATE TEMP VIEW people AS SELECT 'x' AS city, 50 AS age; SELECT city FROM people WHERE age > 40")
    assert found.outcome == "test_failed"


def test_conditions_are_passed_to_a_signature_that_has_them_and_to_no_other(world: World, grader: Grader):
    conditions = {"order": True, "decimal": 3}
    with_them = "    assert conditions == {'order': True, 'decimal': 3}\n"
    without = "def test_case(pred_sqls, sol_sqls, db_path, conn):\n    assert isinstance(db_path, str)\n"
    assert run(world, grader, with_them, without, conditions=conditions).outcome == "correct"


def test_ordinary_computing_is_allowed(world: World, grader: Grader):
    body = (
        "    import re, json, math, sqlite3\n    from decimal import Decimal\n    from collections import Counter\n"
        "    assert sqlite3.connect(db_path).execute('SELECT 1')\n"
    )
    assert (
        run(world, grader, body, "    assert date(2025, 1, 1) and datetime.datetime(2025, 1, 1) and preprocess_results([(1.005, date(2025, 1, 2))])\n").outcome
        == "correct"
    )


@pytest.mark.parametrize(
    ("body", "outcome", "words"),
    [
        ("    import os\n", "test_failed", "a test may not import os"),
        ("    from subprocess import run\n", "test_failed", "a test may not import subprocess"),
        ("    import socket\n", "test_failed", "a test may not import socket"),
        ("    open('/etc/hostname')\n", "test_failed", "may not open"),
        ("    open('../x', 'w')\n", "test_failed", "may not open"),
        ("    raise SystemExit(0)\n", "test_failed", "SystemExit: 0"),
        ("    exit()\n", "test_failed", "SystemExit"),
        ("    raise KeyboardInterrupt\n", "test_failed", "KeyboardInterrupt"),
        ("    while True: pass\n", "timeout", "did not end within"),
        ("    while True:\n        try:\n            while True: pass\n        except BaseException: pass\n", "timeout", "did not end within"),
        ("    x = 'x' * 10**11\n", "test_failed", "MemoryError"),
        ("    conn.execute('WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT sum(x) FROM c')\n", "timeout", "did not end within"),
        ("    return 1 / 0\n", "test_failed", "line 2: ZeroDivisionError: division by zero"),
        ("def other(): pass\n", "test_failed", "defines no test_case"),
        ("def test_case(: pass\n", "test_failed", "SyntaxError"),
    ],
)
def test_what_a_test_may_not_do_fails_it_with_a_reason(world: World, grader: Grader, body: str, outcome: str, words: str):
    found = run(world, grader, body)
    assert found.outcome == outcome and words in found.detail
    assert run(world, grader, DEFAULT).outcome == "correct"  # and the next one runs


def test_megabytes_of_output_go_nowhere(world: World, grader: Grader, capfd):
    body = "    import traceback\n    for file in (None, traceback.sys.stderr):\n        for _ in range(50): print('x' * 1_000_000, file=file)\n"
    assert run(world, grader, body).outcome == "correct"
    out, err = capfd.readouterr()
    assert len(out) + len(err) < 1000


def test_a_test_may_write_in_its_own_folder_which_is_gone_afterwards(world: World, grader: Grader, tmp_path: Path):
    body = "    with open('mine.txt', 'w') as f: f.write('x')\n    assert open(db_path.replace('database.sqlite', 'mine.txt')).read() == 'x'\n"
    assert run(world, grader, body + "    assert 0, db_path\n").outcome == "test_failed"
    path = run(world, grader, body + "    assert 0, db_path\n").detail.split("AssertionError: ")[1]
    assert path.endswith("database.sqlite") and not Path(path).parent.exists()


@pytest.mark.parametrize(
    "attempt",
    [
        "os['system']('touch {mark}')",
        "os['open']('{mark}', 65)",
        "os['fork']()",
        "os['sys'].modules['socket'].socket()",
        "os['kill'](1, 9)",
        "os['rename'](db_path, '{mark}')",
    ],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part of the sandbox needs Linux")
def test_round_the_list_of_imports_the_kernel_still_refuses(world: World, grader: Grader, tmp_path: Path, attempt: str):
    mark = tmp_path / "mark"
    found = run(world, grader, ESCAPE + f"    {attempt.format(mark=mark)}\n")
    assert not mark.exists() and (found.outcome == "test_failed" or "system" in attempt)


def test_a_test_that_ends_its_process_has_failed(world: World, grader: Grader):
    found = run(world, grader, ESCAPE + "    os['_exit'](0)\n")
    assert (found.outcome, found.detail) == ("test_failed", "the test ended its process")


def test_a_dead_test_process_is_ours_and_replaced(world: World, grader: Grader):
    assert run(world, grader, DEFAULT).outcome == "correct"
    assert grader._python is not None and grader._python._process is not None
    grader._python._process.kill()
    grader._python._process.wait()
    assert run(world, grader, DEFAULT).outcome == "correct"


def test_helpers_of_efficiency_count_steps_and_of_usage_tokens(world: World, grader: Grader):
    body = (
        "    assert performance_compare_by_qep(['SELECT count(*) FROM people a, people b WHERE a.id + 0 = b.id'], pred_sqls, db_path, conn) == 1\n"
        "    assert performance_compare_by_qep(pred_sqls, pred_sqls, db_path, conn) == 0\n"
        "    assert check_sql_function_usage(pred_sqls, ['select', 'WHERE']) == 1 and check_sql_function_usage(pred_sqls, ['>= ']) == 0\n"
        "    assert check_sql_function_usage([\"SELECT 'JOIN'\"], ['JOIN']) == 0\n"
    )
    assert run(world, grader, body).outcome == "correct"


def test_text_that_is_no_utf8_reaches_a_test_and_ends_nothing(world: World, grader: Grader):
    sql = "SELECT CAST(X'41FF42' AS TEXT)"
    body = "    assert pred_query_result == [('A\\udcffB',)] == conn.execute(pred_sqls[0]).fetchall()\n"
    assert run(world, grader, body, sql=sql, sol_sql=[sql]).outcome == "correct"


def test_no_process_is_left_when_the_grader_closes(world: World):
    made = Grader(world.backend, FEW)
    run(world, made, DEFAULT)
    assert made._python is not None and made._python._process is not None
    pid = made._python._process.pid
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
