"""Synthesis: what is kept is right, the same seed gives the same file, and what cannot be used is refused in one line."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from savepoint.envs.sql import databases
from savepoint.envs.sql.bugs import BUGS
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.query import Condition, Query, Ref
from savepoint.envs.sql.renames import RENAMES
from savepoint.envs.sql.synth import QUICK_KINDS, SMALL_FORMS, SMALL_KINDS, Synthesizer, distinct_tasks, synth_command, synthesize
from savepoint.envs.sql.tasks import Task, read_tasks, write_tasks
from savepoint.envs.sql.verify import MAX_ROWS, Images, doubt
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.state import SqliteBackend, open_backend

EVERYTHING = {"forms": tuple(FORMS), "kinds": QUICK_KINDS, "wording": "plain", "max_tables": 50, "max_columns": 400}


@pytest.fixture(scope="module")
def backend(tmp_path_factory) -> Iterator[SqliteBackend]:
    with open_backend("sqlite", store=tmp_path_factory.mktemp("store")) as backend:
        yield backend


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    return databases.build("shop", tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(scope="module")
def small(backend, shop) -> list[Task]:
    return synthesize(shop, 400, seed=1, backend=backend)


@pytest.fixture(scope="module")
def varied(backend, shop) -> list[Task]:
    return synthesize(shop, 500, seed=1, backend=backend, **EVERYTHING)


def make_database(path: Path, script: str, **rows: list[tuple]) -> Path:
    with sqlite3.connect(path) as db:
        db.executescript(script)
        for table, values in rows.items():
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
    db.close()
    return path


def run(path: Path, task: Task, sql: str) -> list[tuple] | str:
    """Rows, or the error's text, by SQLite of the standard library on a copy in memory: nothing of what made the task."""
    with sqlite3.connect(path) as source, sqlite3.connect(":memory:") as db:
        source.backup(db)
        for statement in task.preprocess_sql:
            db.execute(statement)
        try:
            rows = db.execute(sql).fetchall()
        except sqlite3.Error as error:
            rows = str(error)
    source.close()
    db.close()
    return rows


def answer(rows: list[tuple] | str, ordered: bool) -> object:
    return rows if ordered or isinstance(rows, str) else Counter(rows)


@pytest.mark.parametrize("which", ["small", "varied"])
def test_every_gold_answers_and_no_issue_gives_that_answer(which, shop, request):
    for task in request.getfixturevalue(which)[:150]:
        (gold,), (issue,) = task.sol_sql, task.issue_sql
        ordered = "ORDER BY" in gold
        right, wrong = run(shop, task, gold), run(shop, task, issue)
        assert isinstance(right, list) and 0 < len(right) <= MAX_ROWS and right != [(None,)]
        assert answer(wrong, ordered) != answer(right, ordered), task
        assert task.conditions == ({"order": True} if ordered else {})


def test_the_grader_pays_for_every_gold_and_for_no_issue(backend, small, varied, shop):
    grader, world = Grader(backend), World(shop.parent, backend=backend)
    for task in (*small[:60], *varied[:60]):
        image = world.image(task)
        assert grader.grade(image, task, task.sol_sql).reward == 1.0
        assert grader.grade(image, task, task.issue_sql).reward == 0.0


def test_after_a_migration_the_old_name_fails_and_one_guess_of_four_is_right(shop, varied, small):
    renamed = [task for task in (*varied, *small) if task.category in RENAMES]
    assert {task.category for task in renamed} == set(RENAMES)
    for task in renamed[:40] + [t for t in renamed if t.category == "renamed_table"][:10]:
        facts = task.synth
        assert run(shop, task, task.issue_sql[0]) == f"no such {'table' if facts['kind'] == 'renamed_table' else 'column'}: " + (
            f"{facts['table']}.{facts['old']}" if "JOIN" in task.sol_sql[0] and facts["kind"] == "renamed_column" else facts["old"]
        )
        assert len(set(facts["candidates"])) == len(set(facts["guesses"])) == 4
        assert facts["guesses"][facts["candidates"].index(facts["new"])] == task.sol_sql[0]
        assert [isinstance(run(shop, task, guess), list) for guess in facts["guesses"]].count(True) == 1
        without = Task("x", "debugging", "shop", "x", ["SELECT 1"], task.issue_sql)
        assert isinstance(run(shop, without, task.issue_sql[0]), list), "before the migration the query worked"


