"""Which page store this process uses: the C VFS if it is installed or can be built, else the Python one. Says which, and why.

`SAVEPOINT_VFS=c` or `=python` forces one; a forced one that cannot be had is an error, never a silent change.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import apsw

from savepoint.errors import UserError
from savepoint.state.errors import StateError
from savepoint.state.sqlite import build
from savepoint.state.sqlite.native import NativeStore
from savepoint.state.sqlite.overlay import OverlayStore
from savepoint.state.sqlite.pages import PageStore

_UNUSABLE = (OSError, apsw.Error, AttributeError, StateError)
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Found:
    """A page store, or None and why there is none."""

    store: PageStore | None
    why: str
    library: Path | None = None


_found: dict[str, _Found] = {}


def page_store(kind: str | None = None) -> PageStore:
    """The page store `kind` ("c", "python"; None: `$SAVEPOINT_VFS`, else the best there is), made once per process.

    Raises `UserError` when a forced one cannot be had, with the reason.
    """
    wanted = kind or os.environ.get("SAVEPOINT_VFS") or "auto"
    if wanted not in ("auto", "c", "python"):
        raise UserError(f"SAVEPOINT_VFS={wanted}: use c or python")
    with _lock:
        if wanted != "python":
            native = _once("c", _load_native)
            if native.store is not None:
                return native.store
            if wanted == "c":
                raise UserError(f"SAVEPOINT_VFS=c: the C VFS cannot be used here: {native.why}")
        store = _once("python", lambda: _Found(cast(PageStore, OverlayStore()), "")).store
        return cast(PageStore, store)


def status() -> dict[str, str | None]:
    """{"vfs": "c", "python", or None (the forced one cannot be had), "why": one line, "library": the compiled file or None,
    "forced": `$SAVEPOINT_VFS` or None}."""
    forced = os.environ.get("SAVEPOINT_VFS") or None
    try:
        kind = page_store().kind
    except UserError as error:
        return {"vfs": None, "why": str(error), "library": None, "forced": forced}
    if kind == "c":
        return {"vfs": kind, "why": _found["c"].why, "library": str(_found["c"].library), "forced": forced}
    why = "SAVEPOINT_VFS=python" if forced == "python" else f"slower; the C VFS cannot be used here: {_found['c'].why}"
    return {"vfs": kind, "why": why, "library": None, "forced": forced}


def _once(kind: str, load: Callable[[], _Found]) -> _Found:
    if kind not in _found:
        _found[kind] = load()
    return _found[kind]


def _load_native() -> _Found:
    """The C store and where it came from: installed with the package, built earlier, or built now."""
    source, problems = build.source_hash(), []
    for how, path in (("installed", build.installed_library()), ("built at first use", build.cached_library())):
        if path is not None and path.exists():
            try:
                return _Found(cast(PageStore, NativeStore(path, source)), f"{how}: {path}", path)
            except _UNUSABLE as error:
                problems.append(" ".join(str(error).split()))
    try:
        path = build.build_library()
        return _Found(cast(PageStore, NativeStore(path, source)), f"built at first use: {path}", path)
    except (build.BuildError, *_UNUSABLE) as error:
        return _Found(None, "; ".join([*problems, " ".join(str(error).split())]))
