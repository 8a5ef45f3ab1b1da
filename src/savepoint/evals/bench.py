"""Many instances graded side by side: worker processes that each have a grader, and one that hands out the work.

What an instance gives depends on nothing but the instance, so neither the number of workers nor the order changes a result. A worker that dies takes one
instance along, which is tried once more; what kills its worker twice is "infra".
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from savepoint.envs.sql.grade import Grader, Limits, Ties
from savepoint.envs.sql.grade import Tests as TestForms
from savepoint.envs.sql.run import DEFAULT_NOW
from savepoint.envs.sql.tasks import Task, parse_time
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.state import Backend, open_backend

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GradingOptions:
    """How instances are graded, and where. Refuses nonsense when made (UserError)."""

    databases: tuple[Path, ...]
    store: Path | None = None
    limits: Limits = field(default_factory=Limits)
    tests: TestForms = "auto"
    ties: Ties = "any"
    now: str = DEFAULT_NOW

    def __post_init__(self) -> None:
        try:
            parse_time(self.now, "--now")
        except ValueError as error:
            raise UserError(str(error)) from None
        if self.limits.deadline_s <= 0 or self.limits.max_rows < 1 or self.limits.max_bytes < 1:
            raise UserError("--timeout, --max-rows and --max-bytes must be more than 0")


class Bench:
    """What one process grades on: a backend whose SQL runs in a process that can be killed, the databases, a grader."""

    def __init__(self, options: GradingOptions, backend: Backend | None = None) -> None:
        self.options = options
        self.backend = backend or open_backend("sqlite", store=options.store, workers=1, threads=2, ship="never")
        self.world = World(options.databases, backend=self.backend)
        self._graders: dict[TestForms, Grader] = {}

    @property
    def grader(self) -> Grader:
        """The grader that decides."""
        return self.grader_for(self.options.tests)

    def grader_for(self, tests: TestForms) -> Grader:
        """One that goes by some form of the tests."""
        if tests not in self._graders:
            options = self.options
            self._graders[tests] = Grader(self.backend, options.limits, tests=tests, ties=options.ties, now=options.now)
        return self._graders[tests]

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()
        self.backend.close()


def check_databases(tasks: Sequence[Task], options: GradingOptions) -> None:
    """UserError for a database that is missing or is none, before anything is graded. Brings each into the store."""
    with open_backend("sqlite", store=options.store) as backend:
        world = World(options.databases, backend=backend)
        for db_id in dict.fromkeys(task.db_id for task in tasks):
            world.locate(db_id)
        for db_id in dict.fromkeys(task.db_id for task in tasks):
            world.base(db_id)


def run_all(
    work: Callable[[Bench, Any], Record], items: Sequence[Any], options: GradingOptions, *, workers: int, lost: Callable[[Any, str], Record],
    each: Callable[[int, Record], None] = lambda index, record: None,
) -> list[Record]:  # fmt: skip
    """`work(bench, item)` for each item, in `workers` processes; the records in the order of items.

    work: a function at the top of a module. lost: the record of an item whose worker died twice. each: called as items are done, with index and record.
    """
    if workers < 1:
        raise UserError(f"--workers {workers}: must be at least 1")
    records: list[Record | None] = [None] * len(items)
    waiting, tries = deque(range(len(items))), [0] * len(items)
    crew = [_Worker(work, options) for _ in range(min(workers, len(items)))]
    try:
        while waiting or any(worker.index is not None for worker in crew):
            for place, worker in enumerate(crew):
                if worker.index is None and waiting:
                    if not worker.alive:
                        worker.close()
                        crew[place] = worker = _Worker(work, options)
                    worker.give(waiting.popleft(), items)
            for worker in _ready(crew):
                index, record = worker.take()
                if record is None:
                    tries[index] += 1
                    if tries[index] < 2:
                        waiting.appendleft(index)
                        continue
                    record = lost(items[index], f"the process that graded it died twice (exit status {worker.exit_status})")
                records[index] = record
                each(index, record)
    finally:
        for worker in crew:
            worker.close()
    return [record for record in records if record is not None]


class _Worker:
    """A process of the crew, and the index of the item that it has."""

    def __init__(self, work: Callable[[Bench, Any], Record], options: GradingOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, work, options), daemon=False)
        self.process.start()
        theirs.close()
        self.index: int | None = None

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def exit_status(self) -> int | None:
        return self.process.exitcode

    def give(self, index: int, items: Sequence[Any]) -> None:
        self.index = index
        with contextlib.suppress(OSError):  # it has died: `take` finds that out
            self.channel.send(items[index])

    def take(self) -> tuple[int, Record | None]:
        """The item's index and record; None for the record when the process died. What the work itself could not do is raised here."""
        index, self.index = self.index, None
        assert index is not None
        try:
            ok, answer = self.channel.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return index, None
        if not ok:
            raise answer
        return index, answer

    def close(self) -> None:
        self.channel.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _ready(crew: Sequence[_Worker]) -> list[_Worker]:
    busy: dict[Any, _Worker] = {worker.channel: worker for worker in crew if worker.index is not None}
    return [busy[channel] for channel in wait(list(busy))]


def _serve(channel: Connection, work: Callable[[Bench, Any], Record], options: GradingOptions) -> None:
    """A worker's life: until the channel closes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Bench(options)
    try:
        while True:
            try:
                item = channel.recv()
            except (EOFError, KeyboardInterrupt):
                return
            try:
                channel.send((True, work(bench, item)))
            except KeyboardInterrupt:
                return
            except Exception as error:  # noqa: BLE001 - the parent decides what it means
                channel.send((False, error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")))
    finally:
        bench.close()
