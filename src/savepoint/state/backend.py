"""Where the outside begins: one function that opens a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

from savepoint.errors import UserError
from savepoint.state.pool import WorkerBackend
from savepoint.state.remote import RemoteSession
from savepoint.state.sqlite.backend import SqliteBackend
from savepoint.state.sqlite.session import Session

Backend = SqliteBackend | WorkerBackend
AnySession = Session | RemoteSession


@overload
def open_backend(kind: str = "sqlite", *, store: str | Path | None = None, budget_bytes: int | None = None) -> SqliteBackend: ...
@overload
def open_backend(kind: str = "sqlite", *, store: str | Path | None = None, workers: int, **options: Any) -> Backend: ...
def open_backend(kind: str = "sqlite", *, store: str | Path | None = None, workers: int = 0, **options: Any) -> Backend:
    """The state backend. store: the folder of imported bases (default: `$SAVEPOINT_STORE`, else in the user's cache). UserError for an unknown kind.

    workers: processes that run the SQL; 0 runs it in this one, which is right for scripts and the shell. With workers, `options` are those of
    `WorkerBackend`: threads, ship, budget_bytes, require_sandbox.
    """
    if kind != "sqlite":
        raise UserError(f"state backend {kind!r}: there is only 'sqlite'")
    if workers == 0:
        alone = set(options) - {"budget_bytes", "lease_wait_s"}
        if alone:
            raise UserError(f"{', '.join(sorted(alone))}: only with workers; workers is 0")
        return SqliteBackend(store, **options)
    return WorkerBackend(store, workers=workers, **options)
