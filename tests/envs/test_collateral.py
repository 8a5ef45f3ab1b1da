"""The collateral rule: what the gold leaves as it is must be so after the prediction, and everything else is free."""

from __future__ import annotations

import pytest
from grading_support import verdict

from savepoint.envs.sql.world import World

SELECT = {"sol_sql": ["SELECT city FROM people WHERE age > 40"]}
WRONG_ROWS = {"type": "state", "query": "SELECT count(*) FROM people WHERE age < 0", "expect": [[0]]}
# A gold that mends one column, with a check that says nothing of the others.
UPDATE = {"sol_sql": ["UPDATE people SET age = 30 WHERE city = 'Rome'"], "checks": [WRONG_ROWS]}
RIGHT = "SELECT city FROM people WHERE age > 40"


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE notes",
        "DELETE FROM people WHERE id = 60",
        "UPDATE people SET height = height + 1 WHERE id = 1",
        "ALTER TABLE notes RENAME TO remarks",
        "ALTER TABLE notes ADD COLUMN x",
        "INSERT INTO notes VALUES (1, 'x')",
        "DROP VIEW tall",
        "DROP TRIGGER guard",
        "DROP VIEW tall; CREATE VIEW tall AS SELECT 1",
        "DROP TABLE notes; CREATE TABLE notes (person INTEGER, text TEXT, more)",
        "ALTER TABLE people ADD COLUMN bad AS (json(name))",
    ],
)
def test_touching_what_the_gold_leaves_alone_is_a_wrong_state(world: World, sql: str):
    setup = ["CREATE VIEW tall AS SELECT * FROM people WHERE height > 1.8; CREATE TRIGGER guard BEFORE DELETE ON notes BEGIN SELECT 1; END"]
    assert verdict(world, [sql, RIGHT], preprocess_sql=setup, **SELECT).outcome == "wrong_state"


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE mine AS SELECT * FROM people",
        "CREATE INDEX i ON people(city)",
        "ANALYZE",
        "VACUUM",
        "CREATE VIEW v AS SELECT 1",
        "UPDATE people SET age = age",
        "DELETE FROM people WHERE id = 1; INSERT INTO people SELECT * FROM kept",
        "CREATE TEMP TABLE people AS SELECT 1",
        "BEGIN; DELETE FROM people; ROLLBACK",
        "CREATE TRIGGER t BEFORE DELETE ON notes BEGIN SELECT 1; END",
    ],
)
def test_new_objects_indexes_and_what_ends_as_it_was_are_free(world: World, sql: str):
    setup = ["CREATE TABLE kept AS SELECT * FROM people WHERE id = 1"]
    right = "SELECT city FROM main.people WHERE age > 40"
    assert verdict(world, [sql, right], preprocess_sql=setup, **SELECT).outcome == "correct"


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [
        ("UPDATE people SET age = 30 WHERE city = 'Rome'", "correct"),
        ("UPDATE people SET age = 30", "correct"),  # only the changed column: the checks of the instance have to see this
        ("DELETE FROM people", "wrong_state"),
        ("UPDATE people SET age = 30, name = 'x'", "wrong_state"),
        ("UPDATE people SET name = name || '!'", "wrong_state"),
        ("DELETE FROM people; ALTER TABLE people DROP COLUMN height", "wrong_state"),
        ("ALTER TABLE people DROP COLUMN height", "wrong_state"),
        ("UPDATE people SET height = (SELECT height FROM people b WHERE b.id = 61 - people.id)", "wrong_state"),  # columns as they were, rows not
    ],
)
def test_of_a_table_that_the_gold_changes_the_other_columns_stay_together_as_rows(world: World, sql: str, outcome: str):
    assert verdict(world, sql, **UPDATE).outcome == outcome


def test_a_gold_that_moves_values_between_rows_is_right_itself(world: World):
    swap = "UPDATE people SET name = (SELECT b.name FROM kept b WHERE b.id = 61 - people.id)"
    fields = {"preprocess_sql": ["CREATE TABLE kept AS SELECT id, name FROM people"], "sol_sql": [swap], "checks": [WRONG_ROWS]}
    assert verdict(world, swap, **fields).outcome == "correct"
    assert verdict(world, [swap, "UPDATE people SET city = 'x' WHERE id = 1"], **fields).outcome == "wrong_state"


def test_a_table_that_the_gold_drops_or_renames_is_free(world: World):
    fields = {"sol_sql": ["ALTER TABLE notes RENAME TO remarks"], "checks": [{"type": "state", "query": "SELECT count(*) FROM remarks", "expect": [[0]]}]}
    assert verdict(world, "CREATE TABLE remarks AS SELECT * FROM notes; DROP TABLE notes", **fields).outcome == "correct"


def test_a_gold_without_rows_and_tests_is_compared_by_the_tables_that_it_leaves(world: World):
    fields = {"sol_sql": ["CREATE TABLE romans AS SELECT name FROM people WHERE city = 'Rome'"]}
    assert (
        verdict(world, "CREATE TABLE ROMANS(name); INSERT INTO romans SELECT name FROM people WHERE city LIKE 'rome' ORDER BY id DESC", **fields).outcome
        == "correct"
    )
    assert verdict(world, "CREATE TABLE romans(name)", **fields).outcome == "wrong_state"
    assert verdict(world, "SELECT 1", **fields).outcome == "wrong_state"
    view = {"sol_sql": ["CREATE VIEW v AS SELECT name FROM people"]}
    assert verdict(world, "create view v as\nselect NAME from people -- the same", **view).outcome == "correct"
    assert verdict(world, "CREATE VIEW v AS SELECT city FROM people", **view).outcome == "wrong_state"
    dropped = {"sol_sql": ["DROP TABLE notes"]}
    assert verdict(world, "DROP TABLE notes", **dropped).outcome == "correct" and verdict(world, "SELECT 1", **dropped).outcome == "wrong_state"


def test_a_column_that_cannot_be_read_is_the_predictions_fault(world: World):
    fields = {"sol_sql": ["UPDATE people SET age = 1 WHERE id = 1"]}
    assert verdict(world, "UPDATE people SET age = 1 WHERE id = 1; ALTER TABLE people ADD COLUMN bad AS (json(name))", **fields).outcome == "wrong_state"


def test_tables_are_compared_whatever_pages_say_where_there_is_no_dbstat(world: World, monkeypatch):
    from savepoint.envs.sql import collateral, grade

    def without_pages(session):
        return collateral.Inventory(collateral.read_schema(session), None)

    monkeypatch.setattr(grade, "take_inventory", without_pages)
    assert verdict(world, ["CREATE INDEX i ON people(city)", RIGHT], **SELECT).outcome == "correct"
    assert verdict(world, ["DELETE FROM notes; INSERT INTO notes VALUES (1, 2)", RIGHT], **SELECT).outcome == "wrong_state"
