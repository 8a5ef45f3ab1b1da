"""Sessions in worker processes: what they answer, what a death costs, who may still touch them, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from state_support import file_hash, rows

from savepoint.errors import UserError
from savepoint.state import BaseImage, NoRoom, Quota, RemoteSession, SetupError, StaleLease, StateError, WorkerBackend, client, open_backend, remote
from savepoint.state.aio import AsyncBackend
from savepoint.state.pool import Slot
from savepoint.state.steps import finish

FOREVER = "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def pool(store: Path) -> Iterator[WorkerBackend]:
    with WorkerBackend(store, workers=2, threads=2) as backend:
        yield backend


@pytest.fixture
def base(pool: WorkerBackend, shop: Path) -> BaseImage:
    return pool.import_base(shop)


@pytest.fixture
def session(pool: WorkerBackend, base: BaseImage) -> RemoteSession:
    return pool.lease(base, owner="test")


def pids(pool: WorkerBackend) -> list[int]:
    return [worker.pid for worker in pool.stats().workers if worker.pid is not None]


def kill_all(pool: WorkerBackend) -> None:
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something comes true; only as long as it has not is waited for."""
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(0.005)
    return True


# ---------------------------------------------------------------------- answers


def test_sql_runs_in_another_process(pool: WorkerBackend, session: RemoteSession):
    assert rows(session, "SELECT count(*) FROM orders") == ((3000,),)
    assert pids(pool)
    assert os.getpid() not in pids(pool)


@pytest.mark.parametrize(
    "value", ["9223372036854775807", "-9223372036854775808", "1e308 * 10", "-0.0", "NULL", "x'00ff00'", "''", "'é🙂'", "CAST(x'ff41' AS TEXT)", "char(0, 65)"]
)
def test_every_value_arrives_as_it_left(value: str, store: Path, shop: Path, session: RemoteSession):
    with open_backend(store=store) as local, local.lease(local.import_base(shop), owner="test") as here:
        assert repr(rows(session, f"SELECT {value}")) == repr(rows(here, f"SELECT {value}"))


def test_sql_with_a_lone_surrogate_is_the_agents_error(session: RemoteSession):
    assert session.execute("SELECT '\ud800'").status == "sql_error"


@pytest.mark.parametrize("count", [0, 1, 64, 65, 500, 3000])
def test_a_result_of_any_length_arrives_whole_and_in_order(count: int, session: RemoteSession):
    found = rows(session, f"SELECT id, note FROM orders ORDER BY id LIMIT {count}", max_rows=10_000)
    assert [row[0] for row in found] == list(range(count))


def test_a_result_of_ten_megabytes_is_no_timeout(session: RemoteSession):
    result = session.execute("SELECT a.id, a.note, b.note FROM orders a, orders b WHERE b.id < 20", deadline_s=5, max_rows=100_000, max_bytes=20 << 20)
    assert (result.status, len(result.rows), result.truncated) == ("ok", 60_000, False)


def test_one_cell_larger_than_any_frame_arrives(pool: WorkerBackend, base: BaseImage):
    with pool.lease(base, owner="test", quota=Quota(length=4 << 20)) as session:
        ((cell,),) = rows(session, "SELECT zeroblob(3000000)", max_bytes=8 << 20)
        assert cell == bytes(3_000_000)


def test_the_connection_lives_on_between_calls(session: RemoteSession):
    session.execute("CREATE TEMP TABLE t(a); BEGIN; INSERT INTO t VALUES (1)")
    assert session.in_transaction
    assert rows(session, "SELECT a FROM t") == ((1,),)
    session.execute("ROLLBACK")
    assert not session.in_transaction
    assert rows(session, "SELECT a FROM t") == ()


def test_limits_that_are_none_are_refused_here_already(session: RemoteSession):
    with pytest.raises(ValueError, match="deadline_s"):
        session.execute("SELECT 1", deadline_s=0)


