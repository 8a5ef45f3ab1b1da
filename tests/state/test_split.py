"""Scripts are cut where SQLite cuts them."""

from __future__ import annotations

import re

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.state import split_statements

TRIGGER = "CREATE TRIGGER g AFTER INSERT ON t BEGIN SELECT CASE WHEN 1 THEN ';' END; DELETE FROM t WHERE a = 5; END"


@pytest.mark.parametrize(
    ("script", "statements"),
    [
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT 1;", ["SELECT 1;"]),
        ("SELECT 1; SELECT 2", ["SELECT 1;", "SELECT 2"]),
        (" ;; SELECT ';' ; -- tail;\n", ["SELECT ';' ;"]),
        ("-- head;\nSELECT 1; /* ; */ SELECT 2; /* open ; ", ["-- head;\nSELECT 1;", "/* ; */ SELECT 2;"]),
        ("SELECT \"a;b\", `c;d`, [e;f], 'it''s;'; SELECT 2", ["SELECT \"a;b\", `c;d`, [e;f], 'it''s;';", "SELECT 2"]),
        (TRIGGER + "; SELECT 2", [TRIGGER + ";", "SELECT 2"]),
        ("CREATE TEMP " + TRIGGER[7:] + ";SELECT 2;", ["CREATE TEMP " + TRIGGER[7:] + ";", "SELECT 2;"]),
        ("SELECT 'open; SELECT 2", ["SELECT 'open; SELECT 2"]),
        ("", []),
        (" \n;;-- nothing\n/* nothing */", []),
        ("```sql\nSELECT 1;\n```", ["```sql\nSELECT 1;\n```"]),
        ("SELECT 1\0; SELECT 2", ["SELECT 1\0;", "SELECT 2"]),
    ],
)
def test_a_script_is_cut_into_its_statements(script: str, statements: list[str]):
    assert split_statements(script) == statements


def _bare(statement: str) -> str:
    """Without comments and semicolons around it: SQLite counts those before a statement to its text, we leave them out."""
    return re.sub(r"\A(?:[\s;\ufeff]|--[^\n]*|/\*.*?\*/)*|[\s;\ufeff]*\Z", "", statement, flags=re.DOTALL)


PIECES = st.sampled_from(
    ["SELECT 1", "SELECT 'a;b'", 'SELECT "x;y"', "SELECT [p;q] FROM (SELECT 1 AS [p;q])", "DELETE FROM t", TRIGGER, "DROP TRIGGER IF EXISTS g",
     "-- c;d\n", "/* e;f */", ";", " ", "\n", "SELECT 'it''s; fine'", "EXPLAIN SELECT 1", "\ufeff", "SELECT 1 -- end;\n", "VALUES (1), (2)"]
)  # fmt: skip


@given(st.lists(st.tuples(PIECES, st.sampled_from([";", "; ", ";\n", ";;"])), max_size=8))
def test_sqlite_itself_runs_the_same_statements(pieces: list[tuple[str, str]]):
    script = "".join(text + end for text, end in pieces)
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t(a)")
    seen: list[str] = []

    def trace(cursor: apsw.Cursor, text: str, bindings: object) -> bool:
        if cursor.has_vdbe:
            seen.append(text)
        return True

    cursor = connection.cursor()
    cursor.exec_trace = trace
    try:
        cursor.execute(script).fetchall()
    except apsw.SQLError as error:
        assert "already exists" in str(error)
        return
    assert [_bare(text) for text in split_statements(script)] == [_bare(text) for text in seen]
    connection.close()


def test_splitting_a_long_script_takes_linear_time():
    assert len(split_statements("SELECT 1;" * 20_000)) == 20_000
    assert len(split_statements("INSERT INTO t VALUES ('" + ";" * 250_000 + "')")) == 1
