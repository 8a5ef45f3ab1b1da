"""SQL text as SQLite's tokenizer sees it: what is found and what is taken out stands where SQLite would see it, and nowhere else."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.envs.sql.lexer import clauses, has_keyword, remove_comments, remove_distinct, remove_round, tokens


@given(st.text(st.sampled_from("'\"`[]()-*/;,. \nabAB12xX|<>=eE?@$"), max_size=40))
def test_tokens_cover_the_text_in_order_and_never_overlap(sql):
    found = tokens(sql)
    assert all(sql[t.start : t.end] == t.text for t in found)
    assert all(a.end <= b.start for a, b in zip(found, found[1:], strict=False))


def test_distinct_is_taken_out_of_a_select_however_it_is_laid_out():
    assert remove_distinct("SELECT\nDISTINCT a FROM t").split() == ["SELECT", "a", "FROM", "t"]
    assert remove_distinct("SELECT DISTINCT(a) FROM t").split() == ["SELECT", "(a)", "FROM", "t"]
    assert remove_distinct("SELECT a FROM (select distinct b FROM u)") == "SELECT a FROM (select   b FROM u)"


@pytest.mark.parametrize(
    "sql", ["SELECT 'a distinct b'", "SELECT count(DISTINCT a) FROM t", 'SELECT "distinct" FROM t', "SELECT a IS DISTINCT FROM b", "-- select distinct"]
)
def test_distinct_stays_in_literals_names_aggregates_and_comparisons(sql):
    assert remove_distinct(sql) == sql


@pytest.mark.parametrize(
    ("sql", "bare"),
    [
        ("SELECT 1/ROUND(a+b)", "SELECT 1/(a+b)"),
        ("SELECT round ( a, 2 ) x", "SELECT ( a) x"),
        ("SELECT ROUND(ROUND(a, 1), ROUND(2.0))", "SELECT ((a))"),
        ("SELECT ROUND(max(a, b), 2)", "SELECT (max(a, b))"),
        ("SELECT background(1), 'ROUND(1)', ROUND", "SELECT background(1), 'ROUND(1)', ROUND"),
        ("SELECT ROUND(", "SELECT ROUND("),
        ("SELECT ROUND()", "SELECT ROUND()"),
    ],
)
def test_round_gives_way_to_its_first_argument(sql, bare):
    assert remove_round(sql) == bare


def test_comments_go_and_what_looks_like_one_in_a_literal_stays():
    assert remove_comments("SELECT 1 -- a\n, '--b' /* c\n */ --").split() == ["SELECT", "1", ",", "'--b'"]


def test_taking_things_out_leaves_sql_that_runs():
    db = sqlite3.connect(":memory:")
    sql = "SELECT DISTINCT ROUND(3.14159, 2) AS a, 'SELECT DISTINCT ROUND(1)' -- ROUND(\n FROM (SELECT DISTINCT 1)"
    assert db.execute(remove_round(remove_distinct(remove_comments(sql)))).fetchall() == [(3.14159, "SELECT DISTINCT ROUND(1)")]


@pytest.mark.parametrize(
    ("sql", "keyword", "there"),
    [
        ("SELECT a FROM t JOIN u", "join", True),
        ("SELECT 'JOIN'", "JOIN", False),
        ("SELECT a -- JOIN", "JOIN", False),
        ('SELECT "JOIN"', "JOIN", False),
        ("SELECT joins FROM t", "JOIN", False),
        ("SELECT a GROUP\n BY b", "GROUP BY", True),
        ("SELECT a||b", "||", True),
        ("SELECT OVERs", "OVER", False),
        ("SELECT row_number() OVER ()", "ROW_NUMBER", True),
    ],
)
def test_a_keyword_counts_outside_of_comments_literals_and_names(sql, keyword, there):
    assert has_keyword([sql], keyword) is there


def test_the_outermost_order_by_and_limit_are_found_at_depth_zero():
    found = clauses(
        "WITH a AS (SELECT 1 ORDER BY 2 LIMIT 9) SELECT x, row_number() OVER (ORDER BY y) FROM a ORDER BY lower(x, 'ORDER BY'), 2 DESC NULLS LAST LIMIT 3;"
    )
    assert found is not None and found.limit == "LIMIT 3"
    assert [(term.expression, term.direction) for term in found.order] == [("lower(x, 'ORDER BY')", ""), ("2", "DESC NULLS LAST")]


@pytest.mark.parametrize(
    "sql", ["UPDATE t SET a = 1 RETURNING a", "WITH x AS (SELECT 1) DELETE FROM t RETURNING a", "PRAGMA table_info(t)", "", "EXPLAIN SELECT 1"]
)
def test_only_queries_have_clauses(sql):
    assert clauses(sql) is None
