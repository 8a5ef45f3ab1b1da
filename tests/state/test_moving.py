"""Sessions that are parked, moved, replayed and compared, and the budgets that are the same on every machine; on both page stores."""

from __future__ import annotations

import gc
import sqlite3
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_support import Lease, make_shop, rows

from savepoint.errors import UserError
from savepoint.state import BaseImage, NoRoom, Quota, Session, SqliteBackend, StaleLease, StateError, open_backend

SUM = "SELECT count(*), sum(amount) FROM orders"
DICE = "SELECT random(), hex(randomblob(5)), (SELECT sum(random() % 100) FROM customer)"


# ---------------------------------------------------------------------- seeded numbers, a fixed clock


def test_random_numbers_follow_from_the_seed(backend: SqliteBackend, base: BaseImage):
    first, again, other = (backend.lease(base, owner="test", seed=seed) for seed in (1, 1, 2))
    drawn = [[rows(session, DICE) for _ in range(3)] for session in (first, again, other)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == 3


def test_random_numbers_are_spread_as_sqlites_are(session: Session):
    ((low, high, mean, distinct),) = rows(
        session, "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 4000), r(v) AS (SELECT random() FROM c) "
        "SELECT min(v), max(v), avg(v / 9223372036854775808.0), count(DISTINCT v) FROM r"
    )  # fmt: skip
    assert low < -9_000_000_000_000_000_000 < 9_000_000_000_000_000_000 < high  # type: ignore[operator]
    assert abs(mean) < 0.05  # type: ignore[arg-type]
    assert distinct == 4000


@pytest.mark.parametrize(("argument", "size"), [("3", 3), ("0", 1), ("-5", 1), ("NULL", 1), ("'x'", 1), ("'4'", 4), ("2.9", 2)])
def test_randomblob_takes_what_sqlites_takes(argument: str, size: int, session: Session):
    ((blob,),) = rows(session, f"SELECT randomblob({argument})")
    assert len(blob) == size  # type: ignore[arg-type]


def test_a_blob_over_the_limit_is_too_big_and_costs_no_memory(session: Session):
    assert session.execute("SELECT randomblob(100000000000)").status == "too_big"


def test_views_and_triggers_may_draw_random_numbers(session: Session):
    session.execute("CREATE VIEW v AS SELECT random() AS r; CREATE TABLE t(a, b DEFAULT (random())); CREATE TRIGGER g AFTER INSERT ON t BEGIN "
                    "UPDATE t SET a = random() WHERE a IS NULL; END; INSERT INTO t(a) VALUES (NULL)")  # fmt: skip
    ((a, b),) = rows(session, "SELECT a, b FROM t")
    assert isinstance(a, int) and isinstance(b, int) and a != b
    assert rows(session, "SELECT typeof(r) FROM v") == (("integer",),)


def test_checkpoints_forks_parks_and_deltas_take_the_numbers_to_come_along(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="test", seed=3)
    rows(session, DICE)
    snapshot, delta = session.checkpoint(), session.delta()
    (fork,) = session.fork()
    expected = rows(session, DICE)
    assert rows(fork, DICE) == expected
    session.restore(snapshot)
    session.park()
    assert rows(session, DICE) == expected
    moved = backend.lease(base, owner="moved", seed=3)
    moved.apply(delta)
    assert rows(moved, DICE) == expected
    session.reset()
    assert rows(session, DICE) == rows(backend.lease(base, owner="fresh", seed=3), DICE)


def test_now_is_one_moment_wherever_it_is_asked(backend: SqliteBackend, base: BaseImage):
    for clock, expected in (
        ("2025-01-01T00:00:00Z", "2025-01-01 00:00:00"),
        ("1999-12-31T23:59:59+02:00", "1999-12-31 21:59:59"),
        ("2031-07-04", "2031-07-04 00:00:00"),
    ):
        session = backend.lease(base, owner="test", clock=clock)
        session.execute("CREATE TABLE t(a DEFAULT CURRENT_TIMESTAMP); INSERT INTO t DEFAULT VALUES")
        query = "SELECT datetime('now'), CURRENT_TIMESTAMP, CURRENT_DATE || ' ' || CURRENT_TIME, datetime(), datetime(unixepoch(), 'unixepoch'), a FROM t"
        assert rows(session, query) == ((expected,) * 6,)
        (fork,) = session.fork()
        assert rows(fork, "SELECT datetime('now')") == ((expected,),)
    assert rows(backend.lease(base, owner="test"), "SELECT datetime('now')") == (("2025-01-01 00:00:00",),)


def test_the_real_clock_can_be_had(backend: SqliteBackend, base: BaseImage):
    ((now,),) = rows(backend.lease(base, owner="test", clock="real"), "SELECT unixepoch()")
    assert abs(now - time.time()) < 60  # type: ignore[operator]


def test_a_clock_that_is_none_is_refused(backend: SqliteBackend, base: BaseImage):
    with pytest.raises(ValueError, match="clock='noon': must be 'real' or an ISO time"):
        backend.lease(base, owner="test", clock="noon")


# ---------------------------------------------------------------------- parking


def test_a_parked_session_goes_on_as_if_nothing_had_been(session: Session):
    session.execute("PRAGMA foreign_keys = 1; UPDATE orders SET amount = 1; CREATE TABLE t(a); INSERT INTO t VALUES (7)")
    session.park()
    assert session.parked
    assert rows(session, f"{SUM}") == ((3000, 3000.0),)
    assert rows(session, "PRAGMA foreign_keys; ") == ((1,),)
    assert rows(session, "SELECT last_insert_rowid()") == ((1,),)
    session.park()
    session.park()
    assert session.checkpoint().pages > 0
    assert session.parked, "a checkpoint needs no connection"


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("BEGIN; DELETE FROM orders", "a transaction is open"),
        ("CREATE TEMP VIEW v AS SELECT 1", "TEMP object 'v'"),
        ("ATTACH '' AS x", "attached database 'x'"),
    ],
)
def test_parking_what_would_be_lost_is_refused(session: Session, sql: str, words: str):
    session.execute(sql)
    with pytest.raises(StateError, match=words):
        session.park()
    assert not session.parked
    assert session.execute(SUM).status == "ok"


