"""A demonstrator that is imperfect on purpose, and its demonstrations, acted out in the very environments that the policy will meet.

It knows what a task's question means, but not what a migration has done to the schema: that it must look up, or guess. Two habits make it
fail, and reinforcement learning can undo both: *hasty* (guess a renamed identifier instead of looking) and *careless* (hand the
user's query back unchanged). The first is undone only by learning that the live database pays, the second by dropping the habit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from pydantic import Field

from savepoint.config import Settings
from savepoint.envs.messages import Message, ToolCall
from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.tasks import Task
from savepoint.rollout.driver import Episode
from savepoint.rollout.engines.base import Sampled
from savepoint.rollout.render import Chat, Part
from savepoint.rollout.trajectory import Trajectory
from savepoint.train.sft import Example


class DemonstratorSettings(Settings):
    """How often the demonstrator errs."""

    hasty: float = Field(0.45, ge=0, le=1, description="share of renamed identifiers that it guesses although it could look")
    careless: float = Field(0.4, ge=0, le=1, description="share of buggy queries that it hands in unchanged")


def act(task: Task, env: SqlEnv, settings: DemonstratorSettings, rng: random.Random) -> Message:
    """What the demonstrator says next. Without anything to look up, it runs its fix and then submits it."""
    said = [m for m in env.messages if m.role == "assistant"]
    renamed = task.synth.get("guesses") is not None
    if said:
        thought = _renaming(task, task.synth["new"]) if renamed else "done"
        return _submit(thought, task.sol_sql)
    alone = env.mode == "single_turn"
    if renamed:
        if alone or rng.random() < settings.hasty:
            guess = rng.randrange(len(task.synth["candidates"]))
            return _submit(_renaming(task, task.synth["candidates"][guess]), [task.synth["guesses"][guess]])
        return Message("assistant", "look", ToolCall("execute_sql", {"sql": _look_up(task)}))
    if task.issue_sql and rng.random() < settings.careless:
        return _submit("looks right", task.issue_sql)
    thought = str(task.synth.get("kind", "query")).replace("_", " ")
    return _submit(thought, task.sol_sql) if alone else Message("assistant", thought, ToolCall("execute_sql", {"sql": "; ".join(task.sol_sql)}))


def _renaming(task: Task, name: str) -> str:
    return f"{task.synth['old']} is now {name}"


def _look_up(task: Task) -> str:
    """The shortest question whose answer names what was renamed: a table's columns, or the tables."""
    if task.synth["kind"] == "renamed_table":
        return "SELECT name FROM sqlite_master WHERE type = 'table'"
    return f"SELECT * FROM {task.synth['table']} LIMIT 0"


def _submit(thought: str, statements: Sequence[str]) -> Message:
    return Message("assistant", thought, ToolCall("submit_solution", {"sql_list": list(statements)}))


def demonstrate(task: Task, env: SqlEnv, chat: Chat, settings: DemonstratorSettings, rng: random.Random) -> tuple[Trajectory, Example]:
    """One demonstration, in a live environment: a trajectory like any other, and the example to imitate.

    Each message goes through the same rendering and parsing as a policy's, so that imitation and rollout see the same tokens.
    """
    episode = Episode(env, chat, task, seed=0, group=0, member=0, weight_version=-1)
    try:
        opening = chat.prompt(env.messages, env.tools)
        ids, parts = list(opening.ids), list(opening.parts)
        answer: list[int] | None = []
        while answer is not None:
            own = chat.own(act(task, env, settings, rng))
            answer = episode.respond(own, "stop")
            ids += own + (answer or [])
            parts += [Part.OWN] * len(own) + [Part.CONTEXT] * len(answer or [])
        mask = [part == Part.OWN for part in parts]
        trajectory = episode.finish(Sampled(ids, mask, [0.0] * len(ids), "stop"), opening)
    finally:
        env.close()
    return trajectory, Example(ids, parts)


def demonstrations(
    tasks: Iterable[Task], make_env: Callable[[], SqlEnv], chat: Chat, settings: DemonstratorSettings, rng: random.Random,
    each: Callable[[int], None] = lambda done: None,
) -> list[tuple[Trajectory, Example]]:  # fmt: skip
    """A demonstration of each task. `each` is told how many are done, and may raise to stop."""
    out = []
    for done, task in enumerate(tasks):
        each(done)
        out.append(demonstrate(task, make_env(), chat, settings, rng))
    return out
