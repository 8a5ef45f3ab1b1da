"""The words of the state layer: what a call answers, what a session may use, how a reset is proven."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from savepoint.state.errors import StateError

SqlValue = int | float | str | bytes | None
ExecStatus = Literal["ok", "sql_error", "denied", "timeout", "too_big", "full", "infra"]


@dataclass(frozen=True, slots=True)
class Quota:
    """What one session may use. Refuses nonsense when made (ValueError).

    delta_bytes: changed pages, those that only the session's snapshots keep included; the image's own pages do not count.
    temp_bytes: rollback journals, TEMP tables, sorters. length: bytes of one value or row; bounds what a single opcode can cost, since
    no deadline interrupts an opcode. sql_length: bytes of SQL in one call. columns: columns of a result (a wider table of the base image lifts it).
    vm_steps: SQLite's instructions in one call (None: no bound), a deadline that is the same on every machine; it is looked at every 64th of it,
    and between statements. heap_bytes: of the connection's page caches, statements and schema.
    """

    delta_bytes: int = 64 << 20
    temp_bytes: int = 128 << 20
    length: int = 200_000
    sql_length: int = 256 << 10
    columns: int = 500
    vm_steps: int | None = None
    heap_bytes: int | None = 64 << 20

    def __post_init__(self) -> None:
        for name, low, high in (
            ("delta_bytes", 0, 1 << 50),
            ("temp_bytes", 0, 1 << 50),
            ("length", 1000, 1_000_000_000),
            ("sql_length", 1, 1_000_000_000),
            ("columns", 1, 2000),
            ("vm_steps", 1, 1 << 50),
            ("heap_bytes", 1 << 20, 1 << 50),
        ):
            value = getattr(self, name)
            if value is None and name in ("vm_steps", "heap_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"Quota.{name}={value!r}: must be an integer from {low} to {high}")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one call of `execute` did: a statement, or a script up to the first statement that failed.

    status: "ok"; "sql_error" SQLite refused it; "denied" the policy did; "timeout" the deadline passed; "too_big" a value or the column
    names are over a limit; "full" the session's delta or temporary space is used up; "infra" our own failure, never an agent's.
    columns, rows: the result of the last statement that has result columns; empty unless status is "ok". `rows` is cut at
    `max_rows`/`max_bytes`, and then `truncated` is True; cutting never skips a later statement. rows_cut: how many rows are missing
    (0: none), None when more exist and nobody counted them. (A write's RETURNING row with text that is no UTF-8 counts as missing too.)
    rowcount: rows changed by the statements that ran. error: one text as SQLite words it. quota: the limit that was hit, as "name=value".
    transaction_lost: a transaction was open and the failure rolled all of it back. statements: how many ran to their end.
    delta_pages: pages in which the session now differs from its image. vm_steps: SQLite's instructions, its measure of work.
    """

    status: ExecStatus
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[SqlValue, ...], ...] = ()
    truncated: bool = False
    rows_cut: int | None = 0
    rowcount: int = 0
    error: str | None = None
    quota: str | None = None
    in_transaction: bool = False
    transaction_lost: bool = False
    statements: int = 0
    delta_pages: int = 0
    vm_steps: int = 0
    wall_ms: float = 0.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """An exact state of a session's database, frozen, without a connection and without a copy. Any session on the same base can go back to it, and
    `backend.lease(snapshot, ...)` opens a new one there. It lives while somebody holds it, or, kept by the tree, until it is pruned.

    base_digest: the imported file under it. pages: pages in which it differs from the session's image. size: bytes of the database.
    settings: the connection's settings then, which a restore sets again. TEMP objects are not part of it: they belong to a connection.
    """

    label: str
    base_digest: str
    size: int
    pages: int
    settings: dict[str, str] = field(repr=False)
    contents: Any = field(repr=False)
    image: Any = field(default=None, repr=False)  # a session that begins here is a session of this image
    node: Any = field(default=None, repr=False)  # its place in the tree; None: in none

    @property
    def pruned(self) -> bool:
        return self.contents is None

    @property
    def lost(self) -> str | None:
        """Why its contents are gone, by no doing of the caller: the worker process that alone held them has died. None: they are there."""
        return getattr(self.contents, "lost", None)

    def held(self) -> Any:
        """The backend's handle of the contents. StateError when they were pruned."""
        if self.contents is None:
            raise StateError(f"snapshot {self.label!r} was pruned")
        return self.contents

    def release(self) -> None:
        """Give the contents up now, whoever still holds the snapshot."""
        at_once = getattr(self.contents, "release", None)  # where they are elsewhere, they are to go now rather than some time
        object.__setattr__(self, "contents", None)
        if at_once is not None:
            at_once()


@dataclass(frozen=True, slots=True)
class ResetProof:
    """That a reset left nothing behind: no page differs from the image, the size is the image's, the digest is the image's."""

    image_digest: str
    pages_before: int
    pages_after: int
    size_ok: bool
    digest_ok: bool
    generation: int

    @property
    def holds(self) -> bool:
        return self.pages_after == 0 and self.size_ok and self.digest_ok

    def __str__(self) -> str:
        verdict = "reset proven" if self.holds else "RESET NOT PROVEN"
        size, digest = ("equal" if ok else "DIFFERS" for ok in (self.size_ok, self.digest_ok))
        return (
            f"{verdict}: {self.pages_before} changed pages dropped, {self.pages_after} left, size {size}, "
            f"digest {self.image_digest} {digest}, generation {self.generation}"
        )


@dataclass(frozen=True, slots=True)
class SessionStats:
    """delta_pages/delta_bytes: what differs from the image now. held_bytes: what counts against `Quota.delta_bytes`, snapshots included.
    temp_bytes: journals, TEMP tables and sorters now. size: bytes of the database. executions: calls of `execute` so far. changes: of the contents so
    far; equal numbers mean equal contents."""

    delta_pages: int
    delta_bytes: int
    held_bytes: int
    temp_bytes: int
    size: int
    executions: int
    changes: int = 0