def test_a_fork_is_parked_until_it_is_asked(session: Session):
    (fork,) = session.fork()
    assert fork.parked
    assert rows(fork, SUM) == rows(session, SUM)
    assert not fork.parked


# ---------------------------------------------------------------------- deltas


def test_a_session_moves_to_another_backend(session: Session, base: BaseImage, shop: Path, tmp_path: Path):
    session.execute("PRAGMA recursive_triggers = 1; DELETE FROM orders WHERE id % 2; CREATE INDEX i ON orders(amount); VACUUM")
    with open_backend(store=tmp_path / "other") as backend:
        moved = backend.lease(backend.import_base(shop), owner="moved")
        moved.apply(session.delta())
        assert moved.digest() == session.digest()
        assert moved.digest("logical") == session.digest("logical")
        assert rows(moved, "PRAGMA recursive_triggers") == ((1,),)
        assert rows(moved, "PRAGMA integrity_check") == (("ok",),)


def test_increments_follow_a_whole_one(session: Session, backend: SqliteBackend, base: BaseImage):
    session.execute("UPDATE customer SET balance = 0")
    snapshot, whole = session.checkpoint(), session.delta()
    session.execute("DELETE FROM orders WHERE id > 100; VACUUM")
    increment = session.delta(snapshot)
    moved = backend.lease(base, owner="moved")
    moved.apply(whole, increment)
    assert moved.digest() == session.digest()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 1 << 30), flip=st.integers(1, 255))
def test_a_damaged_delta_is_refused_and_changes_nothing(position: int, flip: int, session: Session, backend: SqliteBackend, base: BaseImage):
    session.execute("UPDATE customer SET balance = 0 WHERE id < 3")
    damaged = bytearray(session.delta())
    damaged[position % len(damaged)] ^= flip
    moved = backend.lease(base, owner="moved")
    moved.execute("UPDATE orders SET amount = 2")
    with pytest.raises(StateError, match="delta"):
        moved.apply(bytes(damaged))
    assert rows(moved, SUM) == ((3000, 6000.0),)
    moved.close()


@pytest.mark.parametrize("delta", [b"", b"SVPTDLT1", b"SQLite format 3" * 20])
def test_what_is_no_delta_is_refused(session: Session, delta: bytes):
    with pytest.raises(StateError, match="not a delta"):
        session.apply(delta)


def test_a_delta_of_another_base_is_refused(session: Session, backend: SqliteBackend, tmp_path: Path):
    other = backend.lease(backend.import_base(make_shop(tmp_path / "other.sqlite", 500)), owner="other")
    with pytest.raises(StateError, match="cannot be applied to base"):
        session.apply(other.delta())


def test_a_delta_beyond_the_quota_is_refused_and_leaves_the_image(session: Session, lease: Lease, base: BaseImage):
    session.execute("UPDATE orders SET amount = 1")
    small = lease(delta_bytes=10 * 4096)
    with pytest.raises(StateError, match="No space left|no space left"):
        small.apply(session.delta())
    assert small.digest() == base.digest
    assert small.execute(SUM).status == "ok"


# ---------------------------------------------------------------------- history