def test_every_candidate_is_about_equally_often_the_new_name(backend, shop):
    source = Synthesizer(backend, shop, rename_share=1.0)
    rng = random.Random(0)
    facts = [source.task(rng).synth for _ in range(600)]
    source.close()
    places = Counter(f["candidates"].index(f["new"]) for f in facts)
    assert len(places) == 4 and all(110 < count < 190 for count in places.values())


def test_small_policies_get_a_balanced_diet_over_a_part_that_they_can_learn(backend, shop, small):
    kinds, forms = Counter(task.category for task in small), Counter(task.synth["form"] for task in small)
    assert set(kinds) == set(SMALL_KINDS) and set(forms) == set(SMALL_FORMS)
    assert 0.42 < kinds["renamed_column"] / len(small) < 0.58
    assert all(0.15 < count / len(small) < 0.35 for count in forms.values())
    source = Synthesizer(backend, shop)
    assert len(source.part.tables) == 5 and source.part.columns <= 25
    assert all(len(table.all_columns) <= 6 for table in source.part.tables), "a look at a table shows all its columns"
    assert {name for task in small for name in task.synth["tables"]} == {table.name for table in source.part.tables}
    source.close()


def test_all_kinds_and_forms_are_made(varied):
    assert {task.category for task in varied} == {*BUGS, *RENAMES}
    assert {task.synth["form"] for task in varied} == set(FORMS)


def test_the_same_seed_gives_the_same_file_and_another_seed_another(backend, shop, small, tmp_path):
    write_tasks(tmp_path / "a", small)
    with open_backend("sqlite", store=tmp_path / "store") as other:
        write_tasks(tmp_path / "b", synthesize(shop, 400, seed=1, backend=other))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_tasks(tmp_path / "a") == small
    assert {task.instance_id for task in synthesize(shop, 20, seed=2, backend=backend)} - {task.instance_id for task in small}


def test_a_task_of_a_source_depends_on_the_random_numbers_alone(backend, shop):
    fresh, used = Synthesizer(backend, shop), Synthesizer(backend, shop)
    for seed in range(30):
        used.task(random.Random(seed + 1000))
    assert [fresh.task(random.Random(seed)) for seed in range(10)] == [used.task(random.Random(seed)) for seed in range(10)]
    fresh.close()
    used.close()


def test_no_task_is_made_twice(varied):
    assert len({task.instance_id for task in varied}) == len({(t.query, t.issue_sql, t.sol_sql, t.preprocess_sql) for t in varied}) == len(varied)


def test_generation_tasks_have_a_question_and_no_issue(backend, shop):
    tasks = synthesize(shop, 100, backend=backend, task="both", **EVERYTHING)
    generation = [task for task in tasks if task.task == "generation"]
    assert 30 < len(generation) < 70
    for task in generation:
        assert not task.issue_sql and not task.preprocess_sql and task.query.startswith("Give me ")
        assert "question" in task.record() and isinstance(run(shop, task, task.sol_sql[0]), list)


def test_a_thousand_tasks_take_seconds_at_most(backend, shop):
    source = Synthesizer(backend, shop)
    rng = random.Random(5)
    started = time.process_time()
    for _ in range(500):
        source.task(rng)
    source.close()
    assert (time.process_time() - started) / 500 < 0.003, "a training run makes 20,000"


