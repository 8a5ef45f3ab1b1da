"""What is compared, behind a few verbs: a branch is made from a parent, connected to, worked on, sealed so that it can be a parent, and deleted.

Durability is off in all of them: what a trajectory did is disposable. No system holds a connection on a branch while another is made from it. Each
system is made in a process of its own (`child.py`); what it needs is imported there, since doltlite takes the place of the process's SQLite.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from branching.data import TABLES, Row, Scale, create_table, rows, width

ROOT = "main"
FIRST_QUERY = "SELECT w_id FROM warehouse"
# No samples of values, which builds with STAT4 keep, read again for each connection, and others have not: a limit (beyond any table) leaves them out.
ANALYZE = "PRAGMA analysis_limit = 1000000000; ANALYZE; DROP TABLE IF EXISTS sqlite_stat4"
_FULL_QUOTA = 4 << 30
_PATIENCE_S = 600.0


class NotAvailable(Exception):
    """The system cannot be measured here. `str()` is one line that says why."""


class NoTree(Exception):
    """The system has one line of descent: a second child of the same parent cannot live beside the first."""


class System(ABC):
    """One system over one database. tree: whether siblings can live side by side. cpu_step: seconds between two readings of its CPU that differ."""

    name = ""
    tree = True
    cpu_step = 1e-6

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        """work: the folder of all databases. place: tells apart the files of several that run at a time."""
        self.scale = scale
        self.folder = work / f"{self.name.replace(' ', '-')}-{scale.name}" / (place or "run")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = psutil.Process()

    @abstractmethod
    def create(self, parent: str, name: str) -> None: ...

    @abstractmethod
    def connect(self, name: str) -> Any:
        """A connection that sees the branch (ours is opened by the first query)."""

    @abstractmethod
    def run(self, connection: Any, sql: str) -> list[Row]:
        """The rows of one statement, committed. RuntimeError for one that fails: on this workload none may."""

    def seal(self, connection: Any) -> None:  # noqa: B027  (most need nothing)
        """What a branch needs before it may be a parent."""

    @abstractmethod
    def disconnect(self, connection: Any) -> None: ...

    @abstractmethod
    def delete(self, name: str) -> None:
        """Nobody is connected to it, and it has no child."""

    @abstractmethod
    def close(self) -> None: ...

    def servers(self) -> list[psutil.Process]:
        """Processes that work for this one."""
        return []

    def cpu(self) -> float:
        """CPU seconds so far, of this process and of all that work for it, those that have ended included."""
        total = time.process_time()
        for process in self.servers():
            try:
                total += sum(process.cpu_times()[:4])  # with those of its children that were waited for
                total += sum(sum(child.cpu_times()[:2]) for child in process.children())
            except psutil.NoSuchProcess:
                continue
        return total

    def bytes(self, *, trim: bool = False) -> int:
        """Memory of all these processes that no file backs, and disk that the databases take. What the kernel caches of files counts for none.

        trim: what this process has freed is given back first, so that growth from there is counted as such."""
        if trim:
            gc.collect()
            with contextlib.suppress(AttributeError, OSError):
                ctypes.CDLL(None).malloc_trim(0)
        total = self.disk()
        for process in (self._process, *self.servers()):
            family = [process] if process is self._process else [process, *process.children()]
            total += sum(anonymous_bytes(one.pid) for one in family)
        return total

    def disk(self) -> int:
        return 0


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs; 0 when it has ended."""
    try:
        fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields["Anonymous"].split()[0]) * 1024


def disk_bytes(paths: Iterable[Path]) -> int:
    """What the files take on the disk."""
    total = 0
    for path in paths:
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def load(execute: Callable[[str], Any], many: Callable[[str, Iterable[Row]], Any], scale: Scale) -> None:
    """All tables in one transaction, through a cursor's `execute` and `executemany`."""
    execute("BEGIN")
    for table in TABLES:
        execute(create_table(table))
        many(f"INSERT INTO {table} VALUES ({', '.join('?' * width(table))})", rows(table, scale))
    execute("COMMIT")


def sqlite_file(work: Path, scale: Scale) -> Path:
    """The database as a SQLite file, made once, and analysed as the others are."""
    import apsw

    path = work / f"{scale.name}.sqlite"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        connection = apsw.Connection(str(fresh))
        connection.execute("PRAGMA journal_mode = off; PRAGMA synchronous = off")
        load(connection.execute, connection.executemany, scale)
        connection.execute(ANALYZE).fetchall()
        connection.close()
        fresh.rename(path)
    return path


class Sessions(System):
    """Ours: a branch is a session, parked while nobody is connected to it."""

    name = "ours"
    kind = "sqlite"

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        super().__init__(work, scale, place)
        from savepoint.errors import UserError
        from savepoint.state import Quota, open_backend

        try:
            self._backend = open_backend(self.kind, store=work / "store")
        except UserError as error:
            raise NotAvailable(str(error)) from None
        image = self._backend.import_base(sqlite_file(work, scale))
        quota = Quota(delta_bytes=_FULL_QUOTA, temp_bytes=_FULL_QUOTA)
        self._sessions = {ROOT: self._backend.lease(image, owner="benchmark", quota=quota, ttl_s=None)}

    def create(self, parent: str, name: str) -> None:
        (self._sessions[name],) = self._sessions[parent].fork()

    def connect(self, name: str) -> Any:
        return self._sessions[name]

    def run(self, connection: Any, sql: str) -> list[Row]:
        result = connection.execute(sql, deadline_s=_PATIENCE_S, max_rows=1_000_000, max_bytes=1 << 30)
        if result.status != "ok":
            raise RuntimeError(f"{result.status}: {result.error} ({result.quota}): {sql}")
        return result.rows

    def disconnect(self, connection: Any) -> None:
        connection.park()

    def delete(self, name: str) -> None:
        self._sessions.pop(name).close()

    def close(self) -> None:
        self._backend.close()


