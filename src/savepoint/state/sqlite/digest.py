"""Digests of a database: of its pages (exact and quick), and of its content (whatever way it came to be)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import apsw

from savepoint.state.session import SqlValue

DIGEST_BYTES = 16


def page_digest(base: str, base_size: int, size: int, delta: bytes) -> str:
    """Digest of a file of `size` bytes that is the base file `base` with the pages of `delta`; the base's own digest if nothing differs.

    Equal digests: equal files. The reverse holds over one base, since a delta lists exactly the pages that differ.
    """
    if not delta and size == base_size:
        return base
    digest = hashlib.blake2b(f"{base} {size} ".encode(), digest_size=DIGEST_BYTES)
    digest.update(delta)
    return digest.hexdigest()


def logical_digest(connection: apsw.Connection) -> str:
    """Digest of the definitions (tables, indexes, views, triggers) and of each table's rows as a multiset.

    Left out: rowids that no column shows, statistics, AUTOINCREMENT counters, the rows of virtual tables (their shadow tables are tables).
    The sum modulo 2**128 of the rows' digests does not depend on their order.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    definitions = "SELECT type, name, tbl_name, sql FROM main.sqlite_schema WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type, name"
    for definition in connection.execute(definitions).fetchall():
        digest.update(_encoded(definition))
        kind, name, _, sql = definition
        if kind == "table" and not str(sql).upper().startswith("CREATE VIRTUAL"):
            digest.update(_rows_digest(connection, quoted(str(name))))
    return digest.hexdigest()


def _rows_digest(connection: apsw.Connection, table: str) -> bytes:
    try:
        return _sum(connection.execute(f"SELECT * FROM main.{table}"))
    except UnicodeDecodeError:  # apsw gives no text that is not UTF-8; as bytes it does
        columns = [quoted(str(row[1])) for row in connection.execute(f"PRAGMA main.table_xinfo({table})") if row[6] != 1]
        cells = ", ".join(f"CASE typeof({c}) WHEN 'text' THEN CAST({c} AS BLOB) ELSE {c} END, typeof({c}) = 'text'" for c in columns)
        return _sum(map(decoded, connection.execute(f"SELECT {cells} FROM main.{table}")))


def decoded(pairs: tuple[Any, ...]) -> tuple[SqlValue, ...]:
    """A row of (value, whether it is text) pairs, text as bytes, to a row with text as str (surrogate escapes where it is no UTF-8)."""
    cells = zip(pairs[::2], pairs[1::2], strict=True)
    return tuple(cell.decode("utf-8", "surrogateescape") if text else cell for cell, text in cells)


def _sum(rows: Iterable[tuple[Any, ...]]) -> bytes:
    total = 0
    for row in rows:
        total += int.from_bytes(hashlib.blake2b(_encoded(row), digest_size=DIGEST_BYTES).digest(), "big")
    return (total % (1 << 128)).to_bytes(DIGEST_BYTES, "big")


def _encoded(row: tuple[SqlValue, ...]) -> bytes:
    return repr(row).encode("utf-8", "surrogateescape")


def quoted(name: str) -> str:
    """A name as SQL takes it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'
