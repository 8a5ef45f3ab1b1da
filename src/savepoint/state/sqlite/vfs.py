"""Which page store this process uses: the C VFS if it is installed or can be built, else the Python one. Says which, and why.

`SAVEPOINT_VFS=c` or `=python` forces one; a forced one that cannot be had is an error, never a silent change.
"""

from __future__ import annotations

import os
import threading
from typing import cast

import apsw

from savepoint.errors import UserError
from savepoint.state.errors import StateError
from savepoint.state.sqlite import build
from savepoint.state.sqlite.native import NativeStore
from savepoint.state.sqlite.overlay import OverlayStore
from savepoint.state.sqlite.pages import PageStore

_lock = threading.Lock()
_stores: dict[str, tuple[PageStore | None, str]] = {}


def page_store(kind: str | None = None) -> PageStore:
    """The page store `kind` ("c", "python"; None: `$SAVEPOINT_VFS`, else the best there is), made once per process.

    Raises `UserError` when a forced one cannot be had, with the reason.
    """
    wanted = kind or os.environ.get("SAVEPOINT_VFS") or "auto"
    if wanted not in ("auto", "c", "python"):
        raise UserError(f"SAVEPOINT_VFS={wanted}: use c or python")
    with _lock:
        store, why = _native() if wanted != "python" else (None, "")
        if store is not None:
            return store
        if wanted == "c":
            raise UserError(f"SAVEPOINT_VFS=c: the C VFS cannot be used here: {why}")
        if "python" not in _stores:
            _stores["python"] = (cast(PageStore, OverlayStore()), "")
        return cast(PageStore, _stores["python"][0])


def status() -> dict[str, str | None]:
    """{"vfs": "c" or "python", "why": one line, "library": path of the compiled VFS or None, "forced": $SAVEPOINT_VFS or None}."""
    forced = os.environ.get("SAVEPOINT_VFS") or None
    try:
        kind = page_store().kind
    except UserError as error:
        return {"vfs": None, "why": str(error), "library": None, "forced": forced}
    if kind == "c":
        why = _stores["c"][1]
        return {"vfs": kind, "why": why, "library": why.rpartition(" ")[2], "forced": forced}
    why = "SAVEPOINT_VFS=python" if forced == "python" else f"the C VFS cannot be used here: {_stores['c'][1]}"
    return {"vfs": kind, "why": why, "library": None, "forced": forced}


def _native() -> tuple[PageStore | None, str]:
    if "c" not in _stores:
        _stores["c"] = _load_native()
    return _stores["c"]


def _load_native() -> tuple[PageStore | None, str]:
    """The C store and where it came from, or None and why not."""
    source, problems = build.source_hash(), []
    for how, find in (("installed", build.installed_library), ("built at first use", build.cached_library)):
        path = find()
        if path is not None and path.exists():
            try:
                return cast(PageStore, NativeStore(path, source)), f"{how}: {path}"
            except (OSError, apsw.Error, AttributeError, StateError) as error:
                problems.append(str(error))
    try:
        path = build.build_library()
        return cast(PageStore, NativeStore(path, source)), f"built at first use: {path}"
    except (build.BuildError, OSError, apsw.Error, AttributeError, StateError) as error:
        return None, "; ".join([*problems, str(error)])
