"""The database that the tests of the state layer work on, and short ways to ask it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from savepoint.state import Session, SqlValue

ROWS = 3000


def make_shop(path: Path, rows: int = ROWS) -> Path:
    """customer (a tenth of the rows) and orders, about 150 bytes an order, one index."""
    db = sqlite3.connect(path)
    db.executescript(
        "CREATE TABLE customer(id INTEGER PRIMARY KEY, name TEXT, city TEXT, balance REAL);"
        "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer INTEGER, amount REAL, status TEXT, note TEXT);"
    )
    db.executemany("INSERT INTO customer VALUES(?, ?, ?, ?)", ((i, f"name{i}", f"city{i % 97}", i * 1.5) for i in range(rows // 10)))
    db.executemany("INSERT INTO orders VALUES(?, ?, ?, ?, ?)", ((i, i % (rows // 10), i * 0.25, "open", "x" * 80) for i in range(rows)))
    db.execute("CREATE INDEX by_customer ON orders(customer)")
    db.commit()
    db.close()
    return path


def file_hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


Lease = Callable[..., Session]


def rows(session: Session, sql: str, **limits: float) -> tuple[tuple[SqlValue, ...], ...]:
    """The rows of SQL that must succeed."""
    result = session.execute(sql, **limits)  # type: ignore[arg-type]
    assert result.status == "ok", result
    return result.rows
