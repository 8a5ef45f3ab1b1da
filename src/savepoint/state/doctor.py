"""What the state layer has to work with on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import apsw

from savepoint.state.errors import StateError
from savepoint.state.pool import sandbox_level
from savepoint.state.sqlite import build, vfs
from savepoint.state.sqlite.store import default_store


def doctor(store: str | Path | None = None) -> list[tuple[str, bool, str]]:
    """(what, whether it works, detail) of everything that the state layer needs or can use."""
    folder = (Path(store) if store is not None else default_store()).absolute()
    status, command, header = vfs.status(), build.compiler(), build.has_header()
    where = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(where).free
    usable = where.is_dir() and os.access(where, os.W_OK | os.X_OK)
    try:
        sandbox = sandbox_level()
        confined = ("sandbox", sandbox.level == "full", f"of workers: {sandbox}")
    except StateError as error:
        confined = ("sandbox", False, f"no worker starts: {error}")
    return [
        ("apsw", True, f"{apsw.apsw_version()}, SQLite {apsw.sqlite_lib_version()}"),
        ("compiler", command is not None, " ".join(command) if command else "none on PATH (cc, gcc, clang or $CC)"),
        ("sqlite3ext.h", bool(header), "found" if header else "not found: install SQLite's headers (libsqlite3-dev, sqlite-devel)"),
        ("vfs", status["vfs"] is not None, f"{status['vfs'] or 'none'}: {status['why']}"),
        confined,
        ("store", usable, f"{folder}, {free / 2**30:.1f} GiB free" + ("" if usable else f"; {where} cannot be written")),
    ]