def test_a_derived_image_is_the_same_in_every_worker(pool: WorkerBackend, base: BaseImage):
    task = pool.derive(base, ["ALTER TABLE orders ADD COLUMN rating", "UPDATE orders SET rating = id % 5"])
    sessions = [pool.lease(task, owner=f"test-{i}") for i in range(4)]
    assert len({worker.pid for worker in pool.stats().workers if worker.sessions}) == 2
    assert {session.digest() for session in sessions} == {task.digest}
    assert {rows(session, "SELECT sum(rating) FROM orders") for session in sessions} == {((6000,),)}


def test_a_derived_image_has_the_digest_that_it_has_in_process(store: Path, shop: Path, pool: WorkerBackend, base: BaseImage):
    setup = ["CREATE TABLE t AS SELECT * FROM orders", "DELETE FROM orders"]
    with open_backend(store=store) as local:
        assert pool.derive(base, setup).digest == local.derive(local.import_base(shop), setup).digest


def test_a_set_up_that_fails_is_named(pool: WorkerBackend, base: BaseImage):
    with pytest.raises(SetupError, match="no such table: nowhere"):
        pool.derive(base, ["INSERT INTO nowhere VALUES (1)"])


def test_checkpoint_restore_fork_and_reset_work_as_in_process(session: RemoteSession, base: BaseImage):
    session.execute("UPDATE orders SET amount = 1")
    snapshot = session.checkpoint("ones")
    session.execute("DROP TABLE orders")
    session.restore(snapshot)
    left, right = session.fork(2)
    left.execute("DELETE FROM orders")
    assert rows(right, "SELECT count(*), sum(amount) FROM orders") == ((3000, 3000.0),)
    assert rows(left, "SELECT count(*) FROM orders") == ((0,),)
    proof = session.reset()
    assert proof.holds
    assert proof.image_digest == session.digest() == base.digest


def test_a_snapshot_can_be_restored_in_another_worker(pool: WorkerBackend, base: BaseImage):
    first, second = pool.lease(base, owner="a"), pool.lease(base, owner="b")
    assert first._slot is not second._slot
    first.execute("UPDATE orders SET amount = 7")
    second.execute("DELETE FROM customer")
    second.restore(first.checkpoint("sevens"))
    assert rows(second, "SELECT sum(amount) FROM orders") == ((21000.0,),)
    assert second.digest("logical") == first.digest("logical")


def test_a_fork_inside_a_transaction_is_refused(session: RemoteSession):
    session.execute("BEGIN; DELETE FROM orders")
    with pytest.raises(StateError, match="transaction"):
        session.fork()
    session.execute("ROLLBACK")
    assert rows(session.fork()[0], "SELECT count(*) FROM orders") == ((3000,),)


def test_parking_moving_comparing_and_exporting_work_as_in_process(pool: WorkerBackend, base: BaseImage, tmp_path: Path):
    first, second = pool.lease(base, owner="a", seed=5), pool.lease(base, owner="b", seed=5)
    assert first._slot is not second._slot
    first.execute("UPDATE orders SET amount = 7 WHERE id < 100; SELECT random()")
    snapshot = first.checkpoint()
    first.execute("DELETE FROM customer WHERE id < 5")
    increment = first.delta(snapshot)
    first.park()
    assert first.parked
    assert pool.stats().leases.parked == 1
    assert rows(first, "SELECT count(*) FROM customer") == ((295,),)
    assert pool.stats().leases.parked == 0
    second.restore(snapshot)
    second.apply(increment)
    assert second.digest() == first.digest()
    assert rows(second, "SELECT random()") == rows(first, "SELECT random()")
    assert [(d.table, d.removed, d.changed) for d in first.diff()] == [("customer", 5, 0), ("orders", 0, 99)]  # one had that amount already
    assert [(d.table, d.removed) for d in second.diff(snapshot)] == [("customer", 5)]
    assert first.diff(snapshot, snapshot) == ()
    first.export(tmp_path / "out.sqlite")
    import sqlite3

    with sqlite3.connect(tmp_path / "out.sqlite") as db:
        assert db.execute("SELECT count(*) FROM customer").fetchone() == (295,)
    assert [call.sql for call in first.history][:2] == ["UPDATE orders SET amount = 7 WHERE id < 100; SELECT random()", "DELETE FROM customer WHERE id < 5"]


