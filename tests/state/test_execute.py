"""What a call answers: the last result, counts, and one status for one cause."""

from __future__ import annotations

import dataclasses
import gc

import apsw
import pytest
from state_support import ROWS, rows

from savepoint.state import Session
from savepoint.state.sqlite.execute import Execution
from savepoint.state.sqlite.pages import HOST_FULL


def test_the_result_is_that_of_the_last_statement_with_columns(session: Session):
    result = session.execute("SELECT 1 AS a; SELECT 2 AS b, 3 AS c; CREATE TABLE t(x); INSERT INTO t VALUES (5)")
    assert (result.columns, result.rows, result.statements, result.rowcount) == (("b", "c"), ((2, 3),), 4, 1)
    assert session.execute("SELECT 1; SELECT 2 WHERE 0").rows == (), "a result of no rows is a result"
    assert session.execute("CREATE TABLE u(x)").columns == ()


def test_a_failure_ends_the_script_and_gives_no_rows(session: Session):
    result = session.execute("SELECT 1; INSERT INTO customer(id) VALUES (1000); SELEC; DELETE FROM orders")
    assert (result.status, result.rows, result.columns, result.statements, result.rowcount) == ("sql_error", (), (), 2, 1)
    assert result.error == 'near "SELEC": syntax error' and rows(session, "SELECT count(*) FROM orders") == ((ROWS,),)


@pytest.mark.parametrize("sql", ["", "   ", ";;", "-- nothing", "/* nothing", "\ufeff"])
def test_nothing_is_fine(session: Session, sql: str):
    result = session.execute(sql)
    assert (result.status, result.statements, result.columns) == ("ok", 0, ())


def test_changes_are_counted_over_the_script_without_what_triggers_did(session: Session):
    session.execute("CREATE TABLE log(a); CREATE TRIGGER t AFTER DELETE ON orders BEGIN INSERT INTO log VALUES (old.id); END")
    result = session.execute("DELETE FROM orders WHERE id < 10; UPDATE customer SET name = 'x' WHERE id < 5; SELECT 1; DELETE FROM log WHERE 0")
    assert result.rowcount == 15


def test_exactly_the_cap_is_no_cut(session: Session):
    assert not session.execute("SELECT id FROM orders LIMIT 10", max_rows=10).truncated
    cut = session.execute("SELECT id FROM orders LIMIT 11", max_rows=10)
    assert (cut.truncated, len(cut.rows), cut.rows_cut, cut.status) == (True, 10, None, "ok")
    assert session.execute("SELECT 'abcd'", max_bytes=8).rows == (("abcd",),)
    assert session.execute("SELECT 'abcdefghi' AS a", max_bytes=8).truncated


def test_double_quoted_strings_work_as_in_sqlite(session: Session):
    assert rows(session, 'SELECT count(*) FROM orders WHERE status = "open"') == ((ROWS,),)


def test_instructions_are_counted(session: Session):
    small, large = (session.execute(f"SELECT count(*) FROM orders WHERE id < {n} AND amount > 0") for n in (10, 1000))
    assert 0 < small.vm_steps < large.vm_steps
    assert session.execute("SELECT id FROM orders", max_rows=10).vm_steps < 200, "a cut query stops"
    assert session.execute("SELECT count(*) FROM orders WHERE id < 10 AND amount > 0").vm_steps == small.vm_steps


def test_delta_pages_follow_the_work(session: Session):
    assert session.execute("SELECT 1").delta_pages == 0
    changed = session.execute("UPDATE orders SET amount = 1")
    assert changed.delta_pages == session.stats().delta_pages > 10


@pytest.mark.parametrize(
    ("sql", "status", "quota"),
    [
        ("SELECT nothing FROM orders", "sql_error", None),
        ("INSERT INTO customer(id) VALUES (1)", "sql_error", None),
        ("COMMIT", "sql_error", None),
        ("SELECT abs(-9223372036854775808)", "sql_error", None),
        ("SELECT json('{')", "sql_error", None),
        ("INSERT INTO customer(id) VALUES ('text')", "sql_error", None),
        ("SELECT zeroblob(200001)", "too_big", "length=200000"),
        ("SELECT '" + "x" * 300_000 + "'", "too_big", f"sql_length={256 << 10}"),
        ("PRAGMA journal_mode = wal", "denied", None),
    ],
)
def test_a_cause_has_one_status(session: Session, sql: str, status: str, quota: str | None):
    result = session.execute(sql)
    assert (result.status, result.quota, result.rows) == (status, quota, ()) and result.error


@pytest.mark.parametrize("error", [apsw.IOError("disk I/O error"), apsw.NoMemError("out of memory"), apsw.CorruptError("malformed"), MemoryError("no memory")])
def test_trouble_of_ours_is_infra(session: Session, error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fail(self: Execution, script: str) -> str:
        raise error

    monkeypatch.setattr(Execution, "_run", fail)
    result = session.execute("SELECT 1")
    assert (result.status, result.error) == ("infra", str(error))


def test_a_full_host_disk_is_infra_and_not_the_agents_quota(session: Session, monkeypatch: pytest.MonkeyPatch):
    session.execute("CREATE TABLE a(id INTEGER PRIMARY KEY AUTOINCREMENT); INSERT INTO a VALUES (9223372036854775807)")
    stats = session._lease.volume.stats()
    monkeypatch.setattr(type(session._lease.volume), "stats", lambda self: dataclasses.replace(stats, refused=HOST_FULL))
    assert session.execute("INSERT INTO a DEFAULT VALUES").status == "infra"


def test_a_failed_call_keeps_nothing_alive(session: Session):
    def alive() -> int:
        return sum(type(thing) is Execution for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        assert session.execute("SELECT nobody FROM orders").status == "sql_error"
        assert alive() == before
    finally:
        gc.enable()
