"""Shared fixtures: a small database of our own, a world over it, and where the shared data lies."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from savepoint.envs.sql.world import World
from savepoint.state import open_backend


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data, where the checkout has one beside it."""
    folder = Path(os.environ.get("SAVEPOINT_SHARED", Path(__file__).parents[1].parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no shared data at {folder} (set SAVEPOINT_SHARED)")
    return folder


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """A folder with one database, `people.sqlite`: 60 people in five cities, some without an age."""
    folder = tmp_path / "databases"
    folder.mkdir()
    rng = random.Random(1)
    with sqlite3.connect(folder / "people.sqlite") as db:
        db.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER, height REAL)")
        cities = ["Rome", "Oslo", "Lima", "Kyiv", "Bern"]
        rows = [(i, f"name{i}", rng.choice(cities), rng.choice([None, *range(20, 70)]), rng.uniform(1.5, 2.0)) for i in range(1, 61)]
        db.executemany("INSERT INTO people VALUES (?, ?, ?, ?, ?)", rows)
        db.execute("CREATE TABLE notes (person INTEGER, text TEXT)")
    db.close()
    return folder


@pytest.fixture
def world(people: Path, tmp_path: Path) -> Iterator[World]:
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        yield World(people, backend=backend)
