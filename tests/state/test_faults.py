"""The faults that red-teaming found in the prototype, one test of its kind each (numbers as in the list of weaknesses)."""

from __future__ import annotations

import re
import resource
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from state_support import ROWS, Lease, make_shop, rows

from savepoint.errors import UserError
from savepoint.state import Quota, Session, SqliteBackend

SUM = "SELECT count(*), sum(amount), sum(length(note)) FROM orders"
INTEGRITY = "PRAGMA integrity_check"


# ------------------------------------------------------------------ 1


@pytest.mark.parametrize("pages", [1, 2, 3, 5, 8, 13, 40, 60])
@pytest.mark.parametrize("in_transaction", [False, True])
def test_01_a_full_delta_rolls_back_and_corrupts_nothing(lease: Lease, pages: int, in_transaction: bool):
    session = lease(delta_bytes=pages * 4096)
    before = rows(session, SUM)
    if in_transaction:
        session.execute("BEGIN")
    result = session.execute("UPDATE orders SET amount = amount + 1, note = note || 'y'")
    assert (result.status, result.quota, result.transaction_lost) == ("full", f"delta_bytes={pages * 4096}", in_transaction)
    assert rows(session, SUM) == before and rows(session, INTEGRITY) == (("ok",),)
    assert session.stats().delta_pages == 0, "what the failed statement took is given back"


def test_01_a_rollback_succeeds_at_the_quota_although_it_needs_pages_that_were_given_back(lease: Lease):
    session = lease(delta_bytes=30 * 4096)
    rows(session, "UPDATE orders SET status = 'done' WHERE id < 300")  # pages of the session's own
    before, held = rows(session, SUM + " WHERE status = 'done'"), session.stats().held_bytes
    session.execute("BEGIN")
    rows(session, "UPDATE orders SET status = 'open' WHERE id < 300; PRAGMA incremental_vacuum")  # equal to the base again: given back
    for first in range(300, ROWS, 20):  # into the room that became free, until it is used up
        if session.execute(f"UPDATE orders SET status = 'lost' WHERE id BETWEEN {first} AND {first + 19}").status != "ok":
            break
    if session.in_transaction:
        rows(session, "ROLLBACK")
    assert rows(session, SUM + " WHERE status = 'done'") == before and rows(session, INTEGRITY) == (("ok",),)
    assert session.stats().held_bytes == held


def test_01_after_a_rollback_the_quota_holds_again(lease: Lease):
    """Also for pages that are in the journal already and so need no new entry in it."""
    session = lease(delta_bytes=25 * 4096)
    rows(session, "BEGIN; UPDATE customer SET balance = 1; CREATE TABLE big(b); SAVEPOINT s; UPDATE customer SET balance = 2; ROLLBACK TO s")
    for _ in range(6):
        status = session.execute("INSERT INTO big VALUES (zeroblob(60000))").status
        assert session.stats().held_bytes <= 25 * 4096
        if status != "ok":
            break
    assert status == "full"


def test_01_a_write_that_changes_nothing_costs_nothing(lease: Lease):
    session = lease(delta_bytes=4096)
    assert session.execute("UPDATE orders SET amount = amount").delta_pages <= 1, "only the page with the change counter"


# ------------------------------------------------------------------ 2


def test_02_no_file_name_reaches_a_sibling(lease: Lease):
    victim, attacker = lease(), lease()
    before = rows(victim, SUM)
    names = [name for _, _, name in rows(attacker, "PRAGMA database_list")] + ["database", "s1", "savepoint-" + "0" * 32]
    for name in names:
        for attach in (f"ATTACH '{name}' AS x", f"ATTACH '{name[:2]}' || '{name[2:]}' AS x", f"ATTACH (SELECT '{name}') AS x"):
            assert attacker.execute(f"{attach}; DELETE FROM x.orders").status == "denied", attach
        assert attacker.execute(f"VACUUM INTO '{name}2'").status == "denied"
    assert rows(victim, SUM) == before