class FileCopies(System):
    """A whole file for each branch, SQLite's own VFS and its default cache of 2 MB."""

    name = "file copies"

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        super().__init__(work, scale, place)
        import apsw

        self._apsw = apsw
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        shutil.copyfile(sqlite_file(work, scale), self.folder / ROOT)

    def create(self, parent: str, name: str) -> None:
        shutil.copyfile(self.folder / parent, self.folder / name)

    def connect(self, name: str) -> Any:
        connection = self._apsw.Connection(str(self.folder / name))
        for pragma in ("journal_mode = memory", "synchronous = off", "locking_mode = exclusive", "temp_store = memory"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    def run(self, connection: Any, sql: str) -> list[Row]:
        try:
            return connection.execute(sql).fetchall()
        except self._apsw.Error as error:
            raise RuntimeError(f"{error}: {sql}") from None

    def disconnect(self, connection: Any) -> None:
        connection.close()

    def delete(self, name: str) -> None:
        (self.folder / name).unlink()

    def disk(self) -> int:
        return disk_bytes(self.folder.iterdir())

    def close(self) -> None:
        shutil.rmtree(self.folder)


class Savepoints(System):
    """One connection and a stack of savepoints: a branch can be made only on top, and to go back ends all that lies above."""

    name = "savepoints"
    tree = False

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        super().__init__(work, scale, place)
        import apsw

        self._error = apsw.Error
        self._file = self.folder / ROOT
        shutil.copyfile(sqlite_file(work, scale), self._file)
        self._connection = apsw.Connection(str(self._file))
        for pragma in ("journal_mode = memory", "synchronous = off", "locking_mode = exclusive", "temp_store = memory"):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        self._connection.execute("BEGIN")
        self._stack = [ROOT]

    def create(self, parent: str, name: str) -> None:
        if parent != self._stack[-1]:
            raise NoTree(f"{self._stack[-1]} lies above {parent}")
        self._connection.execute(f"SAVEPOINT {name}")
        self._stack.append(name)

    def connect(self, name: str) -> Any:
        if name != self._stack[-1]:
            raise NoTree(f"{self._stack[-1]} lies above {name}")
        return self._connection

    def run(self, connection: Any, sql: str) -> list[Row]:
        try:
            return connection.execute(sql).fetchall()
        except self._error as error:
            raise RuntimeError(f"{error}: {sql}") from None

    def disconnect(self, connection: Any) -> None:
        pass

    def delete(self, name: str) -> None:
        if name != self._stack[-1]:
            raise NoTree(f"{self._stack[-1]} lies above {name}")
        self._connection.execute(f"ROLLBACK TO {name}; RELEASE {name}")
        self._stack.pop()

    def disk(self) -> int:
        return disk_bytes([self._file])

    def close(self) -> None:
        self._connection.close()
        shutil.rmtree(self.folder)


class Doltlite(System):
    """DoltHub's fork of SQLite with prolly trees, in process: branches of one file; a commit makes what a branch holds visible to a branch of it.

    A connection is made for each connect, and `dolt_checkout` puts it on its branch.
    """

    name = "doltlite"

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        super().__init__(work, scale, place)
        try:
            import doltlite  # noqa: F401  (takes the place of the SQLite that `sqlite3` uses: it has to come first)
        except ImportError:
            raise NotAvailable("the package doltlite is not installed") from None
        import sqlite3

        self._sqlite3 = sqlite3
        kept, self._file = work / f"{scale.name}.doltlite", self.folder / "run.db"
        if not kept.exists():
            self._make(kept)
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        shutil.copyfile(kept, self._file)
        self._root = self._open(self._file)

    def _open(self, file: Path) -> Any:
        connection = self._sqlite3.connect(file, isolation_level=None)
        connection.execute("PRAGMA synchronous = off")
        return connection

    def _make(self, kept: Path) -> None:
        fresh = kept.with_suffix(".new")
        for left in kept.parent.glob(f"{fresh.name}*"):
            left.unlink()
        connection = self._open(fresh)
        load(connection.execute, connection.executemany, self.scale)
        connection.executescript(ANALYZE)
        connection.execute("SELECT dolt_commit('-A', '-m', 'base')").fetchall()
        connection.execute("SELECT dolt_gc()").fetchall()
        connection.close()
        fresh.rename(kept)

    def create(self, parent: str, name: str) -> None:
        self._root.execute("SELECT dolt_branch(?, ?)", (name, parent)).fetchall()

    def connect(self, name: str) -> Any:
        connection = self._open(self._file)
        connection.execute("SELECT dolt_checkout(?)", (name,)).fetchall()
        return connection

    def run(self, connection: Any, sql: str) -> list[Row]:
        try:
            return connection.execute(sql).fetchall()
        except self._sqlite3.Error as error:
            raise RuntimeError(f"{error}: {sql}") from None

    def seal(self, connection: Any) -> None:
        try:
            connection.execute("SELECT dolt_commit('-A', '-m', 'step')").fetchall()
        except self._sqlite3.OperationalError as error:
            if "nothing to commit" not in str(error):
                raise

    def disconnect(self, connection: Any) -> None:
        connection.close()

    def delete(self, name: str) -> None:
        self._root.execute("SELECT dolt_branch('-D', ?)", (name,)).fetchall()

    def disk(self) -> int:
        return disk_bytes(self.folder.iterdir())

    def close(self) -> None:
        self._root.close()
        shutil.rmtree(self.folder)
