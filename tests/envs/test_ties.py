"""What a gold's ORDER BY and LIMIT leave open, found by running it once more."""

from __future__ import annotations

import apsw
import apsw.ext
import pytest

from savepoint.envs.sql.ties import cut_groups, grouped_query

ROWS = "(1, 'a', 1.0, 1), (2, 'A', 2.0, 1), (3, 'b', 2.0, 2), (4, 'c', 2.0, NULL), (5, 'd', 0.0, 3)"


def takes(sql: str) -> list[tuple[int, int]] | None:
    """(rows of the group, rows taken) of each group of a query; None where nothing is known to be open."""
    db = apsw.Connection(":memory:")
    db.execute(f"CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT COLLATE NOCASE, score REAL, k INT); INSERT INTO t VALUES {ROWS}")
    columns = [column[0] for column in apsw.ext.query_info(db, sql).description]
    query = grouped_query(sql, columns)
    groups = None if query is None else cut_groups(db.execute(query).fetchall(), db.execute(sql).fetchall())
    return None if groups is None else [(len(group.rows), group.take) for group in groups]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT name FROM t ORDER BY score DESC LIMIT 1", [(3, 1)]),
        ("SELECT id FROM t ORDER BY name LIMIT 3", [(2, 2), (1, 1)]),  # a = A under the column's collation
        ("SELECT id FROM t ORDER BY name COLLATE BINARY LIMIT 3", [(1, 1), (1, 1), (1, 1)]),
        ("SELECT name FROM t ORDER BY name COLLATE BINARY LIMIT 3", [(1, 1), (1, 1), (1, 1)]),
        ("SELECT name, id AS score FROM t ORDER BY score LIMIT 2", [(1, 1), (1, 1)]),  # the alias, not the column
        ("SELECT DISTINCT score FROM t ORDER BY 1", [(1, 1), (1, 1), (1, 1)]),
        ("SELECT * FROM t ORDER BY k * 2, length(name) LIMIT 2 OFFSET 1", [(2, 2)]),
        ("SELECT score, count(*) FROM t GROUP BY score ORDER BY count(*) DESC LIMIT 1, 1", [(2, 1)]),
        ("SELECT score FROM t UNION ALL SELECT 2.0 ORDER BY score DESC LIMIT 2", [(4, 2)]),
        ("SELECT id FROM t LIMIT 2 -- any two", [(5, 2)]),
        ('SELECT id FROM t ORDER BY score DESC, "k" NULLS LAST LIMIT (SELECT 2);', [(1, 1), (1, 1)]),
        ("WITH x AS (SELECT * FROM t ORDER BY id LIMIT 4) SELECT x.id FROM x ORDER BY x.score IS DISTINCT FROM 2 LIMIT 2", [(3, 2)]),
        ("SELECT id, row_number() OVER (ORDER BY score) AS n FROM t ORDER BY n LIMIT 2", [(1, 1), (1, 1)]),
    ],
)
def test_groups_are_those_of_equal_keys_and_the_limit_cuts_them_where_it_does(sql, expected):
    assert takes(sql) == expected


@pytest.mark.parametrize("sql", ["SELECT id FROM t", "SELECT DISTINCT name FROM t ORDER BY score", "PRAGMA table_info(t)"])
def test_where_nothing_is_open_or_it_cannot_be_rewritten_there_are_no_groups(sql):
    assert takes(sql) is None


def test_a_result_that_does_not_fit_its_own_groups_gives_none():
    assert cut_groups([(1, 1, 0), (2, 2, 0)], [(2,), (1,)]) is None