def test_02_the_vfs_itself_opens_no_other_file(lease: Lease, tmp_path: Path):
    """With the authorizer off, as if it had a hole."""
    session, other = lease(), lease()
    session._lease.open().raw.authorizer = None
    for name in (str(tmp_path / "leak"), "database", other._lease.volume.name, "file:x?vfs=unix", f"file:database?vfs={other._lease.volume.name}", ":memory:x"):
        assert session.execute(f"ATTACH '{name}' AS x").status != "ok", name
        assert session.execute(f"VACUUM INTO '{name}'").status != "ok", name
    assert list(tmp_path.glob("leak*")) == []


# ------------------------------------------------------------------ 3, 4, 5: the deadline

LONG_OPCODES = [
    "SELECT instr(printf('%.*c', 199000, 'a'), printf('%.*c', 99000, 'a') || 'b')",
    "SELECT length(replace(printf('%.*c', 199000, 'a'), 'a', ''))",
    "SELECT ltrim(printf('%.*c', 199000, 'b'), printf('%.*c', 99000, 'a') || 'b')",
    "SELECT printf('%.*c', 190000, 'a') LIKE '" + "%a" * 100 + "%b'",
    "SELECT printf('%.*c', 190000, 'a') GLOB '*" + "[a-z]" * 48 + "b'",
    "SELECT length(json_patch('{' || substr(x, 2) || '}', '{' || substr(x, 2) || '}')) FROM (SELECT group_concat(',\"k' || id || '\":1', '') AS x FROM orders)",
]


@pytest.mark.parametrize("sql", LONG_OPCODES)
def test_03_no_single_opcode_takes_long(session: Session, sql: str):
    started = time.monotonic()
    session.execute(sql, deadline_s=0.5)
    assert time.monotonic() - started < 2.0


def test_04_work_that_takes_few_instructions_meets_the_deadline(lease: Lease):
    session = lease(length=4_000_000)
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000) "
    started = time.monotonic()
    result = session.execute(numbers + "SELECT sum(length(hex(zeroblob(1900000 + x % 2)))) FROM c", deadline_s=0.3)
    assert (result.status, result.quota) == ("timeout", "deadline_s=0.3") and time.monotonic() - started < 1.0


def test_05_many_short_statements_meet_the_deadline(lease: Lease):
    session = lease(length=4_000_000)
    started = time.monotonic()
    result = session.execute("SELECT length(hex(zeroblob(1900000)));" * 4000, deadline_s=0.3)
    assert result.status == "timeout" and time.monotonic() - started < 1.0 and 0 < result.statements < 4000
    assert session.execute("SELECT 1").rows == ((1,),), "a late interrupt does not hit the next call"


def test_05_the_clock_is_looked_at_between_statements(session: Session, monkeypatch: pytest.MonkeyPatch):
    """Without the watchdog, and without the authorizer, which looks at it as well: as if each interrupt fell between two statements."""
    session._lease.open().raw.authorizer = None
    monkeypatch.setattr("savepoint.state.watchdog.watchdog.arm", lambda at, ring: None)
    monkeypatch.setattr("savepoint.state.watchdog.watchdog.disarm", lambda alarm: None)
    result = session.execute("SELECT 1;" * 28_000, deadline_s=0.02)
    assert result.status == "timeout" and result.statements < 28_000


# ------------------------------------------------------------------ 6, 7: caps


