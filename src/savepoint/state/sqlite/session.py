"""A leased session: one connection on a private copy-on-write volume, for as long as the lease lasts."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import apsw
import apsw.ext

from savepoint.state.errors import StateError
from savepoint.state.image import BaseImage
from savepoint.state.session import ExecResult, ExecStatus, Quota, ResetProof, SessionStats, Snapshot, SqlValue
from savepoint.state.sqlite.pages import HOST_FULL, PAGE_QUOTA, TEMP_QUOTA
from savepoint.state.sqlite.policy import Policy, harden, words
from savepoint.state.sqlite.split import split_statements
from savepoint.state.watchdog import watchdog

if TYPE_CHECKING:
    from savepoint.state.sqlite.backend import SqliteBackend

_STEPS = 20_000  # VM steps between two looks at the clock


class Session:
    """A private database over an immutable image. One connection for its whole life, so TEMP objects, open transactions and pragmas persist.

    `execute` answers an agent's mistakes with an `ExecResult`; StateError is for the caller's own. Usable from any thread, by one at a time.
    `restore` and `reset` open the connection anew: TEMP objects, open transactions and connection settings are gone after them.
    """

    def __init__(self, backend: SqliteBackend, image: BaseImage, *, owner: str, quota: Quota, contents: Any = None, ttl_s: float | None = None) -> None:
        self.image, self.owner, self.quota, self.ttl_s = image, owner, quota, ttl_s
        self._backend, self._generation, self._executions = backend, 0, 0
        page = image.page_size
        self._volume = backend.pages.volume(image.contents, contents, -(-quota.delta_bytes // page), quota.temp_bytes)
        self._policy = Policy()
        self._connection: apsw.Connection | None = None
        self._steps = 0
        self._expires = None if ttl_s is None else time.monotonic() + ttl_s
        self._open()
        backend.keep(self)

    # ------------------------------------------------------------------ SQL

    def execute(self, sql: str, *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False) -> ExecResult:
        """Run a statement or a script, up to the first statement that fails. Never raises for what the SQL does.

        deadline_s: seconds for the whole call. max_rows, max_bytes: the result is cut there, and says so; later statements still run.
        readonly: every statement that could write, by DML, DDL or pragma, is "denied".
        """
        call = _Call(self, time.monotonic() + deadline_s, max_rows, max_bytes, readonly)
        return call.run(sql)

    @property
    def in_transaction(self) -> bool:
        return self._live().in_transaction

    @property
    def closed(self) -> bool:
        return self._connection is None

    @property
    def expired(self) -> bool:
        """Whether the lease's time is up. Its session is closed at the next call, or by the backend."""
        return self._expires is not None and time.monotonic() > self._expires

    # ------------------------------------------------------------------ state

    def checkpoint(self, label: str = "") -> Snapshot:
        """The contents now, in constant time. The connection goes on. StateError inside a transaction: its pages are not yet a state."""
        self._settled("checkpoint")
        frozen = self._volume.freeze()
        stats = self._volume.stats()
        return Snapshot(label, self.image.digest, stats.size, stats.delta_pages, frozen)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of a session on the same image."""
        if snapshot.base_digest != self.image.digest:
            raise StateError(f"snapshot {snapshot.label!r} belongs to image {snapshot.base_digest}, not {self.image.digest}")
        self._replace(snapshot.contents)

    def fork(self, n: int = 1) -> list[Session]:
        """`n` independent sessions with the same contents. StateError inside a transaction, or while TEMP objects exist: a fork would lose them."""
        self._settled("fork")
        temporary = self._live().execute("SELECT name FROM temp.sqlite_master LIMIT 1").fetchone()
        if temporary:
            raise StateError(f"fork: the TEMP object {temporary[0]!r} belongs to this connection and would be lost; drop it first")
        frozen = self._volume.freeze()
        return [Session(self._backend, self.image, owner=self.owner, quota=self.quota, contents=frozen, ttl_s=self.ttl_s) for _ in range(n)]

    def reset(self) -> ResetProof:
        """Drop everything the session did, and prove it: no page differs from the image, its size and digest are the image's."""
        before = self._volume.stats().delta_pages
        self._replace(None)
        stats = self._volume.stats()
        return ResetProof(self.image.digest, before, stats.delta_pages, stats.same_size, self.digest() == self.image.digest, self._generation)

    def digest(self, level: str = "page") -> str:
        """"page": the image's digest while nothing differs, else a digest of it and of the pages that differ; equal digests are equal files.
        "logical": a digest of definitions and rows; equal contents have equal digests, however they came to be."""
        if level == "logical":
            return self._logical()
        if level != "page":
            raise ValueError(f"level must be 'page' or 'logical', not {level!r}")
        self._settled("digest")
        stats = self._volume.stats()
        if stats.delta_pages == 0 and stats.same_size:
            return self.image.digest
        return content_digest(self.image.digest, stats.size, self.delta())

    def delta(self) -> bytes:
        """The pages that differ from the base file, each as a native int64 page number (from 0) and its bytes."""
        self._settled("delta")
        return self._volume.freeze().delta()

    def export(self, path: str | Path) -> None:
        """Write the contents as an ordinary database file. StateError when the file exists, so that nothing is overwritten."""
        self._settled("export")
        path = Path(path)
        try:
            with path.open("xb") as file:
                self._write(file)
        except FileExistsError:
            raise StateError(f"{path}: exists already") from None

    def stats(self) -> SessionStats:
        s, page = self._volume.stats(), self.image.page_size
        return SessionStats(s.delta_pages, s.delta_pages * page, s.held_pages * page, s.temp_bytes, s.size, self._executions)

    def close(self) -> None:
        """Give the session back. Closing twice is nothing."""
        if self._connection is not None:
            self._connection.close(True)
            self._connection = None
            self._volume.close()
            self._backend.forget(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _live(self) -> apsw.Connection:
        if self._connection is None:
            raise StateError(f"the session of {self.owner!r} is closed")
        if self.expired:
            self.close()
            raise StateError(f"the lease of {self.owner!r} has expired")
        return self._connection

    def _open(self) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE  # no SQLITE_OPEN_URI: a file name can then name no other VFS
        self._connection = apsw.Connection("session", vfs=self._volume.name, flags=flags, statementcachesize=0)
        self._policy = Policy()
        harden(self._connection, self.quota, self._policy, self.image.columns)

    def _settled(self, what: str) -> None:
        if self._live().in_transaction:
            raise StateError(f"{what}: a transaction is open; COMMIT or ROLLBACK first")

    def _replace(self, contents: Any) -> None:
        self._live().close(True)
        self._volume.restore(contents)
        self._generation += 1
        self._open()

    def _write(self, file: Any) -> None:
        page, stats = self.image.page_size, self._volume.stats()
        with self.image.path.open("rb") as base:
            while block := base.read(1 << 20):
                file.write(block)
        delta = self.delta()
        for at in range(0, len(delta), 8 + page):
            file.seek(int.from_bytes(delta[at : at + 8], "little") * page)
            file.write(delta[at + 8 : at + 8 + page])
        file.truncate(stats.size)

    def _logical(self) -> str:
        """Digest of every table's definition and rows (as a multiset), and of views, triggers and indexes."""
        connection = self._live()
        self._policy.begin(readonly=True)
        digest = hashlib.blake2b(digest_size=16)
        entries = connection.execute("SELECT type, name, sql FROM main.sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name").fetchall()
        for kind, name, sql in entries:
            digest.update(repr((kind, name, sql)).encode("utf-8", "surrogateescape"))
            if kind == "table" and sql:
                quoted = '"' + str(name).replace('"', '""') + '"'
                total = 0
                for row in connection.execute(f"SELECT * FROM main.{quoted}"):
                    total += int.from_bytes(hashlib.blake2b(repr(row).encode("utf-8", "surrogateescape"), digest_size=16).digest(), "big")
                digest.update((total % (1 << 128)).to_bytes(16, "big"))
        return digest.hexdigest()


class _Call:
    """One call of `execute`: its deadline, its caps and what it has gathered."""

    def __init__(self, session: Session, deadline: float, max_rows: int, max_bytes: int, readonly: bool) -> None:
        self.session, self.deadline, self.max_rows, self.max_bytes, self.readonly = session, deadline, max_rows, max_bytes, readonly
        self.columns: tuple[str, ...] = ()
        self.rows: list[tuple[SqlValue, ...]] = []
        self.truncated = False
        self.statements = self.steps = 0
        self.started = time.monotonic()

    def run(self, sql: str) -> ExecResult:
        session = self.session
        connection = session._live()
        session._executions += 1
        session._policy.begin(self.readonly)
        session._volume.begin()
        changed, open_before = connection.total_changes(), False
        connection.set_progress_handler(self._tick, _STEPS)
        alarm = watchdog.arm(self.deadline, connection.interrupt)
        status: ExecStatus = "ok"
        error: BaseException | None = None
        try:
            for statement in split_statements(sql):
                if time.monotonic() > self.deadline:
                    raise apsw.InterruptError("interrupted")
                open_before = connection.in_transaction
                self._statement(connection, statement)
                self.statements += 1
        except (apsw.Error, UnicodeError, ValueError, MemoryError) as caught:
            error, status = caught, self._classify(caught)
        finally:
            watchdog.disarm(alarm)
            connection.set_progress_handler(None)
        ok = status == "ok"
        return ExecResult(
            status, self.columns if ok else (), tuple(self.rows) if ok else (), self.truncated and ok, None if self.truncated and ok else 0,
            connection.total_changes() - changed, None if error is None else self._words(error), self._quota(), connection.in_transaction,
            open_before and not connection.in_transaction and not ok, self.statements, session._volume.stats().delta_pages, self.steps,
            (time.monotonic() - self.started) * 1000,
        )  # fmt: skip

    def _statement(self, connection: apsw.Connection, statement: str) -> None:
        try:
            columns, rows, cut = self._rows(connection, statement)
        except UnicodeDecodeError as error:
            if not self._reads(connection, statement):
                raise apsw.MismatchError(f"text that is not UTF-8: {error.object[:40]!r}") from None
            columns, rows, cut = self._rows_with_bytes(connection, statement)
        if columns:
            self.columns, self.rows, self.truncated = columns, rows, cut

    def _rows(self, connection: apsw.Connection, statement: str) -> tuple[tuple[str, ...], list[tuple[SqlValue, ...]], bool]:
        """Run one statement: its columns (empty: it has no result), its rows up to the caps, and whether there were more.

        A statement that only reads is left when the caps are reached; one that writes (RETURNING) runs to its end.
        """
        cursor = connection.cursor()
        columns: tuple[str, ...] = ()

        def prepared(cursor: apsw.Cursor, text: str, bindings: object) -> bool:
            nonlocal columns
            if self.readonly and not cursor.is_readonly:
                self.session._policy.denied = "writing"
                raise apsw.AuthError("not authorized: this database is read-only here")
            columns = tuple(str(name) for name, *_ in cursor.get_description())
            if sum(len(name.encode("utf-8", "surrogateescape")) for name in columns) > self.max_bytes:
                raise apsw.TooBigError("the column names are over the limit of the result")
            return True

        cursor.exec_trace = prepared
        rows: list[tuple[SqlValue, ...]] = []
        size, cut = 0, False
        try:
            for row in cursor.execute(statement):
                size += sum(map(_bytes, row))
                if not cut and len(rows) < self.max_rows and size <= self.max_bytes:
                    rows.append(row)
                    continue
                cut = True
                if cursor.is_readonly:
                    break
        finally:
            cursor.close(True)
        return columns, rows, cut

    def _reads(self, connection: apsw.Connection, statement: str) -> bool:
        """Whether a statement is a query that can stand inside another."""
        try:
            return bool(apsw.ext.query_info(connection, f"SELECT * FROM ({statement.rstrip().rstrip(';')}\n)").is_readonly)
        except apsw.Error:
            return False

    def _rows_with_bytes(self, connection: apsw.Connection, statement: str) -> tuple[tuple[str, ...], list[tuple[SqlValue, ...]], bool]:
        """A query's rows where some text is not UTF-8: read again as bytes, and such text kept with surrogate escapes (PEP 383)."""
        query = statement.rstrip().rstrip(";")
        columns = tuple(str(name) for name, *_ in apsw.ext.query_info(connection, query).description)
        names = ", ".join(f"c{i}" for i in range(len(columns)))
        cells = ", ".join(f"typeof(c{i}), CASE typeof(c{i}) WHEN 'text' THEN CAST(c{i} AS BLOB) ELSE c{i} END" for i in range(len(columns)))
        _, doubled, cut = self._rows(connection, f"WITH q({names}) AS (SELECT * FROM ({query}\n)) SELECT {cells} FROM q")
        return columns, [tuple(_text(kind, value) for kind, value in zip(row[::2], row[1::2], strict=True)) for row in doubled], cut

    def _tick(self) -> bool:
        self.steps += _STEPS
        return time.monotonic() > self.deadline

    def _classify(self, error: BaseException) -> ExecStatus:
        policy, refused = self.session._policy, self.session._volume.stats().refused
        if isinstance(error, apsw.InterruptError):
            return "timeout"
        if policy.denied:
            return "denied"
        if isinstance(error, apsw.TooBigError | MemoryError | apsw.NoMemError):
            return "too_big"
        if isinstance(error, apsw.FullError) and refused & (PAGE_QUOTA | TEMP_QUOTA):
            return "full"
        if isinstance(error, apsw.IOError | apsw.CorruptError | apsw.NotADBError) or refused & HOST_FULL:
            return "infra"
        return "sql_error"

    def _words(self, error: BaseException) -> str:
        text = "the deadline has passed" if isinstance(error, apsw.InterruptError) else words(error, self.session._policy)
        data = text.encode("utf-8", "surrogatepass")
        return text if len(data) <= 4096 else data[:4096].decode("utf-8", "ignore") + "..."

    def _quota(self) -> str | None:
        refused, quota = self.session._volume.stats().refused, self.session.quota
        if refused & PAGE_QUOTA:
            return f"delta_bytes={quota.delta_bytes}"
        return f"temp_bytes={quota.temp_bytes}" if refused & TEMP_QUOTA else None


def _bytes(value: SqlValue) -> int:
    """What a value takes: bytes, not characters."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogateescape"))
    return len(value) if isinstance(value, bytes) else 8


def _text(kind: SqlValue, value: SqlValue) -> SqlValue:
    return value.decode("utf-8", "surrogateescape") if kind == "text" and isinstance(value, bytes) else value


def content_digest(base: str, size: int, delta: bytes) -> str:
    """Digest of a file that is `base` with the pages of `delta`, `size` bytes long."""
    return hashlib.blake2b(f"{base} {size} ".encode() + delta, digest_size=16).hexdigest()