def test_a_damaged_delta_is_refused_before_it_is_sent(session: RemoteSession):
    delta = bytearray(session.delta())
    delta[-1] ^= 1
    with pytest.raises(StateError, match="damaged"):
        session.apply(bytes(delta))
    assert rows(session, "SELECT count(*) FROM orders") == ((3000,),)


def test_increments_do_not_pile_up(session: RemoteSession):
    for i in range(60):
        session.execute(f"UPDATE orders SET amount = {i}")
        assert len(session._shipped.parts) <= 8
    kill_all(session._backend)
    assert rows(session, "SELECT sum(amount) FROM orders") == ((3000 * 59.0,),)


# ---------------------------------------------------------------------- deaths


def test_a_death_between_calls_costs_nothing(pool: WorkerBackend, session: RemoteSession):
    session.execute("PRAGMA foreign_keys = 1; UPDATE orders SET amount = 7; CREATE TABLE mine(a); INSERT INTO mine VALUES (3)")
    digest = session.digest()
    kill_all(pool)
    assert rows(session, "SELECT sum(amount), (SELECT a FROM mine), last_insert_rowid() FROM orders") == ((21000.0, 3, 1),)
    assert rows(session, "PRAGMA foreign_keys") == ((1,),)
    assert session.digest() == digest
    assert sum(worker.restarts for worker in pool.stats().workers) == 1


def test_a_death_during_a_call_costs_nothing(pool: WorkerBackend, session: RemoteSession):
    session.execute("UPDATE orders SET amount = 7")
    slow = "UPDATE orders SET amount = amount + 1; WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c LIMIT 3000000) SELECT count(*) FROM c"
    worker = next(worker for worker in pool.stats().workers if worker.sessions)
    killer = threading.Timer(0.1, os.kill, (worker.pid, signal.SIGKILL))
    killer.start()
    result = session.execute(slow, deadline_s=30)
    killer.join()
    assert (result.status, result.rows) == ("ok", ((3_000_000,),))
    assert sum(worker.restarts for worker in pool.stats().workers) == 1
    assert rows(session, "SELECT sum(amount) FROM orders") == ((24000.0,),)


def test_what_no_delta_can_carry_is_lost_as_infra_and_a_reset_begins_anew(pool: WorkerBackend, session: RemoteSession):
    for setup, what in (("BEGIN; DELETE FROM orders", "open transaction"), ("CREATE TEMP TABLE t(a)", "TEMP object 't'")):
        session.execute(setup)
        kill_all(pool)
        for _ in range(2):
            result = session.execute("SELECT count(*) FROM orders")
            assert result.status == "infra"
            assert what in (result.error or "")
        with pytest.raises(StateError, match=what):
            session.checkpoint()
        assert session.reset().holds
        assert rows(session, "SELECT count(*) FROM orders") == ((3000,),)


def test_without_shipping_a_death_costs_the_changed_sessions_alone(store: Path, shop: Path):
    with WorkerBackend(store, workers=1, ship="never") as pool:
        base = pool.import_base(shop)
        changed, unchanged = pool.lease(base, owner="changed"), pool.lease(base, owner="unchanged")
        changed.execute("DELETE FROM orders")
        assert rows(unchanged, "SELECT count(*) FROM orders") == ((3000,),)
        kill_all(pool)
        assert changed.execute("SELECT 1").status == "infra"
        assert rows(unchanged, "SELECT count(*) FROM orders") == ((3000,),)


def test_a_statement_that_ends_its_process_twice_is_the_agents(pool: WorkerBackend, base: BaseImage):
    poison, neighbour = pool.lease(base, owner="poison"), pool.lease(base, owner="neighbour")
    poison.execute("UPDATE orders SET amount = 7")
    slot, stop = poison._slot, threading.Event()

    def execution_kills() -> None:
        """Does what a statement that crashes SQLite would do: whenever it runs, its process dies."""
        while not stop.is_set():
            process = slot._process
            if process is not None and any(b"crash" in call.body for call in process._running.values()):
                os.kill(process.pid, signal.SIGSEGV)
                eventually(lambda process=process: bool(process.dead))  # type: ignore[misc]
            time.sleep(0.001)

    killer = threading.Thread(target=execution_kills)
    killer.start()
    try:
        result = poison.execute(f"/* crash */ {FOREVER}", deadline_s=20)
    finally:
        stop.set()
        killer.join()
    assert result.status == "sql_error"
    assert "ended its process twice" in (result.error or "")
    assert "SIGSEGV" in (result.error or "")
    assert rows(poison, "SELECT sum(amount) FROM orders") == ((21000.0,),)
    assert rows(neighbour, "SELECT count(*) FROM orders") == ((3000,),)


