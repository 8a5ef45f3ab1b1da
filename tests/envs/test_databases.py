"""The embedded databases: the same bytes for the same seed, sound, and as untidy as real ones."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from savepoint.envs.sql import databases
from savepoint.errors import UserError


@pytest.fixture(scope="module", params=databases.names())
def built(request, tmp_path_factory) -> Path:
    return databases.build(request.param, tmp_path_factory.mktemp("built") / f"{request.param}.sqlite")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(built: Path, tmp_path: Path):
    again = databases.build(built.stem, tmp_path / "again.sqlite")
    other = databases.build(built.stem, tmp_path / "other.sqlite", seed=1)
    assert again.read_bytes() == built.read_bytes() != other.read_bytes()


def test_it_is_built_in_a_moment_and_of_moderate_size(built: Path, tmp_path: Path):
    started = time.process_time()
    databases.build(built.stem, tmp_path / "timed.sqlite")
    assert time.process_time() - started < 3
    assert 1 << 20 <= built.stat().st_size <= 5 << 20


def test_it_is_sound_and_its_references_hold(built: Path):
    with sqlite3.connect(built) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    db.close()


def test_it_has_what_real_databases_have(built: Path):
    with sqlite3.connect(built) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        references = sum(len(db.execute(f"PRAGMA foreign_key_list({table})").fetchall()) for table in tables)
        cells = [value for table in tables for row in db.execute(f"SELECT * FROM {table}") for value in row]
    db.close()
    assert 8 <= len(tables) <= 12 and references >= 8
    assert None in cells
    assert any(isinstance(cell, str) and not cell.isascii() for cell in cells)
    assert any(isinstance(cell, str) and cell.startswith("2023-") for cell in cells)


def test_placing_makes_it_once_and_refuses_another_database_of_that_name(tmp_path: Path):
    path = databases.place("shop", tmp_path)
    stamp = path.stat().st_mtime_ns
    assert databases.place("shop", tmp_path) == path and path.stat().st_mtime_ns == stamp
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match="is not the embedded database 'shop'"):
        databases.place("shop", tmp_path)
    assert path.read_bytes() == b"mine"


def test_an_unknown_name_and_a_missing_folder_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no embedded database 'bank': there are shop, clinic"):
        databases.build("bank", tmp_path / "bank.sqlite")
    with pytest.raises(UserError, match="cannot be written"):
        databases.build("shop", tmp_path / "no" / "shop.sqlite")
    assert list(tmp_path.iterdir()) == []