def test_names_that_need_quotes_work_in_every_form(backend, tmp_path):
    rng = random.Random(0)
    script = 'CREATE TABLE "Order Details" ("Unit Price" REAL, "order" TEXT, city TEXT, "größe" INTEGER);'
    script += 'CREATE VIEW "A View" AS SELECT city FROM "Order Details";'
    rows = [(rng.uniform(1, 90), rng.choice(["asc", "desc"]), rng.choice(["Rome", "Oslo", "Bern"]), rng.randint(1, 500)) for _ in range(200)]
    path = make_database(tmp_path / "odd.sqlite", script, **{'"Order Details"': rows})
    tasks = synthesize(path, 60, backend=backend, **{**EVERYTHING, "rename_share": 0.5})
    assert any('"Unit Price"' in task.sol_sql[0] for task in tasks)
    renamed = [task for task in tasks if task.category == "renamed_column"]
    assert renamed and all(task.synth["table"] == '"Order Details"' and task.synth["old"] == "city" for task in renamed)
    for task in tasks:
        assert isinstance(run(path, task, task.sol_sql[0]), list)


@pytest.fixture
def images(backend, tmp_path) -> Iterator[Images]:
    path = make_database(
        tmp_path / "doubt.sqlite", "CREATE TABLE t (id INTEGER PRIMARY KEY, a, w)",
        t=[(i, value, "x" if i < 3 else "y") for i, value in enumerate((5, 4, 4, 3, 2, None))],
    )  # fmt: skip
    images = Images(backend, backend.import_base(path), owner="test")
    yield images
    images.close()


A = Ref("t", "a")


def top(n: int, descending: bool = True) -> Query:
    return Query("top", "t", (Ref("t", "w"), A), order=(A, descending), limit=n)


@pytest.mark.parametrize(
    ("gold", "issue", "why"),
    [
        (Query("list", "t", (A,)), "SELECT a FROM t WHERE a > 3", None),
        (Query("list", "t", (A,)), "SELECT nothing FROM t", None),
        (Query("list", "t", (Ref("t", "b"),)), "SELECT 1", "gold fails"),
        (Query("list", "t", (A,), where=Condition(A, ">", 9)), "SELECT 1", "gold empty"),
        (Query("aggregate", "t", (), ("SUM", A), Condition(A, ">", 9)), "SELECT 1", "gold empty"),
        (top(1), "SELECT 1", None),
        (top(2), "SELECT 1", "gold cuts a tie"),
        (top(3), "SELECT 1", "gold cuts a tie"),
        (top(1, descending=False), "SELECT 1", "gold cuts a tie"),
        (replace(top(2), where=Condition(A, "<", 4)), replace(top(2, descending=False), where=Condition(A, "<", 4)).sql(), None),
        (Query("list", "t", (A,)), "SELECT a FROM t ORDER BY a", "issue does not fail"),
        (top(1), "SELECT w, a FROM t ORDER BY id LIMIT 1", "issue does not fail"),
        (Query("list", "t", (A,)), "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n LIMIT 5000", "issue too big"),
        (Query("list", "t", (A,)), None, None),
    ],
)
def test_what_is_doubtful_is_not_kept(images, gold, issue, why):
    assert doubt(images, images.base, gold, issue) == why


def test_an_old_name_that_still_answers_is_no_migration(images):
    assert doubt(images, images.base, Query("list", "t", (A,)), "SELECT w FROM t", must_fail=True) == "issue does not fail"


def test_an_answer_is_kept_by_image_and_exact_sql(images):
    sql = Query("list", "t", (A,)).sql()
    derived = images.derived("DELETE FROM t WHERE a < 4")
    assert derived is not None and images.derived("DELETE FROM nothing") is None
    assert len(images.answer(images.base, sql).rows) == 6 and len(images.answer(derived, sql).rows) == 4
    assert images.answer(images.base, sql) is images.answer(images.base, sql)


@pytest.mark.parametrize("name", ["chinook", "department_store", "flights", "northwind", "sakila", "superhero"])
def test_real_databases_give_tasks(backend, shared, name):
    path = shared / "data" / "sql" / "db" / f"{name}.sqlite"
    for settings in ({}, EVERYTHING):
        tasks = synthesize(path, 25, backend=backend, **settings)
        for task in tasks[:8]:
            assert isinstance(run(path, task, task.sol_sql[0]), list)


TINY = [(i, word, 10 * i) for i, word in enumerate(("red", "blue") * 4)]


