"""Faults of published systems that concern state, each by the letter it has in our notes (F2 to F33): what they do, and what happens here."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from state_support import file_hash, make_shop, rows

from savepoint.state import BaseImage, Session, SetupError, SqliteBackend, WorkerBackend
from savepoint.state.aio import AsyncBackend

COUNT = "SELECT count(*) FROM orders"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerBackend]:
    with WorkerBackend(tmp_path / "pool", workers=1) as pool:
        yield pool


def test_f02_destroying_the_database_destroys_nothing_shared(backend: SqliteBackend, base: BaseImage):
    stored = file_hash(base.path)
    with backend.lease(base, owner="policy") as session:
        assert session.execute("DROP TABLE orders").status == "ok"
    with backend.lease(base, owner="next") as session:
        assert rows(session, COUNT) == ((3000,),)
    assert file_hash(base.path) == stored


def test_f03_a_broken_query_is_no_empty_result(session: Session):
    broken, empty = session.execute("SELECT * FROM nowhere"), session.execute("SELECT * FROM orders WHERE 0")
    assert (broken.status, broken.rows, broken.columns) == ("sql_error", (), ())
    assert (empty.status, empty.rows, len(empty.columns)) == ("ok", (), 5)


def test_f04_nothing_that_a_prediction_leaves_is_seen_by_the_gold(backend: SqliteBackend, base: BaseImage):
    prediction = backend.lease(base, owner="prediction")
    prediction.execute("DELETE FROM orders; CREATE TEMP VIEW customer AS SELECT 1 AS id")
    with backend.lease(base, owner="gold") as gold:
        assert rows(gold, "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM customer)") == ((3000, 300),)
    prediction.execute("DROP VIEW temp.customer")
    (checks,) = prediction.fork()
    assert rows(checks, "SELECT count(*) FROM customer") == ((300,),)


def test_f05_what_ran_once_can_be_looked_at_again_without_running_twice(session: Session):
    assert session.execute("CREATE INDEX once ON orders(amount); SELECT 1").status == "ok"
    (checks,) = session.fork()
    assert rows(checks, "SELECT count(*) FROM sqlite_schema WHERE name = 'once'") == ((1,),)


def test_f11_a_restored_session_reads_no_page_of_before(session: Session):
    clean = session.checkpoint()
    session.execute("DELETE FROM orders; SELECT count(*) FROM orders")
    session.restore(clean)
    assert rows(session, COUNT) == ((3000,),)


def test_f19_a_session_persists_between_calls(session: Session):
    for sql in ("CREATE TEMP TABLE t(a)", "PRAGMA foreign_keys = 1", "BEGIN", "INSERT INTO t VALUES (1)", "UPDATE orders SET amount = 0"):
        assert session.execute(sql).status == "ok"
    assert rows(session, "SELECT a FROM t") == ((1,),)
    session.execute("ROLLBACK")
    assert rows(session, "SELECT sum(amount) > 0 FROM orders") == ((1,),)
    assert rows(session, "PRAGMA foreign_keys") == ((1,),)


def test_f20_a_result_of_megabytes_is_no_timeout(pool: WorkerBackend, shop: Path):
    with pool.lease(pool.import_base(shop), owner="test") as session:
        result = session.execute("SELECT hex(zeroblob(40000)) FROM orders LIMIT 60", max_bytes=10 << 20)
        assert (result.status, len(result.rows)) == ("ok", 60)


def test_f21_a_failing_set_up_is_an_error(backend: SqliteBackend, base: BaseImage):
    with pytest.raises(SetupError, match="no such table"):
        backend.derive(base, ["UPDATE orders SET amount = 1", "INSERT INTO nowhere VALUES (1)"])


def test_f22_a_session_is_found_by_its_lease_alone(pool: WorkerBackend, shop: Path):
    base = pool.import_base(shop)
    sessions = [pool.lease(base, owner="the same name") for _ in range(12)]
    for i, session in enumerate(sessions):
        session.execute(f"UPDATE orders SET amount = {i}")
    assert [rows(session, "SELECT DISTINCT amount FROM orders") for session in sessions] == [((float(i),),) for i in range(12)]


def test_f23_a_lease_makes_no_file(backend: SqliteBackend, base: BaseImage):
    folder = backend.store.folder
    before = sorted(folder.rglob("*"))
    sessions = [backend.lease(base, owner=f"{i}") for i in range(160)]
    for session in sessions:
        session.execute("UPDATE customer SET balance = 0")
    assert sorted(folder.rglob("*")) == before


def test_f24_waiting_for_a_lease_holds_up_no_event_loop(tmp_path: Path, shop: Path):
    async def main(pool: WorkerBackend) -> None:
        backend = AsyncBackend(pool)
        base = await backend.import_base(shop)
        first = await backend.lease(base, owner="first")
        waiting = asyncio.create_task(backend.lease(base, owner="second", wait_s=30))
        ticks = 0
        while ticks < 20:
            await asyncio.sleep(0.001)
            ticks += 1
        assert not waiting.done()
        first.close()
        (await waiting).close()

    with WorkerBackend(tmp_path, workers=1, budget_bytes=3 << 20) as pool:
        asyncio.run(main(pool))


def test_f25_what_ran_out_of_time_writes_no_more(session: Session):
    slow = "BEGIN; UPDATE orders SET amount = 0; SELECT count(*) FROM orders a, orders b, orders c; COMMIT"
    result = session.execute(slow, deadline_s=0.1)
    assert result.status == "timeout"
    session.execute("ROLLBACK")
    digest = session.digest("logical")
    time.sleep(0.2)
    assert session.digest("logical") == digest
    assert rows(session, "SELECT sum(amount) > 0 FROM orders") == ((1,),)


def test_f26_rows_bytes_and_writes_have_bounds(session: Session):
    result = session.execute("SELECT a.note, b.note FROM orders a, orders b", max_rows=50)
    assert (result.status, len(result.rows), result.truncated) == ("ok", 50, True)
    assert session.execute("INSERT INTO orders(id) VALUES (99999)", readonly=True).status == "denied"


def test_f27_a_statement_that_ran_out_of_time_stops_computing(pool: WorkerBackend, shop: Path):
    with pool.lease(pool.import_base(shop), owner="test") as session:
        assert session.execute("SELECT count(*) FROM orders a, orders b, orders c, orders d", deadline_s=0.2).status == "timeout"
        worker = psutil.Process(pool.stats().workers[0].pid)
        before = sum(worker.cpu_times()[:2])
        time.sleep(0.4)
        assert sum(worker.cpu_times()[:2]) - before < 0.2


def test_f28_an_image_without_a_set_up_is_as_protected_as_one_with(backend: SqliteBackend, base: BaseImage):
    for image in (base, backend.derive(base, ["CREATE TABLE extra(a)"])):
        with backend.lease(image, owner="test") as session:
            session.execute("DELETE FROM orders")
        with backend.lease(image, owner="test") as session:
            assert rows(session, COUNT) == ((3000,),)


def test_f29_sessions_leased_at_once_never_meet(backend: SqliteBackend, base: BaseImage):
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(10):
            with backend.lease(base, owner=f"{number}") as session:
                session.execute(f"UPDATE orders SET amount = {number}")
                found = session.execute("SELECT min(amount), max(amount), count(*) FROM orders").rows
                if found != ((number, number, 3000),):
                    wrong.append(found)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_f30_every_connection_begins_with_the_same_settings(backend: SqliteBackend, base: BaseImage):
    task = backend.derive(base, ["PRAGMA foreign_keys = 1", "CREATE TABLE extra(a)"])
    sessions = [backend.lease(image, owner="test") for image in (base, task)]
    sessions += sessions[1].fork(1)
    settings = "SELECT (SELECT * FROM pragma_foreign_keys), (SELECT * FROM pragma_recursive_triggers)"
    assert {rows(session, settings) for session in sessions} == {((0, 0),)}


def test_f31_files_beside_the_users_database_stay(backend: SqliteBackend, tmp_path: Path):
    source = make_shop(tmp_path / "mine.sqlite", 100)
    (tmp_path / "mine_template.sqlite").write_bytes(b"mine too")
    (tmp_path / "db.sqlite").write_bytes(b"and mine")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob("*.sqlite")}
    with backend.lease(backend.import_base(source), owner="test") as session:
        session.execute("DROP TABLE orders; VACUUM")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob("*.sqlite")} == before


def test_f32_several_statements_in_one_text_all_run(session: Session):
    trigger = "CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t WHERE a = ';'; SELECT 1; END;"
    sql = f"CREATE TABLE t(a); INSERT INTO t VALUES ('a;b'), (';'); {trigger} SELECT a FROM t;"
    result = session.execute(sql)
    assert (result.status, result.statements, result.rows) == ("ok", 4, (("a;b",), (";",)))


def test_f33_no_session_ever_finds_the_database_locked(backend: SqliteBackend, base: BaseImage):
    first, second = backend.lease(base, owner="first"), backend.lease(base, owner="second")
    for session in (first, second):
        assert session.execute("BEGIN EXCLUSIVE; UPDATE orders SET amount = 1").status == "ok"
    for session in (first, second):
        assert session.execute("COMMIT").status == "ok"
