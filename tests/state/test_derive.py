"""Derived images: set-up runs once, strictly, and costs what it changes."""

from __future__ import annotations

import gc
import time

import pytest
from state_support import ROWS, rows

from savepoint.errors import UserError
from savepoint.state import BaseImage, SetupError, SqliteBackend, StateError

RENAME = "ALTER TABLE customer RENAME COLUMN city TO town"


def test_a_derived_image_holds_what_the_set_up_did_and_the_base_does_not(backend: SqliteBackend, base: BaseImage):
    image = backend.derive(base, [RENAME, "DELETE FROM orders WHERE id >= 10; ANALYZE"])
    assert image.setup == (RENAME, "DELETE FROM orders WHERE id >= 10; ANALYZE") and image.delta_bytes > 0
    with backend.lease(image, owner="a") as session, backend.lease(base, owner="b") as plain:
        assert rows(session, "SELECT max(town), (SELECT count(*) FROM orders) FROM customer") == (("city96", 10),)
        assert rows(plain, "SELECT count(city), (SELECT count(*) FROM orders) FROM customer") == ((ROWS // 10, ROWS),)
        session.execute("DROP TABLE orders")
        assert session.reset().holds and rows(session, "SELECT count(*) FROM orders") == ((10,),)


def test_the_same_set_up_is_run_once(backend: SqliteBackend, base: BaseImage):
    image = backend.derive(base, [RENAME])
    assert backend.derive(base, [RENAME]) is image
    other = backend.derive(base, ["ALTER TABLE customer RENAME COLUMN city TO place"])
    assert len({base.digest, image.digest, other.digest}) == 3


def test_an_image_may_be_derived_from_a_derived_one(backend: SqliteBackend, base: BaseImage):
    first = backend.derive(base, [RENAME])
    second = backend.derive(first, ["ALTER TABLE customer RENAME COLUMN town TO place"])
    assert second.setup == (RENAME, "ALTER TABLE customer RENAME COLUMN town TO place") and second.base_digest == base.digest
    with backend.lease(second, owner="a") as session:
        assert rows(session, "SELECT max(place) FROM customer") == (("city96",),)
        snapshot = session.checkpoint()
    with backend.lease(first, owner="b") as session:
        session.restore(snapshot)
        assert rows(session, "SELECT max(place) FROM customer") == (("city96",),) and session.reset().holds
        assert rows(session, "SELECT max(town) FROM customer") == (("city96",),)


def test_equal_content_has_an_equal_digest(backend: SqliteBackend, base: BaseImage):
    assert backend.derive(base, ["SELECT 1"]).digest == base.digest
    image = backend.derive(base, ["UPDATE customer SET name = 'x' WHERE id = 1"])
    with backend.lease(base, owner="a") as session:
        session.execute("UPDATE customer SET name = 'x' WHERE id = 1")
        assert session.digest() == image.digest


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (["SELECT 1", "ALTER TABLE nobody\n ADD COLUMN x"], "set-up statement 'ALTER TABLE nobody ADD COLUMN x': no such table: nobody"),
        (["DELETE FROM orders; SELEC"], "set-up statement 'SELEC': near"),
        (["PRAGMA journal_mode = wal"], "not authorized"),
        (["BEGIN; DELETE FROM orders"], "leaves a transaction open"),
        (["CREATE TEMP TABLE t(a)"], "makes a TEMP object 't'"),
        (["ATTACH '' AS x"], "makes a attached database 'x'"),
    ],
)
def test_a_set_up_that_fails_names_its_statement(backend: SqliteBackend, base: BaseImage, setup: list[str], words: str):
    with pytest.raises(SetupError) as caught:
        backend.derive(base, setup)
    assert words in str(caught.value) and "\n" not in str(caught.value) and isinstance(caught.value, UserError)
    with backend.lease(base, owner="a") as session:
        assert session.digest() == base.digest


def test_thousands_of_images_leave_nothing_behind(backend: SqliteBackend, base: BaseImage):
    before = backend.pages.live()
    for number in range(400):
        backend.derive(base, [f"ALTER TABLE customer RENAME COLUMN city TO c{number}"])
    gc.collect()
    after = backend.pages.live()
    assert after["volumes"] == before["volumes"] and after["images"] - before["images"] <= 64 and after["pages"] <= 64 * 8


def test_large_images_are_not_kept_for_later(backend: SqliteBackend, base: BaseImage):
    for number in range(3):
        backend.derive(base, [f"CREATE TABLE big AS SELECT randomblob(12000) AS b, {number} FROM orders"])
    assert backend.pages.live()["pages"] * 4096 < 2 * 48 << 20


def test_a_released_image_cannot_be_leased_and_its_sessions_go_on(backend: SqliteBackend, base: BaseImage):
    image = backend.derive(base, [RENAME])
    session = backend.lease(image, owner="a")
    backend.release(image)
    with pytest.raises(StateError, match="was released"):
        backend.lease(image, owner="b")
    assert rows(session, "SELECT max(town) FROM customer") == (("city96",),)
    session.execute("DELETE FROM customer")
    assert session.reset().holds and session.digest("logical")
    session.close()
    again = backend.derive(base, [RENAME])
    assert again is not image and again.digest == image.digest


def test_a_rename_is_derived_in_a_millisecond(backend: SqliteBackend, base: BaseImage):
    times = []
    for number in range(40):
        started = time.perf_counter()
        backend.derive(base, [f"ALTER TABLE customer RENAME TO c{number}"])
        times.append(time.perf_counter() - started)
    assert sorted(times)[len(times) // 2] < 0.005, "a millisecond, with room for a busy machine"
