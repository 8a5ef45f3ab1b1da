"""What the state layer is measured against: a pool of file copies that works as published systems do, and copies made by SQLite's backup API."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("fork")


class CopyPool:
    """One full copy of the file for each trajectory, copied back when it is acquired; each call is a new process with a new connection.

    So works the pool of BIRD-RL's agentic stage (its `pool.py` and `sql_utils.py`), from whose description this is written.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        folder.mkdir(parents=True, exist_ok=True)

    def acquire(self, number: int) -> Path:
        """The trajectory's file, as it was at first. Reset is the same."""
        target = self.folder / f"copy-{number}.sqlite"
        shutil.copyfile(self.source, target)
        return target

    def execute(self, file: Path, sql: str) -> list[tuple[Any, ...]]:
        queue: Any = _FORK.Queue()
        process = _FORK.Process(target=_run, args=(file, sql, queue))
        process.start()
        rows: list[tuple[Any, ...]] = queue.get()
        process.join()
        return rows

    def close(self) -> None:
        shutil.rmtree(self.folder)


def _run(file: Path, sql: str, queue: Any) -> None:
    connection = sqlite3.connect(file)
    rows = connection.execute(sql).fetchall()
    connection.commit()
    connection.close()
    queue.put(rows)


def in_memory(source: Path) -> sqlite3.Connection:
    """A private copy in memory by the backup API."""
    target = sqlite3.connect(":memory:")
    with sqlite3.connect(f"file:{source}?mode=ro", uri=True) as original:
        original.backup(target)
    original.close()
    return target
