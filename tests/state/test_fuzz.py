"""Differential fuzzing: the same random statements on a session and on plain SQLite, with random checkpoints, restores, forks and resets."""

from __future__ import annotations

import random
from pathlib import Path

import apsw
import pytest
from state_support import Lease, file_hash

from savepoint.state import SqliteBackend

TABLES = "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY 1"


def statement(rng: random.Random) -> str:
    k, a, n = rng.random(), rng.randrange(4000), rng.choice((1, 10, 300, 2000))
    if k < 0.25:
        return f"UPDATE orders SET amount = amount + {a}, note = substr(note, 1, {a % 80}) || '{a}' WHERE id BETWEEN {a} AND {a + n}"
    if k < 0.40:
        return f"DELETE FROM orders WHERE id BETWEEN {a} AND {a + n}"
    if k < 0.55:
        return f"INSERT OR REPLACE INTO orders SELECT id + {a * 10}, customer, amount, status, note FROM orders WHERE id BETWEEN {a} AND {a + n}"
    if k < 0.62:
        return f"CREATE TABLE IF NOT EXISTS t{a % 5} AS SELECT * FROM orders WHERE id < {a}"
    if k < 0.67:
        return f"DROP TABLE IF EXISTS t{a % 5}"
    if k < 0.72:
        return f"CREATE INDEX IF NOT EXISTS i{a % 4} ON orders({rng.choice(('amount', 'status', 'note', 'customer'))})"
    if k < 0.75:
        return f"DROP INDEX IF EXISTS i{a % 4}"
    if k < 0.79:
        return "VACUUM"
    if k < 0.86:
        return f"BEGIN; UPDATE orders SET note = '{'y' * (a % 3000)}' WHERE id % 7 = {a % 7}; ROLLBACK"
    if k < 0.90:
        return "BEGIN; DELETE FROM orders WHERE id % 3 = 0; SAVEPOINT s; UPDATE customer SET name = name || 'z'; ROLLBACK TO s; COMMIT"
    if k < 0.93:
        make, keep = "CREATE TABLE IF NOT EXISTS blobs(x)", "(SELECT max(rowid) - 3 FROM blobs)"
        return f"{make}; INSERT INTO blobs VALUES (zeroblob({a * 30})); DELETE FROM blobs WHERE rowid < {keep}"
    if k < 0.96:  # a page of the base changes and changes back
        return f"UPDATE customer SET city = 'x' WHERE id = {a % 300}; UPDATE customer SET city = 'city' || (id % 97) WHERE id = {a % 300}"
    return f"SELECT count(*), sum(amount) FROM orders WHERE note LIKE '%{a % 100}%'"


def plain(blob: bytes) -> apsw.Connection:
    """SQLite's own in-memory database with these contents."""
    connection = apsw.Connection(":memory:", statementcachesize=0)
    connection.deserialize("main", blob)
    return connection


def dump(connection: apsw.Connection) -> list[tuple[object, ...]]:
    names = [str(name) for (name,) in connection.execute(TABLES).fetchall()]
    return [(name, *connection.execute(f'SELECT * FROM main."{name}" ORDER BY rowid').fetchall()) for name in names]


def quiet(connection: apsw.Connection, sql: str) -> str | None:
    """Run it; the class of the error, rolled back, if there is one."""
    try:
        connection.execute(sql).fetchall()
    except apsw.Error as error:
        if not connection.get_autocommit():
            connection.execute("ROLLBACK")
        return type(error).__name__
    return None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("delta_pages", [100_000, 120])
def test_a_session_behaves_as_plain_sqlite(backend: SqliteBackend, lease: Lease, seed: int, delta_pages: int):
    """With ample room, and with so little that statements fail for want of it: then plain SQLite is told to forget the statement too."""
    rng = random.Random(seed)
    session, sibling = lease(delta_bytes=delta_pages * 4096), lease()
    blob = session.image.path.read_bytes()
    stored, untouched = file_hash(session.image.path), sibling.digest("logical")
    reference, snapshots, snapshot = plain(blob), [], None
    for step in range(140):
        sql = statement(rng)
        before = reference.serialize("main")
        result = session.execute(sql, deadline_s=60)
        if session.in_transaction:
            session.execute("ROLLBACK")
        if result.status == "full":
            reference.close()
            reference = plain(_of(session, before, sql))
        else:
            assert (quiet(reference, sql) is None) == (result.status == "ok"), (seed, step, sql, result)
        if step % 7 == 0:
            assert dump(_raw(session)) == dump(reference), (seed, step, sql)
        chance = rng.random()
        if chance < 0.06:
            snapshots.append((session.checkpoint(), session.digest(), reference.serialize("main")))
        elif chance < 0.12 and snapshots:
            snapshot, digest, contents = rng.choice(snapshots)
            session.restore(snapshot)
            assert session.digest() == digest
            reference.close()
            reference = plain(contents)
        elif chance < 0.15:
            (fork,) = session.fork()
            assert fork.digest() == session.digest()
            fork.execute("DELETE FROM orders; VACUUM")
            fork.close()
        elif chance < 0.17:
            assert session.reset().holds
            reference.close()
            reference = plain(blob)
        elif chance < 0.18:
            del snapshots[:]
    assert dump(_raw(session)) == dump(reference)
    assert session.execute("PRAGMA integrity_check").rows == (("ok",),) and session.reset().holds
    assert sibling.digest("logical") == untouched and file_hash(session.image.path) == stored
    session.close()
    sibling.close()
    snapshot = None
    del snapshots[:]
    assert backend.pages.live()["pages"] == 0, "every page is given back"


def _raw(session: object) -> apsw.Connection:
    return session._lease.connection.raw  # type: ignore[attr-defined]


def _of(session: object, before: bytes, sql: str) -> bytes:
    """What plain SQLite holds after a script of which the session finished so and so many statements and then ran out of room."""
    connection = plain(before)
    for statement in session.statements(sql):  # type: ignore[attr-defined]
        if dump(connection) == dump(_raw(session)):
            break
        quiet(connection, statement)
    if not connection.get_autocommit():
        connection.execute("ROLLBACK")
    assert dump(connection) == dump(_raw(session)), sql
    return connection.serialize("main")


def test_an_export_is_what_the_session_shows(lease: Lease, tmp_path: Path):
    rng, session = random.Random(7), lease()
    for number in range(12):
        session.execute(statement(rng), deadline_s=60)
        session.export(tmp_path / f"{number}.sqlite")
        exported = apsw.Connection(str(tmp_path / f"{number}.sqlite"))
        assert dump(exported) == dump(_raw(session)) and exported.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        exported.close()