def peak_memory() -> int:
    """Bytes that were resident at most, of this process (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_06_a_wide_row_of_long_texts_is_bounded_before_it_is_built(session: Session):
    session.execute("CREATE TABLE l AS SELECT printf('%.*c', 190000, 'x') AS s")
    columns, before = ", ".join(["s"] * 500), peak_memory()
    result = session.execute(f"SELECT {columns} FROM l")
    assert result.truncated and result.rows == () and peak_memory() - before < 300 << 20
    assert session.execute(f"SELECT {columns}, s FROM l").status == "sql_error"


def test_06_tables_wider_than_the_quota_stay_readable(backend: SqliteBackend, tmp_path: Path):
    with sqlite3.connect(tmp_path / "wide.sqlite") as db:
        db.execute(f"CREATE TABLE w({', '.join(f'c{i}' for i in range(900))})")
    db.close()
    with backend.lease(backend.import_base(tmp_path / "wide.sqlite"), owner="test") as session:
        assert len(session.execute("SELECT * FROM w").columns) == 900
    longer = backend.derive(backend.import_base(tmp_path / "wide.sqlite"), ["ALTER TABLE w ADD COLUMN d; ALTER TABLE w ADD COLUMN e"])
    with backend.lease(longer, owner="test") as session:
        assert len(session.execute("SELECT * FROM w").columns) == 902
    image = backend.derive(backend.import_base(tmp_path / "wide.sqlite"), ["CREATE TABLE v AS SELECT *, 1 AS more FROM w", "ALTER TABLE w ADD COLUMN d"])
    with backend.lease(image, owner="test") as session:
        assert (len(session.execute("SELECT * FROM w").columns), len(session.execute("SELECT * FROM v").columns)) == (901, 901)


def test_07_bytes_are_counted_not_characters(session: Session):
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100) "
    result = session.execute(numbers + "SELECT replace(printf('%.*c', 100, 'a'), 'a', '🙂') FROM c", max_bytes=4000)
    assert (len(result.rows), result.truncated, result.quota) == (10, True, "max_bytes=4000")


def test_07_names_of_columns_are_counted(session: Session):
    result = session.execute(f'SELECT 1 AS "{"n" * 5000}"', max_bytes=4000)
    assert (result.status, result.quota, result.columns) == ("too_big", "max_bytes=4000", ())


def test_07_messages_are_cut(session: Session):
    session.execute("CREATE TRIGGER loud BEFORE DELETE ON orders BEGIN SELECT RAISE(ABORT, printf('%.*c', 90000, 'é')); END")
    result = session.execute("DELETE FROM orders")
    assert result.status == "sql_error" and result.error is not None and len(result.error.encode()) < 5000 and "bytes more" in result.error


# ------------------------------------------------------------------ 8


def test_08_temporary_space_is_counted_for_each_session(lease: Lease):
    hog, neighbour = lease(temp_bytes=8 << 20), lease(temp_bytes=8 << 20)
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 20000) "
    results = [hog.execute(f"CREATE TEMP TABLE t{i} AS {numbers} SELECT printf('%.*c', 900, 'x') AS v FROM c", deadline_s=30) for i in range(2)]
    assert results[-1].status == "full" and results[-1].quota == f"temp_bytes={8 << 20}"
    assert neighbour.execute(f"{numbers} SELECT max(x) FROM (SELECT x FROM c ORDER BY printf('%0200d', -x))").status == "ok"
    hog.reset()
    assert hog.stats().temp_bytes <= 1 << 17, "and given back"


def test_08_savepoints_are_counted(session: Session):
    assert session.execute("SAVEPOINT s;" * 5000, deadline_s=20).status == "denied"
    session.execute("ROLLBACK")
    assert session.execute("SAVEPOINT s; RELEASE s;" * 20).status == "ok"


def test_08_the_journal_of_a_large_transaction_is_on_the_sessions_account(lease: Lease):
    session = lease(temp_bytes=64 << 10)
    before = rows(session, SUM)
    result = session.execute("UPDATE orders SET note = 'z'")
    assert (result.status, result.quota) == ("full", f"temp_bytes={64 << 10}")
    assert rows(session, SUM) == before and rows(session, INTEGRITY) == (("ok",),)


# ------------------------------------------------------------------ 9


def test_09_text_that_is_no_utf8_is_kept(session: Session):
    result = session.execute("SELECT CAST(x'61ff62' AS TEXT), 5, x'ff', 1.5, NULL UNION ALL SELECT 'ok', 6, x'', 2.5, 'é'")
    assert result.status == "ok" and result.rows == (("a\udcffb", 5, b"\xff", 1.5, None), ("ok", 6, b"", 2.5, "é"))
    assert result.rows[0][0].encode("utf-8", "surrogateescape") == b"a\xffb"  # type: ignore[union-attr]


def test_09_invalid_text_of_a_table_comes_in_order_with_caps_and_the_rest_of_the_script(session: Session):
    session.execute("CREATE TABLE b AS SELECT id, CAST(x'c3' || char(65 + id % 26) AS TEXT) AS t FROM orders")
    result = session.execute("SELECT id, t FROM b ORDER BY id DESC; -- why not\nCREATE TABLE later(a)", max_rows=3)
    assert [row[0] for row in result.rows] == [ROWS - 1, ROWS - 2, ROWS - 3] and result.truncated
    assert session.execute("SELECT * FROM later").columns == ("a",)


def test_09_a_write_that_returns_invalid_text_is_done_and_says_what_is_missing(session: Session):
    result = session.execute("UPDATE customer SET name = CAST(x'ff' AS TEXT) WHERE id < 3 RETURNING id, CASE id WHEN 1 THEN name ELSE 'ok' END")
    assert (result.status, result.rows, result.truncated, result.rows_cut, result.rowcount) == ("ok", ((0, "ok"), (2, "ok")), True, 1, 3)


@pytest.mark.parametrize("sql", ["SELECT 1\0; SELECT 2", "SELECT 'a\0b'", "SELECT '\ud800'", "\ufeff\0", "```sql\nSELECT 1\n```"])
def test_09_bad_text_is_a_sql_error(session: Session, sql: str):
    result = session.execute(sql)
    assert result.status == "sql_error" and result.error


def test_09_numbers_at_the_edges_are_exact(session: Session):
    assert rows(session, "SELECT 9223372036854775807, -9223372036854775808, 9e999, -9e999, 5e-324") == (
        (9223372036854775807, -9223372036854775808, float("inf"), float("-inf"), 5e-324),
    )


# ------------------------------------------------------------------ 10, 11


def test_10_a_fork_inside_a_transaction_is_refused_and_the_transaction_goes_on(session: Session):
    session.execute("BEGIN; UPDATE orders SET amount = 0")
    for verb in (session.fork, session.checkpoint, session.digest, session.delta):
        with pytest.raises(Exception, match="a transaction is open"):
            verb()
    assert rows(session, "SELECT max(amount) FROM orders; COMMIT") == ((0.0,),)
    (fork,) = session.fork()
    assert rows(fork, "SELECT max(amount) FROM orders") == ((0.0,),)
    fork.close()


def test_11_a_checkpoint_keeps_temp_objects_and_settings(session: Session):
    session.execute("CREATE TEMP TABLE t(a); INSERT INTO t VALUES (7); PRAGMA foreign_keys = 1")
    session.checkpoint()
    assert rows(session, "SELECT a FROM t") == ((7,),) and rows(session, "PRAGMA foreign_keys") == ((1,),)


@pytest.mark.parametrize("sql", ["CREATE TEMP TABLE t(a)", "CREATE TEMP VIEW t AS SELECT 1", "ATTACH '' AS t"])
def test_11_a_fork_that_would_lose_something_is_refused(session: Session, sql: str):
    session.execute(sql)
    with pytest.raises(Exception, match="'t' belongs to this connection"):
        session.fork()


def test_11_a_fork_and_a_restore_carry_the_connections_settings(session: Session):
    session.execute("PRAGMA foreign_keys = 1; PRAGMA case_sensitive_like = 1; PRAGMA recursive_triggers = 0")
    snapshot = session.checkpoint()
    (fork,) = session.fork()
    session.execute("PRAGMA foreign_keys = 0")
    session.restore(snapshot)
    for other in (fork, session):
        assert rows(other, "PRAGMA foreign_keys") == ((1,),) and rows(other, "SELECT 'a' LIKE 'A'") == ((0,),)
        assert rows(other, "PRAGMA recursive_triggers") == ((0,),)
    session.reset()
    assert rows(session, "PRAGMA foreign_keys") == ((0,),)
    fork.close()


# ------------------------------------------------------------------ 12, 13, 14


def test_12_a_lease_on_a_derived_image_pays_for_its_own_pages_only(backend: SqliteBackend, lease: Lease):
    image = backend.derive(lease().image, ["UPDATE orders SET note = 'set up', amount = amount + 1"])
    with backend.lease(image, owner="small", quota=Quota(delta_bytes=3 * 4096)) as session:
        assert session.stats().delta_pages == 0 and session.stats().held_bytes == 0
        assert session.execute("UPDATE customer SET name = 'x' WHERE id = 1").status == "ok"
        assert session.execute("UPDATE orders SET note = 'y'").status == "full"


def test_13_cutting_a_result_skips_nothing(session: Session):
    result = session.execute("SELECT id FROM orders; CREATE TABLE later(a); INSERT INTO later VALUES (1); -- done", max_rows=10)
    assert (len(result.rows), result.truncated, result.rows_cut, result.quota, result.statements) == (10, True, None, "max_rows=10", 3)
    assert rows(session, "SELECT * FROM later") == ((1,),)


def test_13_a_cut_returning_still_writes_everything(session: Session):
    result = session.execute("UPDATE orders SET amount = 1 RETURNING id", max_rows=5)
    assert (len(result.rows), result.rows_cut, result.rowcount) == (5, ROWS - 5, ROWS)
    assert rows(session, "SELECT count(*) FROM orders WHERE amount = 1") == ((ROWS,),)


DENIED = [
    "SELECT load_extension('x')", "SELECT fts3_tokenizer('simple')", "PRAGMA journal_mode = delete", "PRAGMA journal_mode(off)",
    "PRAGMA hard_heap_limit = 1", "PRAGMA temp_store_directory = '/tmp'", "PRAGMA cache_size = -9000000", "PRAGMA page_size = 8192",
    "PRAGMA writable_schema = 1", "PRAGMA mmap_size = 1000000", "PRAGMA locking_mode = normal", "PRAGMA wal_checkpoint", "PRAGMA schema_version = 9",
    "PRAGMA threads = 8", "PRAGMA no_such_pragma", "ATTACH 'x.db' AS x", "ATTACH ':memory:' AS x", "VACUUM INTO 'x.db'", "SELECT * FROM pragma_hard_heap_limit",
]  # fmt: skip


@pytest.mark.parametrize("sql", DENIED)
def test_14_what_the_policy_refuses_is_denied_and_not_an_error_of_sql(session: Session, sql: str):
    result = session.execute(sql)
    assert result.status == "denied" and result.error and "not authorized" in result.error.replace("authorization denied", "not authorized")


def test_14_a_denied_name_in_a_text_or_a_column_is_fine(session: Session):
    assert session.execute("SELECT 'ATTACH load_extension', 1 AS load_extension, replace('a', 'b', 'c'), 'PRAGMA journal_mode'").status == "ok"
    assert session.execute("SELECT no_such_column FROM orders").status == "sql_error"


# ------------------------------------------------------------------ 15, 16, 17, 18


def test_15_databases_of_equal_size_have_unequal_digests(backend: SqliteBackend, tmp_path: Path):
    digests = set()
    for value in (1, 2):
        with sqlite3.connect(tmp_path / f"{value}.sqlite") as db:
            db.execute("CREATE TABLE t(a)")
            db.execute("INSERT INTO t VALUES (?)", (value,))
        db.close()
        with backend.lease(backend.import_base(tmp_path / f"{value}.sqlite"), owner="test") as session:
            digests.add(session.digest())
            session.execute("CREATE TABLE u(b)")
            digests.add(session.digest())
    assert len(digests) == 4


def test_16_a_replaced_file_is_another_base(backend: SqliteBackend, tmp_path: Path):
    path = make_shop(tmp_path / "one.sqlite", 100)
    first = backend.import_base(path)
    path.unlink()
    make_shop(path, 200)
    second = backend.import_base(path)
    assert first.digest != second.digest
    for image, count in ((first, 100), (second, 200)):
        with backend.lease(image, owner="test") as session:
            assert rows(session, "SELECT count(*) FROM orders") == ((count,),)


def test_16_bases_are_given_back(backend: SqliteBackend, tmp_path: Path):
    files, bases = len(list(Path("/proc/self/fd").iterdir())), backend.pages.live()["bases"]
    for i in range(8):
        backend.import_base(make_shop(tmp_path / f"{i}.sqlite", 20 + i))
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 1 and backend.pages.live()["bases"] <= bases + 1


def test_17_pages_that_only_snapshots_keep_count_against_the_quota(lease: Lease):
    session = lease(delta_bytes=100 * 4096)
    snapshots, status = [], "ok"
    for turn in range(40):
        status = session.execute(f"UPDATE orders SET amount = {turn + 0.5} WHERE id < 400").status
        if status != "ok":
            break
        snapshots.append(session.checkpoint())
    assert status == "full" and 2 <= len(snapshots) < 20 and session.stats().held_bytes <= 100 * 4096
    del snapshots
    assert session.execute("UPDATE orders SET amount = -1 WHERE id < 400").status == "ok"


def test_18_a_long_digest_of_one_session_holds_up_no_other(lease: Lease):
    busy, other = lease(), lease()
    busy.execute("UPDATE orders SET note = hex(randomblob(500))")
    stop = threading.Event()
    worst = [0.0]

    def digest() -> None:
        while not stop.is_set():
            busy.digest()

    thread = threading.Thread(target=digest)
    thread.start()
    try:
        times = []
        for _ in range(50):
            started = time.monotonic()
            rows(other, "SELECT count(*) FROM customer WHERE id < 3")
            times.append(time.monotonic() - started)
        worst[0] = sorted(times)[len(times) // 2]
    finally:
        stop.set()
        thread.join()
    assert worst[0] < 0.05


# ------------------------------------------------------------------ 19, 20


def test_19_an_export_replaces_nothing_not_even_its_own_base(session: Session, tmp_path: Path):
    before = session.image.path.read_bytes()
    alias = tmp_path / "alias.sqlite"
    alias.symlink_to(session.image.path)
    for target in (session.image.path, alias):
        with pytest.raises(UserError, match="exists already"):
            session.export(target)
    assert session.image.path.read_bytes() == before


def test_19_a_base_that_somebody_touched_is_refused(backend: SqliteBackend, session: Session):
    stored = session.image.path
    copy = stored.with_name("copy")
    shutil.copyfile(stored, copy)
    copy.replace(stored)
    with pytest.raises(Exception, match="changed or removed"):
        backend.lease(session.image, owner="test")
    assert not session.reset().holds, "and a reset on it is not proven"


def test_20_an_exhausted_autoincrement_is_a_sql_error(session: Session, lease: Lease):
    session.execute("CREATE TABLE a(id INTEGER PRIMARY KEY AUTOINCREMENT); INSERT INTO a VALUES (9223372036854775807)")
    result = session.execute("INSERT INTO a DEFAULT VALUES")
    assert (result.status, result.quota) == ("sql_error", None) and result.error and "full" in result.error
    session = lease(delta_bytes=8192)
    assert session.execute("UPDATE orders SET amount = 1").status == "full"
    session.execute("CREATE TEMP TABLE a(id INTEGER PRIMARY KEY AUTOINCREMENT); INSERT INTO a VALUES (9223372036854775807)")
    assert session.execute("INSERT INTO a DEFAULT VALUES").status == "sql_error", "and what an earlier statement was refused is forgotten"


def test_20_a_timeout_that_takes_the_transaction_with_it_says_so(session: Session):
    session.execute("BEGIN; UPDATE customer SET name = 'kept?'")
    slow = "UPDATE orders SET amount = (SELECT count(*) FROM orders a, orders b, orders c WHERE a.amount > b.amount + c.amount)"
    result = session.execute(slow, deadline_s=0.2)
    assert (result.status, result.transaction_lost, result.in_transaction) == ("timeout", True, False)
    assert rows(session, "SELECT count(*) FROM customer WHERE name = 'kept?'") == ((0,),)


@pytest.mark.parametrize(
    ("script", "lost"),
    [
        ("BEGIN; INSERT OR ROLLBACK INTO customer SELECT 1, 1, 1, 1", True),
        ("BEGIN; INSERT INTO customer SELECT 1, 1, 1, 1", False),
        ("BEGIN; ROLLBACK; SELEC 1", False),
        ("BEGIN; COMMIT; SELEC 1", False),
        ("INSERT INTO customer SELECT 1, 1, 1, 1", False),
    ],
)
def test_20_transaction_lost_means_lost(session: Session, script: str, lost: bool):
    result = session.execute(script)
    assert (result.status, result.transaction_lost) == ("sql_error", lost)
    assert re.search("syntax|UNIQUE", result.error or "")