HANGS = "SELECT instr(hex(zeroblob(6000000)), hex(zeroblob(3000000)) || 'x')"  # one instruction, for minutes


@pytest.mark.parametrize("workers", [0, 1])
def test_scripts_run_in_one_call_as_they_would_one_by_one(workers: int, store: Path, shop: Path):
    scripts = ["SELECT 1", "SELEC", "CREATE TABLE log(n); INSERT INTO log VALUES (7)", "SELECT n, 'x' FROM log", "SELECT id FROM orders LIMIT 900", "BEGIN"]
    with open_backend(store=store, workers=workers) as backend:
        image = backend.import_base(shop)
        with backend.lease(image, owner="a") as one, backend.lease(image, owner="b") as other:
            expected = [one.execute(sql) for sql in scripts]
            found = other.execute_all(scripts)
            assert [(r.status, r.columns, r.rows, r.error) for r in found] == [(r.status, r.columns, r.rows, r.error) for r in expected]
            assert [call.sql for call in other.history] == scripts
            assert other.in_transaction
            one.execute("ROLLBACK"), other.execute("ROLLBACK")
            assert other.digest("logical") == one.digest("logical")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_time_out_is_the_last_of_the_results(workers: int, store: Path, shop: Path):
    with open_backend(store=store, workers=workers) as backend, backend.lease(backend.import_base(shop), owner="a") as session:
        assert [r.status for r in session.execute_all(["SELECT 1", FOREVER, "SELECT 2"], deadline_s=0.2)] == ["ok", "timeout"]


