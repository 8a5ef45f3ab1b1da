"""Sessions: what persists between calls, what checkpoints, forks and resets keep, and who may still use a session when."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from state_support import ROWS, Lease, file_hash, rows

from savepoint.errors import UserError
from savepoint.state import BaseImage, ExecResult, Quota, ResetProof, Session, SqliteBackend, StateError
from savepoint.state.sqlite.digest import page_digest

COUNT = "SELECT count(*) FROM orders"


def test_temp_tables_transactions_and_pragmas_persist_between_calls(session: Session):
    session.execute("CREATE TEMP TABLE t(a)")
    session.execute("BEGIN")
    assert session.execute("DELETE FROM orders").in_transaction and session.in_transaction
    session.execute("ROLLBACK")
    assert not session.in_transaction and rows(session, COUNT) == ((ROWS,),) and rows(session, "SELECT * FROM t") == ()


def test_a_session_writes_to_nobody_elses_database(lease: Lease):
    one, two = lease(), lease()
    stored = file_hash(one.image.path)
    one.execute("DROP TABLE orders; VACUUM")
    assert rows(two, COUNT) == ((ROWS,),) and file_hash(one.image.path) == stored


def test_a_restored_checkpoint_is_exact(session: Session):
    session.execute("UPDATE orders SET amount = 0 WHERE id < 100")
    snapshot, digest, logical = session.checkpoint("zeroed"), session.digest(), session.digest("logical")
    assert (snapshot.label, snapshot.size) == ("zeroed", session.stats().size) and 0 < snapshot.pages == session.stats().delta_pages
    session.execute("DROP TABLE orders; CREATE TABLE orders(x); VACUUM; CREATE TEMP TABLE t(a); BEGIN; INSERT INTO orders VALUES (1)")
    session.restore(snapshot)
    assert (session.digest(), session.digest("logical"), session.in_transaction) == (digest, logical, False)
    assert session.execute("SELECT * FROM t").status == "sql_error", "TEMP objects end with the connection"
    session.execute("DELETE FROM orders")
    session.restore(snapshot)
    assert session.digest() == digest, "a snapshot can be restored again"


def test_snapshots_outlive_their_session_and_serve_others(backend: SqliteBackend, base: BaseImage):
    with backend.lease(base, owner="first") as first:
        first.execute("DELETE FROM orders WHERE id >= 10")
        snapshot = first.checkpoint()
    with backend.lease(base, owner="second") as second:
        second.restore(snapshot)
        assert rows(second, COUNT) == ((10,),)


def test_a_snapshot_of_another_file_is_refused(backend: SqliteBackend, session: Session, tmp_path: Path):
    snapshot = session.checkpoint("mine")
    session.export(tmp_path / "other.sqlite")
    with (tmp_path / "other.sqlite").open("r+b") as file:
        file.seek(68)
        file.write(b"\0\0\0\7")  # application_id
    with backend.lease(backend.import_base(tmp_path / "other.sqlite"), owner="other") as other, pytest.raises(StateError, match="'mine' is of base"):
        other.restore(snapshot)


def test_forks_are_independent_and_equal_at_first(session: Session):
    session.execute("DELETE FROM orders WHERE id >= 100")
    left, right = session.fork(2)
    assert left.digest() == right.digest() == session.digest() and left.owner != right.owner
    left.execute("DELETE FROM orders")
    right.execute("INSERT INTO orders(id) VALUES (1000)")
    session.close()
    assert (rows(left, COUNT), rows(right, COUNT)) == (((0,),), ((101,),))
    assert left.reset().holds and rows(left, COUNT) == ((ROWS,),), "a fork resets to the image"
    left.close()
    right.close()


def test_a_fork_pays_for_its_own_pages_only(lease: Lease):
    session = lease(delta_bytes=400 * 4096)
    session.execute("UPDATE orders SET amount = 1")
    (fork,) = session.fork()
    assert fork.stats().held_bytes == 0 and fork.stats().delta_pages == session.stats().delta_pages > 0
    fork.close()


def test_a_reset_is_proven(session: Session):
    clean = session.reset()
    assert clean.holds and (clean.pages_before, clean.pages_after, clean.generation) == (0, 0, 1)
    session.execute("DELETE FROM orders; PRAGMA user_version = 7; BEGIN; DROP TABLE customer")
    proof = session.reset()
    assert proof.holds and proof.pages_before > 0 and proof.image_digest == session.image.digest and proof.generation == 2
    line = str(proof)
    assert "\n" not in line and line.startswith("reset proven") and proof.image_digest in line
    assert rows(session, COUNT) == ((ROWS,),) and rows(session, "PRAGMA user_version") == ((0,),)


def test_a_reset_that_leaves_something_is_not_proven(session: Session, monkeypatch: pytest.MonkeyPatch):
    session.execute("DELETE FROM orders")
    monkeypatch.setattr(type(session._lease.volume), "restore", lambda self, image: None)
    proof = session.reset()
    assert not proof.holds and not proof.digest_ok and proof.pages_after > 0 and str(proof).startswith("RESET NOT PROVEN")


@pytest.mark.parametrize("wrong", [{"pages_after": 1}, {"size_ok": False}, {"digest_ok": False}])
def test_each_part_of_a_proof_counts(wrong: dict[str, int]):
    right = {"image_digest": "d", "pages_before": 3, "pages_after": 0, "size_ok": True, "digest_ok": True, "generation": 1}
    assert ResetProof(**right).holds and not ResetProof(**{**right, **wrong}).holds  # type: ignore[arg-type]


def test_equal_histories_have_equal_page_digests_and_a_reversed_change_has_the_images(lease: Lease):
    one, two = lease(), lease()
    for session in (one, two):
        session.execute("UPDATE orders SET amount = 7 WHERE id BETWEEN 5 AND 50")
    assert one.digest() == two.digest() != one.image.digest
    two.execute("INSERT INTO customer(id) VALUES (100000)")
    assert one.digest() != two.digest()


def test_the_logical_digest_sees_content_and_nothing_else(lease: Lease):
    plain = lease()
    digest = plain.digest("logical")
    rearranged = lease()
    rearranged.execute(
        "CREATE TABLE o AS SELECT * FROM customer ORDER BY city DESC; DELETE FROM customer; INSERT INTO customer SELECT * FROM o; DROP TABLE o; VACUUM; ANALYZE"
    )
    assert rearranged.digest("logical") == digest and rearranged.digest() != plain.digest()
    shadowed = lease()
    shadowed.execute("CREATE TEMP TABLE orders(a); PRAGMA reverse_unordered_selects = 1")
    assert shadowed.digest("logical") == digest, "TEMP objects and settings are no content"
    for change in (
        "UPDATE customer SET balance = balance + 1e-9 WHERE id = 0", "UPDATE customer SET name = CAST(name AS BLOB) WHERE id = 0", "DROP INDEX by_customer",
        "INSERT INTO customer SELECT 999, name, city, balance FROM customer WHERE id = 0", "CREATE VIEW v AS SELECT 1",
        "UPDATE customer SET name = NULL WHERE id = 3",
        "UPDATE customer SET name = CAST(x'ff' AS TEXT) WHERE id = 3", "ALTER TABLE customer ADD COLUMN extra",
    ):  # fmt: skip
        changed = lease()
        changed.execute(change)
        assert changed.digest("logical") != digest, change


def test_the_logical_digest_reads_every_kind_of_table(session: Session):
    session.execute(
        "CREATE TABLE w(a TEXT PRIMARY KEY, b) WITHOUT ROWID; INSERT INTO w VALUES (CAST(x'ff' AS TEXT), 1);"
        'CREATE TABLE g(a, b AS (a * 2), c AS (a + 1) STORED); INSERT INTO g VALUES (3); CREATE TABLE "odd "" name"("x y");'
        "CREATE VIRTUAL TABLE f USING fts5(t); INSERT INTO f VALUES ('word'); CREATE TABLE s(a TEXT) STRICT"
    )
    before = session.digest("logical")
    session.execute("UPDATE w SET a = CAST(x'fe' AS TEXT)")
    between = session.digest("logical")
    session.execute("INSERT INTO f VALUES ('another')")
    assert len({before, between, session.digest("logical")}) == 3


def test_an_unknown_level_of_digest_is_refused(session: Session):
    with pytest.raises(ValueError, match="'page' or 'logical'"):
        session.digest("deep")  # type: ignore[arg-type]


def test_a_page_digest_depends_on_base_size_and_delta():
    digests = {page_digest(base, 4096, size, delta) for base in ("a", "b") for size in (512, 4096) for delta in (b"", b"x")}
    assert len(digests) == 8 and page_digest("a", 4096, 4096, b"") == "a"


def test_an_export_that_cannot_be_written_leaves_nothing(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="cannot be written: No such file"):
        session.export(tmp_path / "no" / "folder.sqlite")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        session.export(tmp_path / "half.sqlite")
    assert not (tmp_path / "half.sqlite").exists()


# ------------------------------------------------------------------ leases


def test_a_closed_session_says_so(session: Session):
    session.close()
    session.close()
    assert session.closed
    for use in (lambda: session.execute("SELECT 1"), session.checkpoint, session.reset, session.fork, session.stats, lambda: session.in_transaction):
        with pytest.raises(StateError, match="session of 'test' is closed"):
            use()


def test_a_lease_ends_when_its_time_is_up(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="rollout-17", ttl_s=0.05)
    volumes = backend.pages.live()["volumes"]
    time.sleep(0.2)
    assert session.closed and backend.pages.live()["volumes"] == volumes - 1
    with pytest.raises(StateError, match=r"session of 'rollout-17' ended: its lease of 0\.05 s is over"):
        session.execute("SELECT 1")


def test_a_lease_ends_in_the_middle_of_a_call(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="slow", ttl_s=0.1)
    started = time.monotonic()
    result = session.execute("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT sum(x) FROM c", deadline_s=30)
    assert (result.status, result.quota) == ("timeout", None) and time.monotonic() - started < 2
    time.sleep(0.1)
    assert session.closed


def test_a_session_that_nobody_holds_is_given_back(backend: SqliteBackend, base: BaseImage):
    volumes = backend.pages.live()["volumes"]
    session = backend.lease(base, owner="leak")
    session.execute("BEGIN; DELETE FROM orders")
    del session
    gc.collect()
    assert backend.pages.live()["volumes"] == volumes


def test_closing_the_backend_closes_its_sessions(backend: SqliteBackend, base: BaseImage):
    session = backend.lease(base, owner="a")
    (fork,) = session.fork()
    backend.close()
    assert session.closed and fork.closed
    for use in (lambda: backend.lease(base, owner="b"), lambda: backend.derive(base, ["SELECT 1"])):
        with pytest.raises(StateError, match="backend is closed"):
            use()


def test_nonsense_is_refused_when_it_is_made(backend: SqliteBackend, base: BaseImage, session: Session):
    for wrong in ({"delta_bytes": -1}, {"length": 10}, {"columns": 5000}, {"temp_bytes": 1.5}, {"sql_length": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Quota(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ttl_s"):
        backend.lease(base, owner="x", ttl_s=0)
    for limits in ({"deadline_s": 0}, {"max_rows": -1}, {"deadline_s": float("nan")}):
        with pytest.raises(ValueError, match="out of range"):
            session.execute("SELECT 1", **limits)  # type: ignore[arg-type]


def test_a_session_can_be_interrupted_and_goes_on(session: Session):
    threading.Timer(0.1, session.interrupt).start()
    result = session.execute("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT sum(x) FROM c", deadline_s=30)
    assert (result.status, result.error, result.quota) == ("timeout", "interrupted", None)
    assert rows(session, "SELECT 1") == ((1,),)


def test_many_threads_lease_write_and_reset_at_once(backend: SqliteBackend, base: BaseImage):
    results: list[ExecResult | bool] = []

    def work(number: int) -> None:
        for turn in range(4):
            with backend.lease(base, owner=f"thread-{number}") as session:
                session.execute(f"UPDATE orders SET amount = {number} WHERE id % 16 = {turn}")
                snapshot = session.checkpoint()
                (fork,) = session.fork()
                fork.execute("DELETE FROM orders")
                fork.close()
                session.restore(snapshot)
                results.append(session.execute("SELECT count(*) FROM orders WHERE amount = ?1".replace("?1", str(number))))
                results.append(session.reset().holds)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16 * 4 * 2
    assert all(result.status == "ok" and result.rows[0][0] >= ROWS // 16 for result in results if isinstance(result, ExecResult))
    assert all(result for result in results if isinstance(result, bool))


def test_one_session_may_move_between_threads(session: Session):
    answers: list[object] = []

    def work(value: int) -> None:
        answers.append(rows(session, f"UPDATE customer SET balance = {value}; SELECT max(balance) FROM customer"))

    for value in range(5):
        thread = threading.Thread(target=work, args=(value,))
        thread.start()
        thread.join()
    assert answers == [((float(v),),) for v in range(5)]


def test_a_script_that_ends_within_a_transaction_ends_in_peace(shop: Path, tmp_path: Path):
    script = f"""
from savepoint.state import open_backend
backend = open_backend(store={str(tmp_path)!r})
session = backend.lease(backend.import_base({str(shop)!r}), owner="test")
print(session.execute("BEGIN; DELETE FROM orders").status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
