"""A connection of our own on some contents, which no setting, TEMP object or transaction of a session reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import apsw

from savepoint.state.sqlite.connection import FILE
from savepoint.state.sqlite.pages import Image, PageStore


@contextlib.contextmanager
def aside(pages: PageStore, contents: Image) -> Iterator[apsw.Connection]:
    """Reads `contents`; writing is refused (no page may be taken)."""
    volume = pages.volume(contents, None, 0, 1 << 40)
    try:
        volume.register(True)
        connection = apsw.Connection(FILE, vfs=volume.name, flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=0)
        try:
            yield connection
        finally:
            connection.close(True)
    finally:
        volume.close()