def test_history_lists_calls_with_what_they_cost(session: Session):
    session.execute("UPDATE orders SET amount = 1 WHERE id < 10; SELECT * FROM orders LIMIT 3")
    session.execute("SELECT absent")
    first, second = session.history
    assert (first.status, first.statements, first.rows, first.rowcount) == ("ok", 2, 3, 10)
    assert first.vm_steps > 10
    assert first.delta_pages > 0
    assert (second.sql, second.status, second.error) == ("SELECT absent", "sql_error", "no such column: absent")


def test_history_is_bounded(session: Session):
    for i in range(300):
        session.execute(f"SELECT {i} -- {'x' * 3000}")
    assert len(session.history) == 256
    assert len(session.history[0].sql) < 2100
    assert session.history[-1].sql.startswith("SELECT 299")


# ---------------------------------------------------------------------- diff


def test_diff_counts_rows_added_removed_and_changed(session: Session):
    session.execute(
        "DELETE FROM customer WHERE id < 3; UPDATE customer SET balance = -1 WHERE id BETWEEN 10 AND 13; INSERT INTO customer VALUES (9000, 'n', 'c', 0)"
    )
    (diff,) = session.diff()
    assert (diff.table, diff.kind, diff.key) == ("customer", "changed", ("id",))
    assert (diff.added, diff.removed, diff.changed) == (1, 3, 4)
    assert diff.samples[0] == ("removed", (0, "name0", "city0", 0.0))
    assert ("changed", (10, "name10", "city10", 15.0), (10, "name10", "city10", -1.0)) in diff.samples
    assert ("added", (9000, "n", "c", 0.0)) in diff.samples


def test_diff_of_equal_states_is_empty_whatever_the_pages(session: Session):
    session.execute("CREATE TABLE t(a); DROP TABLE t; VACUUM; CREATE INDEX i ON orders(amount)")
    assert session.diff() == ()


def test_diff_between_snapshots(session: Session):
    first = session.checkpoint()
    session.execute("CREATE TABLE t(a); INSERT INTO t VALUES (1), (2)")
    second = session.checkpoint()
    session.execute("DROP TABLE t; ALTER TABLE customer ADD COLUMN extra")
    assert [(d.table, d.kind, d.added, d.removed) for d in session.diff(first, second)] == [("t", "created", 2, 0)]
    assert [(d.table, d.kind, d.added, d.removed) for d in session.diff(second)] == [("customer", "redefined", 300, 300), ("t", "dropped", 0, 2)]


def test_diff_tells_rows_apart_by_key_rowid_or_the_whole_row(session: Session):
    session.execute(
        "CREATE TABLE k(name TEXT PRIMARY KEY, v) WITHOUT ROWID; INSERT INTO k VALUES ('a', 1), ('B', 2), ('c', x'00');"
        "CREATE TABLE r(v); INSERT INTO r VALUES ('x'), ('y');"
        "CREATE TABLE n(p TEXT PRIMARY KEY, v); INSERT INTO n VALUES (NULL, 1), (NULL, 2), ('p', 3);"
        "CREATE TABLE w(rowid, _rowid_, oid); INSERT INTO w VALUES (1, 2, 3), (1, 2, 3), (4, 5, 6)"
    )
    before = session.checkpoint()
    session.execute(
        "UPDATE k SET v = 9 WHERE name = 'B'; UPDATE r SET v = 'z' WHERE v = 'y'; UPDATE n SET v = 7 WHERE v = 2; "
        "DELETE FROM w WHERE oid = 6; UPDATE w SET oid = 1 WHERE _rowid_ = 2"
    )
    found = {d.table: (d.key, d.added, d.removed, d.changed) for d in session.diff(before)}
    assert found == {"k": (("name",), 0, 0, 1), "r": (("rowid",), 0, 0, 1), "n": (("rowid",), 0, 0, 1), "w": ((), 2, 3, 0)}


def test_diff_reads_text_that_is_no_utf8(session: Session):
    session.execute("CREATE TABLE t(a INTEGER PRIMARY KEY, b); INSERT INTO t VALUES (1, CAST(x'ff' AS TEXT))")
    before = session.checkpoint()
    session.execute("UPDATE t SET b = CAST(x'fe' AS TEXT)")
    (diff,) = session.diff(before)
    assert diff.samples == (("changed", (1, "\udcff"), (1, "\udcfe")),)


# ---------------------------------------------------------------------- export


def test_an_export_is_a_database_of_its_own(session: Session, tmp_path: Path):
    session.execute("DELETE FROM orders; VACUUM")
    session.export(tmp_path / "out.sqlite")
    with sqlite3.connect(tmp_path / "out.sqlite") as db:
        assert db.execute("SELECT (SELECT count(*) FROM orders), count(*) FROM customer").fetchone() == (0, 300)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_overwrites_nothing_and_never_its_base(session: Session, base: BaseImage, tmp_path: Path):
    before = base.path.read_bytes()
    for path in (base.path, tmp_path):
        with pytest.raises(UserError, match="exists already"):
            session.export(path)
    assert base.path.read_bytes() == before


