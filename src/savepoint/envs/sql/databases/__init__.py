"""The embedded databases: a shop and a clinic, made by chance from a seed, byte for byte the same for the same seed and version of SQLite.

Each has a handful of narrow tables that small policies learn on (short plain names, text columns with few values of one word, whole numbers), and beside them
what real databases have: wide tables, dates and times, NULLs, names in several scripts, many rows, composite keys, indexes and a view.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import apsw

from savepoint.envs.sql.databases import clinic, shop
from savepoint.envs.sql.databases.chance import Row
from savepoint.errors import UserError

_DATABASES: dict[str, tuple[str, Callable[[Random], Iterator[tuple[str, list[Row]]]]]] = {
    "shop": (shop.SCHEMA, shop.tables),
    "clinic": (clinic.SCHEMA, clinic.tables),
}


def names() -> tuple[str, ...]:
    """The names of the embedded databases."""
    return tuple(_DATABASES)


def build(name: str, path: str | Path, seed: int = 0) -> Path:
    """Make the embedded database `name` at `path`, replacing a file there only once it is complete. UserError: unknown name, or the file cannot be written."""
    if name not in _DATABASES:
        raise UserError(f"no embedded database {name!r}: there are {', '.join(_DATABASES)}")
    schema, tables = _DATABASES[name]
    path = Path(path)
    try:
        handle, partial = tempfile.mkstemp(suffix=".part", dir=path.parent)
        os.close(handle)
        try:
            _write(partial, schema, tables(Random(f"{name} {seed}")))
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    except (apsw.FullError, apsw.IOError, apsw.CantOpenError) as error:
        raise UserError(f"{path}: cannot be written: {error}") from None
    return path


def place(name: str, folder: str | Path) -> Path:
    """`folder/name.sqlite`, made where it is not there yet. UserError when another database has that name."""
    path = Path(folder) / f"{name}.sqlite"
    if not path.exists():
        return build(name, path)
    with tempfile.TemporaryDirectory() as scratch:
        if build(name, Path(scratch) / path.name).read_bytes() != path.read_bytes():
            raise UserError(f"{path}: is not the embedded database {name!r}: move it away, or choose another folder")
    return path


def _write(path: str, schema: str, tables: Iterator[tuple[str, list[Row]]]) -> None:
    connection = apsw.Connection(path)
    try:
        # Neither journal nor sync: a file that is not complete is thrown away as a whole.
        for pragma, value in (("page_size", 4096), ("journal_mode", "OFF"), ("synchronous", "OFF")):
            connection.pragma(pragma, value)
        connection.execute("BEGIN")
        connection.execute(schema)
        for table, rows in tables:
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.execute("COMMIT")
    finally:
        connection.close()
