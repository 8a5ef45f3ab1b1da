"""What tests of the grader make: a verdict on a submission to a task on `people`, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savepoint.envs.sql.grade import Grader, Limits, Verdict
from savepoint.envs.sql.tasks import Task
from savepoint.envs.sql.world import World
from tests_support import debugging

FEW = Limits(deadline_s=1.0, max_rows=5000, max_bytes=1 << 20, test_memory_bytes=512 << 20)


def verdict(world: World, submission: str | Sequence[str], *, grader: Grader | None = None, limits: Limits = FEW, **changes: Any) -> Verdict:
    """What a fresh grader (or the one given) says of a submission to `debugging(**changes)`."""
    task = debugging(**changes)
    own = grader or Grader(world.backend, limits)
    try:
        return own.grade(world.image(task), task, [submission] if isinstance(submission, str) else submission)
    finally:
        if grader is None:
            own.close()


def generation(**changes: Any) -> Task:
    """A generation task on `people`."""
    fields = {"instance_id": "g1", "task": "generation", "db_id": "people", "query": "which cities?", "sol_sql": ["SELECT city FROM people"]}
    return Task(**{**fields, **changes})  # type: ignore[arg-type]