# ---------------------------------------------------------------------- budgets


def test_a_budget_of_steps_gives_the_same_verdict_every_time(lease: Lease):
    query = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {}) SELECT count(*) FROM c"
    verdicts = []
    for _ in range(3):
        session = lease(vm_steps=100_000)
        verdicts.append(
            [(r.status, r.quota, r.vm_steps if r.status == "ok" else None) for r in (session.execute(query.format(n)) for n in (100, 5000, 50_000, 2))]
        )
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert [status for status, *_ in verdicts[0]] == ["ok", "ok", "timeout", "ok"]
    assert verdicts[0][2][1] == "vm_steps=100000"


def test_a_budget_of_steps_holds_for_a_whole_script(lease: Lease):
    query = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 2000) SELECT count(*) FROM c;"
    session = lease(vm_steps=100_000)
    assert session.execute(query).status == "ok"
    result = session.execute(query * 20)
    assert (result.status, result.quota) == ("timeout", "vm_steps=100000")
    assert 0 < result.statements < 20


def test_one_connection_cannot_take_the_heap(lease: Lease):
    session = lease(heap_bytes=1 << 20, columns=2000, sql_length=4 << 20)
    assert session.execute("SELECT 1").status == "ok"
    tables = "".join(f"CREATE TABLE t{i}({', '.join(f'column_with_a_long_name_{j}' for j in range(400))});" for i in range(60))
    result = session.execute(tables)
    assert (result.status, result.quota) == ("too_big", "heap_bytes=1048576")


@pytest.mark.parametrize("quota", [{"vm_steps": 0}, {"heap_bytes": 10}, {"length": 10}, {"columns": 0}, {"delta_bytes": -1}, {"temp_bytes": 1.5}])
def test_a_quota_below_its_minimum_is_named(quota: dict[str, int]):
    (name,) = quota
    with pytest.raises(ValueError, match=f"Quota.{name}="):
        Quota(**quota)


def test_temporary_space_is_counted_for_each_session(lease: Lease):
    small, large = lease(temp_bytes=1 << 20), lease(temp_bytes=64 << 20)
    fill = "CREATE TEMP TABLE t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 3000) SELECT x, hex(zeroblob(500)) AS pad FROM c"
    assert large.execute(fill).status == "ok"
    assert large.stats().temp_bytes > 3_000_000
    result = small.execute(fill)
    assert (result.status, result.quota) == ("full", "temp_bytes=1048576")
    assert small.execute(SUM).status == "ok"


# ---------------------------------------------------------------------- leases in the caller's own process


def test_leases_in_process_have_a_budget_owners_and_an_end(shop: Path, tmp_path: Path):
    with open_backend(store=tmp_path / "store", budget_bytes=5 << 20) as backend:
        base = backend.import_base(shop)
        first, _second = backend.lease(base, owner="first"), backend.lease(base, owner="second")
        with pytest.raises(NoRoom, match="2 leases hold 4.2 MB of 5.2 MB"):
            backend.lease(base, owner="third", wait_s=0.05)
        first.park()
        third = backend.lease(base, owner="third", ttl_s=0.2)
        assert (backend.stats().leases.live, backend.stats().leases.parked) == (2, 1)
        third.renew(0.05)
        time.sleep(0.3)
        with pytest.raises(StaleLease, match="'third' ended: its lease of 0.05 s is over"):
            third.execute("SELECT 1")
        assert backend.stats().leases.expired == 1
    with pytest.raises(StaleLease, match="is closed"):
        first.execute("SELECT 1")


def test_a_session_that_nobody_holds_gives_its_lease_back(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="leaky")
    session.execute("UPDATE orders SET amount = 1")
    del session
    assert backend.stats().leases.live == 0
    assert backend.pages.live()["volumes"] == 0


def test_ten_thousand_forks_leave_nothing(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="test", ttl_s=None)
    session.execute("UPDATE customer SET balance = 0")
    gc.collect()
    before = backend.pages.live()
    for _ in range(100):
        for fork in session.fork(100):
            fork.close()
    assert backend.pages.live() == before
    assert backend.stats().leases.live == 1


def test_pages_are_numbered_from_zero_in_a_pack(session: Session):
    session.execute("UPDATE customer SET balance = 0 WHERE id = 0")
    data = session.delta()
    assert data[:8] == b"SVPTDLT1"
    assert struct.unpack_from("<I", data, 8) == (0,)