def test_a_database_with_few_tasks_says_how_many_it_has(backend, tmp_path):
    path = make_database(tmp_path / "tiny.sqlite", "CREATE TABLE t (id INTEGER PRIMARY KEY, w, n)", t=TINY)
    with pytest.raises(UserError, match=r"tiny: only \d+ different tasks of 100000 can be made: ask for fewer, or allow more"):
        synthesize(path, 100_000, backend=backend)


def test_a_source_without_any_task_says_what_was_in_the_way(backend, tmp_path):
    path = make_database(tmp_path / "flat.sqlite", "CREATE TABLE t (id INTEGER PRIMARY KEY, w, n)", t=TINY)
    source = Synthesizer(backend, path, forms=["list"], kinds=["lost_distinct"], rename_share=0.0)
    with pytest.raises(UserError, match=r"flat: no task holds: no kind of bug applies \(\d+\); allow more"):
        source.task(random.Random(0))
    source.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forms": ["list", "poem"]}, "unknown form 'poem': known are list, distinct, count"),
        ({"kinds": ["typo"]}, "unknown kind 'typo': known are misspelled_column"),
        ({"forms": []}, "no form given"),
        ({"rename_share": 1.5}, "rename_share must be between 0 and 1, not 1.5"),
        ({"forms": ["join_list"], "max_tables": 1}, "no query of the forms join_list can be asked here"),
    ],
)
def test_unusable_settings_are_refused(backend, shop, settings, message):
    with pytest.raises(UserError, match=message):
        Synthesizer(backend, shop, **settings)


@pytest.mark.parametrize("content", [None, b"", b"this is no database at all, only text" * 40])
def test_what_is_no_database_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "bad.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        synth_command(path, 5, tmp_path / "out.jsonl", store=tmp_path / "store")
    assert "bad.sqlite" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_database_without_a_usable_table_is_refused_with_its_path(backend, tmp_path):
    path = make_database(tmp_path / "keys.sqlite", "CREATE TABLE t (a_id, b_id)", t=[(1, 2)] * 20)
    with pytest.raises(UserError, match=r"keys.sqlite: no table that questions can be asked about \(t: too few columns"):
        Synthesizer(backend, path)


def test_the_command_writes_the_file_and_says_what_is_in_it(shop, tmp_path):
    out, heard = tmp_path / "tasks.jsonl", []
    result = synth_command(shop, 40, out, seed=3, store=tmp_path / "store", each=heard.append)
    tasks = read_tasks(out)
    assert len(tasks) == result["written"] == 40 and heard[-1] == 39
    assert json.loads(json.dumps(result)) == result
    assert sum(result["kinds"].values()) == sum(result["forms"].values()) == 40
    assert result["part"].startswith("questions use 11 tables") and result["source"]["name"] == "shop"
    with pytest.raises(UserError, match=r"tasks.jsonl: exists already \(--force replaces it\)"):
        synth_command(shop, 5, out, store=tmp_path / "store")
    assert len(read_tasks(out)) == 40
    assert synth_command(shop, 5, out, store=tmp_path / "store", force=True)["written"] == len(read_tasks(out)) == 5


def test_the_command_puts_an_embedded_database_beside_its_tasks(tmp_path):
    result = synth_command("clinic", 10, tmp_path / "t.jsonl", store=tmp_path / "store")
    assert result["database"] == str(tmp_path / "clinic.sqlite") and (tmp_path / "clinic.sqlite").exists()
    assert {task.db_id for task in read_tasks(tmp_path / "t.jsonl")} == {"clinic"}


@pytest.mark.parametrize("n", [0, -3])
def test_a_count_that_is_not_positive_is_refused(tmp_path, n):
    with pytest.raises(UserError, match=f"n must be at least 1, not {n}"):
        synth_command("shop", n, tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_an_out_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        synth_command("shop", 5, tmp_path / "nowhere" / "t.jsonl")


def test_whoever_listens_may_stop_it(backend, shop):
    def stop(done: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    source = Synthesizer(backend, shop)
    with pytest.raises(KeyboardInterrupt):
        distinct_tasks(source, 50, seed=0, each=stop)
    source.close()
