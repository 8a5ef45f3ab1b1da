"""What an agent reads of a result: whatever is left out is said."""

from __future__ import annotations

import pytest

from savepoint.envs.sql.observation import ObservationFormat, observe
from savepoint.envs.sql.world import World


@pytest.fixture
def execute(world: World):
    with world.backend.lease(world.base("people"), owner="test") as session:
        yield session.execute


def test_rows_beyond_those_shown_are_counted(execute):
    assert observe(execute("SELECT id FROM people"), ObservationFormat(max_rows=2)) == "60 rows: id\n1\n2\n... 58 more"


def test_a_result_that_was_not_fetched_whole_says_so(execute):
    assert observe(execute("SELECT id FROM people", max_rows=10), ObservationFormat(max_rows=1)) == "10 or more rows: id\n1\n... 9 more"


def test_cells_are_cut_with_a_count(execute):
    assert observe(execute("SELECT 'abcdefghij' AS a"), ObservationFormat(max_cell=4)) == "1 row: a\nabcd... 6 more characters"


def test_values_are_shown_by_type(execute):
    result = execute("SELECT NULL, 1, 1.5, 2.0/3, 'é', x'ff00'")
    assert observe(result, ObservationFormat(digits=4)).splitlines()[1] == "NULL, 1, 1.5, 0.6667, é, x'ff00'"


def test_errors_are_worded_by_the_database(execute):
    assert observe(execute("SELECT nobody FROM people"), ObservationFormat()) == "error: no such column: nobody"
    assert observe(execute("ATTACH 'x' AS y"), ObservationFormat()).startswith("denied: ")


def test_statements_without_rows_say_what_they_changed(execute):
    assert observe(execute("UPDATE people SET age = 1 WHERE id < 4"), ObservationFormat()) == "ok, 3 rows changed"
    assert observe(execute("BEGIN"), ObservationFormat()) == "ok, in a transaction"


def test_text_that_is_no_unicode_is_still_shown(execute):
    assert observe(execute("SELECT CAST(x'61ff' AS TEXT)"), ObservationFormat()).splitlines()[1] == "a\N{REPLACEMENT CHARACTER}"


def test_a_format_that_shows_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ObservationFormat(max_rows=0)