@pytest.mark.parametrize("before", ["UPDATE orders SET amount = 7", "BEGIN; UPDATE orders SET amount = random()"])
def test_scripts_whose_process_was_killed_run_again_one_by_one(before: str, pool: WorkerBackend, base: BaseImage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    session = pool.lease(base, owner="test", quota=Quota(length=16 << 20))
    session.execute(before)
    results = session.execute_all(["SELECT 1", "INSERT INTO orders(id) VALUES (99999)", HANGS, "SELECT 2"], deadline_s=0.3)
    assert [r.status for r in results] == ["ok", "ok", "timeout"]
    assert results[-1].transaction_lost == before.startswith("BEGIN")
    assert rows(session, "SELECT count(*) FROM orders WHERE id = 99999") == ((0 if before.startswith("BEGIN") else 1,),)


def test_what_no_handler_interrupts_is_killed_and_is_the_agents_timeout(pool: WorkerBackend, base: BaseImage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    session = pool.lease(base, owner="test", quota=Quota(length=16 << 20))
    session.execute("UPDATE orders SET amount = 7")
    session.execute("BEGIN; DELETE FROM orders")
    started = time.monotonic()
    result = session.execute(HANGS, deadline_s=0.5)
    assert time.monotonic() - started < 10  # it would run for minutes
    assert (result.status, result.quota, result.transaction_lost) == ("timeout", "deadline_s=0.5", True)
    assert "process was killed" in (result.error or "")
    assert rows(session, "SELECT sum(amount) FROM orders") == ((21000.0,),)


def test_what_was_committed_and_could_not_be_shipped_is_never_lost_silently(pool: WorkerBackend, base: BaseImage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    session = pool.lease(base, owner="test", quota=Quota(length=16 << 20))
    session.execute("UPDATE orders SET amount = 7; BEGIN; DELETE FROM orders")
    assert session.execute("SELECT instr(hex(zeroblob(6000000)), hex(zeroblob(3000000)) || 'x')", deadline_s=0.5).status == "timeout"
    assert session.execute("SELECT sum(amount) FROM orders").status == "infra"


def test_temp_objects_keep_nothing_else_from_being_shipped(pool: WorkerBackend, base: BaseImage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    session = pool.lease(base, owner="test", quota=Quota(length=16 << 20))
    session.execute("CREATE TEMP TABLE t(a); UPDATE orders SET amount = 7")
    result = session.execute(HANGS, deadline_s=0.5)
    assert result.status == "timeout"
    assert "TEMP object 't' is gone" in (result.error or "")
    assert rows(session, "SELECT sum(amount) FROM orders") == ((21000.0,),)


def test_neighbours_of_a_killed_statement_finish_theirs(store: Path, shop: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    with WorkerBackend(store, workers=1, threads=4) as pool:
        base = pool.import_base(shop)
        hog = pool.lease(base, owner="hog", quota=Quota(length=16 << 20))
        others = [pool.lease(base, owner=f"other-{i}") for i in range(3)]
        results: dict[str, str] = {}

        def run(session: RemoteSession, sql: str, deadline_s: float) -> None:
            results[session.owner] = session.execute(sql, deadline_s=deadline_s).status

        work = "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c LIMIT 6000000) SELECT count(*) FROM c"
        threads = [threading.Thread(target=run, args=(hog, "SELECT instr(hex(zeroblob(6000000)), hex(zeroblob(3000000)) || 'x')", 0.2))]
        threads += [threading.Thread(target=run, args=(other, work, 60)) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {"hog": "timeout", "other-0": "ok", "other-1": "ok", "other-2": "ok"}


def test_a_worker_that_answers_nonsense_is_replaced(pool: WorkerBackend, session: RemoteSession, monkeypatch: pytest.MonkeyPatch):
    real, broken = client.wire.decode, []

    def decode(body: bytes) -> object:
        if not broken:
            broken.append(1)
            raise RuntimeError("nonsense")
        return real(body)

    monkeypatch.setattr(client.wire, "decode", decode)
    assert rows(session, "SELECT count(*) FROM orders") == ((3000,),)
    assert broken
    assert sum(worker.restarts for worker in pool.stats().workers) == 1


def test_workers_that_never_start_are_one_clear_error(store: Path, shop: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    with WorkerBackend(store, workers=1) as pool, pytest.raises(StateError, match="worker processes cannot be started: .* status 1"):
        pool.import_base(shop)


# ---------------------------------------------------------------------- leases


def test_a_lease_ends_when_its_time_is_up_even_while_a_call_runs(pool: WorkerBackend, base: BaseImage):
    session = pool.lease(base, owner="late", ttl_s=0.3)
    started = time.monotonic()
    session.execute(FOREVER, deadline_s=30)
    assert time.monotonic() - started < 10
    with pytest.raises(StaleLease, match=r"'late' ended: its lease of 0.3 s is over"):
        session.execute("SELECT 1")
    assert pool.stats().leases.expired == 1


def test_a_renewed_lease_lasts(pool: WorkerBackend, base: BaseImage):
    session = pool.lease(base, owner="renewed", ttl_s=0.3)
    session.renew(60)
    time.sleep(0.5)
    assert rows(session, "SELECT 1") == ((1,),)
    session.renew(0.1)
    assert eventually(lambda: session.closed)


def test_a_handle_that_was_taken_over_is_stale_and_cannot_close_the_session(pool: WorkerBackend, base: BaseImage):
    first = pool.lease(base, owner="first")
    first.execute("UPDATE orders SET amount = 7")
    second = first.hand_over("second")
    with pytest.raises(StaleLease, match="taken over"):
        first.execute("SELECT 1")
    first.close()
    del first
    assert rows(second, "SELECT sum(amount) FROM orders") == ((21000.0,),)
    assert pool.stats().leases.live == 1


def test_a_session_that_nobody_holds_is_given_back(pool: WorkerBackend, base: BaseImage):
    session = pool.lease(base, owner="leaky")
    slot = session._slot
    other = pool.lease(base, owner="other")
    del session
    assert pool.stats().leases.live == 1
    rows(other, "SELECT 1")
    rows(pool.lease(base, owner="third"), "SELECT 1")

    assert eventually(lambda: live(slot)["sessions"] == slot.sessions)


def test_leases_wait_for_room_in_the_order_of_their_coming_and_are_refused_with_figures(store: Path, shop: Path):
    with WorkerBackend(store, workers=1, budget_bytes=5 << 20) as pool:
        base = pool.import_base(shop)
        first, second = pool.lease(base, owner="first"), pool.lease(base, owner="second")
        with pytest.raises(NoRoom, match=r"no room for a lease of 'third': 2 leases hold 4.2 MB of 5.2 MB; waited 0.1 s"):
            pool.lease(base, owner="third", wait_s=0.1)
        got: list[RemoteSession] = []
        waiter = threading.Thread(target=lambda: got.append(pool.lease(base, owner="third", wait_s=30)))
        waiter.start()
        assert eventually(lambda: pool.stats().leases.waiting == 1)
        first.close()
        waiter.join()
        assert got[0].owner == "third"
        assert second.execute("SELECT 1").status == "ok"


def test_a_lease_that_no_budget_could_hold_is_refused_at_once(store: Path, shop: Path):
    with WorkerBackend(store, workers=1, budget_bytes=1 << 20) as pool, pytest.raises(NoRoom, match="the whole memory budget is 1.0 MB"):
        pool.lease(pool.import_base(shop), owner="large")


def test_a_growing_session_is_charged_for_what_it_holds(pool: WorkerBackend, session: RemoteSession):
    before = pool.stats().leases.charged_bytes
    session.execute("CREATE TABLE big AS SELECT zeroblob(100000) FROM orders LIMIT 100")
    assert pool.stats().leases.charged_bytes > before + (7 << 20)
    session.reset()
    assert pool.stats().leases.charged_bytes == before


def test_a_base_that_was_touched_is_refused_before_a_lease(tmp_path: Path, shop: Path):
    with WorkerBackend(tmp_path, workers=1) as pool:
        base = pool.import_base(shop)
        base.path.chmod(0o644)
        with base.path.open("r+b") as file:
            file.seek(100)
            file.write(b"x")
        with pytest.raises(StateError, match="was changed or removed"):
            pool.lease(base, owner="test")


def test_a_backfill_larger_than_the_memory_of_all_pages_is_spilled_where_the_quota_allows_it(store: Path, shop: Path):
    with WorkerBackend(store, workers=1, budget_bytes=4 << 20) as pool:
        pool.worker_bytes = (512 << 20) + (4 << 20)  # four megabytes for pages
        with pool.lease(pool.import_base(shop), owner="test", quota=Quota(delta_bytes=200 << 20, temp_bytes=64 << 20)) as session:
            session.execute("CREATE TABLE big(a)")
            for _ in range(30):
                assert session.execute("INSERT INTO big SELECT randomblob(1000) FROM orders LIMIT 1000").status == "ok"
            assert rows(session, "SELECT count(*), sum(length(a)) FROM big") == ((30_000, 30_000_000),)
            assert rows(session, "PRAGMA integrity_check") == (("ok",),)
            assert session.stats().held_bytes > 30_000_000


def test_what_neither_memory_nor_spill_file_holds_is_ours_and_not_the_agents(store: Path, shop: Path):
    with WorkerBackend(store, workers=1, budget_bytes=4 << 20, spill_bytes=1) as pool:
        pool.worker_bytes = (512 << 20) + (4 << 20)
        with pool.lease(pool.import_base(shop), owner="test") as session:
            result = session.execute("CREATE TABLE big AS SELECT randomblob(5000) FROM orders")
            assert result.status == "infra"
            assert rows(session, "SELECT count(*) FROM orders") == ((3000,),)


# ---------------------------------------------------------------------- nothing is left


def test_closing_ends_every_process_and_leaves_no_descriptor(store: Path, shop: Path):
    me = psutil.Process()
    descriptors, children = me.num_fds(), len(me.children())
    for _ in range(2):
        with WorkerBackend(store, workers=2) as pool:
            base = pool.import_base(shop)
            for i in range(10):
                pool.lease(base, owner=f"leaked-{i}").execute("DELETE FROM orders")
            assert len(me.children()) > children
        assert (len(me.children()), me.num_fds()) == (children, descriptors)


def test_the_death_of_the_trainer_ends_its_workers(store: Path, shop: Path):
    code = (
        "import sys, time; from savepoint.state import open_backend\n"
        "pool = open_backend(store=sys.argv[1], workers=2); base = pool.import_base(sys.argv[2])\n"
        "kept = [pool.lease(base, owner='x') for _ in range(4)]; [k.execute('SELECT 1') for k in kept]\n"
        "print([w.pid for w in pool.stats().workers], flush=True)\n"
        f"kept[0].execute({FOREVER!r}, deadline_s=600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(store), str(shop)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(word) for word in trainer.stdout.readline().strip("[]\n").split(",")]
        assert all(psutil.pid_exists(pid) for pid in workers)
        time.sleep(0.2)
        trainer.kill()
    assert eventually(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers))


def test_no_secret_of_the_environment_reaches_a_worker(store: Path, shop: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with WorkerBackend(store, workers=1) as pool:
        pool.import_base(shop)
        assert "OPENAI_API_KEY" not in psutil.Process(pids(pool)[0]).environ()


def test_rollouts_ended_at_random_instants_leave_nothing(store: Path, shop: Path):
    """A hundred of them here; `make test-all` runs a thousand."""
    chaos(store, shop, 100, seed=0)


@pytest.mark.slow
def test_a_thousand_rollouts_ended_at_random_instants_leave_nothing(store: Path, shop: Path):
    chaos(store, shop, 1000, seed=1)


def live(slot: Slot) -> dict[str, int]:
    """What exists in a worker; in the next one, when it turns out to be dead."""
    with contextlib.suppress(StateError):
        return finish(slot.ask("live"))  # type: ignore[no-any-return]
    finish(slot.ready())
    return finish(slot.ask("live"))  # type: ignore[no-any-return]


def chaos(store: Path, shop: Path, count: int, seed: int) -> None:
    """Rollouts of random calls, of which each is left alone, cancelled, timed out, or loses its worker to SIGKILL; then everything must be as before."""
    import random

    rng = random.Random(seed)
    me = psutil.Process()
    descriptors, children = me.num_fds(), len(me.children())
    statements = [
        "UPDATE orders SET amount = amount + 1 WHERE id % 7 = 0", "BEGIN", "COMMIT", "CREATE TEMP TABLE t(a)", "SELECT * FROM orders", FOREVER,
        "DROP TABLE customer",
        "CREATE TABLE big AS SELECT zeroblob(20000) FROM orders LIMIT 50", "VACUUM", "SELECT nonsense",
    ]  # fmt: skip
    statuses: dict[str, int] = {}

    async def rollout(backend: AsyncBackend, base: BaseImage, number: int) -> None:
        async with await backend.lease(base, owner=f"rollout-{number}", ttl_s=rng.choice((0.05, 30))) as session:
            snapshot = await session.checkpoint()
            for _ in range(rng.randrange(1, 6)):
                result = await session.execute(rng.choice(statements), deadline_s=rng.choice((0.05, 0.2)))
                statuses[result.status] = statuses.get(result.status, 0) + 1
            if rng.random() < 0.3:
                await session.restore(snapshot)
                for fork in await session.fork(2):
                    await fork.execute("DELETE FROM orders")

    async def killer(pool: WorkerBackend) -> None:
        while True:
            await asyncio.sleep(rng.random() * 0.8)
            # Not one that is still starting: on a busy machine that takes longer than this waits, and three in a row are given up on.
            started = [slot.pid for slot in pool._slots if slot._process is not None and slot._process.hello.done()]
            for pid in rng.sample([pid for pid in started if pid is not None], k=min(1, sum(pid is not None for pid in started))):
                os.kill(pid, rng.choice((signal.SIGKILL, signal.SIGSEGV)))

    async def main() -> None:
        pool = WorkerBackend(store, workers=2, threads=2)
        base = pool.import_base(shop)
        before = file_hash(base.path)
        backend = AsyncBackend(pool)
        killing = asyncio.create_task(killer(pool))
        room = asyncio.Semaphore(16)
        unexpected: list[BaseException] = []

        async def one(number: int) -> None:
            async with room:
                try:
                    async with asyncio.timeout(rng.choice((0.05, 0.3, 60))):
                        await rollout(backend, base, number)
                except (TimeoutError, StateError):
                    pass
                except BaseException as error:
                    unexpected.append(error)

        await asyncio.gather(*(one(number) for number in range(count)))
        killing.cancel()
        gc.collect()  # forks that nobody closed, in the frames of what was cancelled
        assert not unexpected, unexpected[:3]
        with pool.lease(base, owner="after") as session:
            assert rows(session, "SELECT count(*), sum(amount) FROM orders") == ((3000, sum(i * 0.25 for i in range(3000))),)
        # Calls that nobody waits for may end only now, and their errors hold frames that hold the session: a cycle each.
        assert eventually(lambda: gc.collect() >= 0 and pool.stats().leases.live == 0), pool.stats()
        assert pool.stats().leases.charged_bytes == 0
        for slot in pool._slots:
            assert eventually(lambda slot=slot: live(slot)["sessions"] == 0), live(slot)  # type: ignore[misc]
            assert (live(slot)["volumes"], live(slot)["pages"]) == (0, 0), live(slot)
        assert file_hash(base.path) == before
        await backend.close()

    asyncio.run(main())
    assert statuses.get("ok", 0) > count / 20
    assert eventually(lambda: len(me.children()) == children and me.num_fds() <= descriptors), (me.children(), me.num_fds(), descriptors)


# ---------------------------------------------------------------------- asyncio


def test_a_cancelled_call_is_interrupted_and_the_session_goes_on(pool: WorkerBackend, base: BaseImage):
    async def main() -> None:
        async with await AsyncBackend(pool).lease(base, owner="test") as session:
            await session.execute("UPDATE orders SET amount = 7")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await session.execute(FOREVER, deadline_s=60)
            started = time.monotonic()
            assert (await session.execute("SELECT sum(amount) FROM orders")).rows == ((21000.0,),)
            assert time.monotonic() - started < 10

    asyncio.run(main())


def test_scripts_run_in_one_call_for_coroutines_too(pool: WorkerBackend, base: BaseImage):
    async def main() -> None:
        async with await AsyncBackend(pool).lease(base, owner="test") as session:
            assert [r.rows for r in await session.execute_all(["SELECT 1", "SELECT 2"])] == [((1,),), ((2,),)]

    asyncio.run(main())


def test_calls_of_one_session_run_in_order(pool: WorkerBackend, base: BaseImage):
    async def main() -> None:
        async with await AsyncBackend(pool).lease(base, owner="test") as session:
            await session.execute("CREATE TABLE log(n)")
            await asyncio.gather(*(session.execute(f"INSERT INTO log VALUES ({i})") for i in range(50)))
            assert [n for (n,) in (await session.execute("SELECT n FROM log ORDER BY rowid")).rows] == list(range(50))

    asyncio.run(main())


def test_a_long_statement_holds_up_neither_the_loop_nor_other_sessions(pool: WorkerBackend, base: BaseImage):
    async def main() -> None:
        backend = AsyncBackend(pool)
        sessions = [await backend.lease(base, owner=f"test-{i}") for i in range(4)]
        slow = asyncio.create_task(sessions[0].execute(FOREVER, deadline_s=5))
        for session in sessions[1:]:
            assert (await session.execute("SELECT count(*) FROM orders")).rows == ((3000,),)
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    asyncio.run(main())


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "at least one of each"),
        ({"workers": 1, "threads": 0}, "at least one of each"),
        ({"workers": 1_000_000}, "workers=1000000: each needs 50 MB at least"),
        ({"workers": 1, "ship": "sometimes"}, "use 'call' or 'never'"),
    ],
)
def test_bad_options_are_one_clear_error(options: dict[str, object], words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        WorkerBackend(tmp_path, **options)  # type: ignore[arg-type]


def test_a_sandbox_below_what_is_required_is_refused(store: Path, shop: Path):
    with WorkerBackend(store, workers=1, sandboxed=False, require_sandbox="full") as pool, pytest.raises(UserError, match="require_sandbox=full: here .* none"):
        pool.import_base(shop)
