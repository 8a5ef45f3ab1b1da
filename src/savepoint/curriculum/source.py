"""Where a run's tasks come from: made from a database, without end, or read from files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from savepoint.curriculum.plan import TaskSettings
from savepoint.envs.sql import databases
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.renames import RENAMES
from savepoint.envs.sql.shapes import is_held_out
from savepoint.envs.sql.synth import Synthesizer
from savepoint.envs.sql.tasks import Task, read_tasks
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.state import Backend

_STALE = 1000  # so many draws in a row without a new task: the database has no more


class TaskSource(Protocol):
    """Held-out tasks, and training tasks that are none of them."""

    world: World
    heldout: list[Task]
    description: dict[str, Any]

    def draw(self, rng: random.Random) -> Task:
        """A training task."""


class MadeTasks:
    """Fresh verified tasks over one database. Held out: `n` tasks, drawn from a stream of their own, the same for every seed of a run; of deep tasks, a fixed
    fifth of all shapes of query, so that none of those is trained on."""

    def __init__(self, settings: TaskSettings, grader: Grader, folder: Path, each: Callable[[int], None] = lambda done: None) -> None:
        path = Path(settings.database)
        if settings.database in databases.names():
            path = databases.place(settings.database, folder)
        every, deep = settings.bugs == ("all",), settings.level == "deep"
        kinds = (*(settings.known_bugs if every else settings.bugs), *(RENAMES if every and deep else RENAMES[:1]))
        self.synthesizer = Synthesizer(
            grader.backend, path, level=settings.level, wording=settings.wording or ("plain" if deep else "brief"), rename_share=settings.renamed_share,
            forms=tuple(FORMS) if settings.forms == ("all",) else settings.forms, kinds=kinds,
            max_tables=settings.max_tables, max_columns=settings.max_columns, grader=grader,
        )  # fmt: skip
        self.world = World(images={self.synthesizer.name: self.synthesizer.image}, backend=grader.backend)
        self.heldout: list[Task] = []
        self._by_shape = settings.level == "deep"
        self._taken: set[tuple[str, tuple[str, ...]]] = set()
        self._hold_out(settings, each)
        self.description = self.synthesizer.describe()

    def _hold_out(self, settings: TaskSettings, each: Callable[[int], None]) -> None:
        rng, stale = random.Random("held-out"), 0
        while len(self.heldout) < settings.heldout:
            each(len(self.heldout))
            task = self.synthesizer.task(rng)
            unfit = self._key(task) in self._taken or (self._by_shape and not is_held_out(task))
            stale = stale + 1 if unfit else 0
            if not stale:
                self._taken.add(self._key(task))
                self.heldout.append(task)
            if stale == _STALE:
                raise UserError(f"{settings.database}: only {len(self.heldout)} different tasks can be made; set tasks.heldout lower")

    @staticmethod
    def _key(task: Task) -> tuple[str, tuple[str, ...]]:
        return task.query, tuple(task.issue_sql)

    def draw(self, rng: random.Random) -> Task:
        for _ in range(_STALE):
            task = self.synthesizer.task(rng)
            if self._key(task) not in self._taken and not (self._by_shape and is_held_out(task)):
                return task
        raise UserError(f"{self.synthesizer.name}: every task that can be made is held out; set tasks.heldout lower")


class FiledTasks:
    """Tasks of two files over a folder of databases."""

    def __init__(self, settings: TaskSettings, backend: Backend) -> None:
        assert settings.file and settings.heldout_file and settings.databases
        self.world = World(settings.databases, backend=backend)
        self.heldout = read_tasks(Path(settings.heldout_file))[: settings.heldout]
        kept_out = {task.instance_id for task in self.heldout}
        self.tasks = [task for task in read_tasks(Path(settings.file)) if task.instance_id not in kept_out]
        for path, tasks in ((settings.file, self.tasks), (settings.heldout_file, self.heldout)):
            if not tasks:
                raise UserError(f"{path}: no task to use (those of the held-out file are not trained on)")
        for task in (*self.tasks, *self.heldout):
            self.world.base(task.db_id)
        self.description = {"name": settings.databases, "tables": {}, "left_out": [], "digest": "", "size": 0}

    def draw(self, rng: random.Random) -> Task:
        return self.tasks[rng.randrange(len(self.tasks))]


def open_source(settings: TaskSettings, grader: Grader, folder: Path, each: Callable[[int], None] = lambda done: None) -> TaskSource:
    """The tasks that the settings name, on the backend of the grader, which judges those that are made. UserError for a file, database or task that cannot
    be used."""
    return FiledTasks(settings, grader.backend) if settings.file else MadeTasks(settings, grader, folder, each)
