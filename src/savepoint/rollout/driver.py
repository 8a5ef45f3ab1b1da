"""The rollout: tasks times group size, each in an environment of its own, against one batched engine; out come groups of trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from savepoint.envs.messages import Message
from savepoint.envs.sql.env import SqlEnv, make_action
from savepoint.envs.sql.tasks import Task
from savepoint.rollout.engines.base import Engine, Sampled
from savepoint.rollout.render import Chat, Rendered
from savepoint.rollout.trajectory import Group, Trajectory, Turn
from savepoint.state import StateError


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How the engine samples: tokens of one message, tokens of a whole trajectory (prompt and observations included), temperature."""

    max_message_tokens: int = 64
    max_tokens: int = 400
    temperature: float = 1.0


class Episode:
    """One trajectory in the making: the environment's side of it, one message at a time.

    A failure of ours (the state layer's, not the agent's SQL) marks the trajectory `failed`: it has no reward and moves no baseline.
    """

    def __init__(self, env: SqlEnv, chat: Chat, task: Task, *, seed: int, group: int, member: int, weight_version: int) -> None:
        self.env, self.chat, self.over = env, chat, False
        self.trajectory = Trajectory(task.instance_id, seed, group, member, category=task.category, mode=env.mode, weight_version=weight_version)
        self.environment_s = 0.0
        started = time.perf_counter()
        try:
            env.reset(seed=seed, options={"task": task})
        except StateError as error:
            self._fail(error)
        self.environment_s += time.perf_counter() - started
        self.opening = env.messages if not self.over else ()

    def respond(self, ids: Sequence[int], finish: str) -> list[int] | None:
        """Take the policy's message (its tokens, stop token included) and give what is appended, or None when the episode is over."""
        trajectory = self.trajectory
        message = self.chat.parse(ids)
        call = asdict(message.tool_call) if message.tool_call else None
        turn = Turn("assistant", message.content, (0, len(ids)), tool_call=call, reward=0.0, finish_reason="stop" if finish == "stop" else "length")
        trajectory.turns.append(turn)
        started = time.perf_counter()
        try:
            if finish != "stop":
                text, reward, terminated, truncated, info = self.env.cut("message_budget")
            else:
                text, reward, terminated, truncated, info = self.env.step(make_action(message))
        except StateError as error:
            self._fail(error)
            return None
        finally:
            self.environment_s += time.perf_counter() - started
        if not terminated and not truncated:
            answer = self.chat.reply(Message("tool", text))
            trajectory.turns.append(Turn("tool", "", (0, len(answer)), observation=text))
            return answer
        turn.reward = trajectory.reward = info["reward"]
        trajectory.outcome, trajectory.reason, self.over = info["outcome"], info["reason"], True
        trajectory.status = "failed" if info["reward"] is None else "truncated" if truncated else "invalid" if info["reason"] == "no_call" else "ok"
        return None

    def finish(self, sampled: Sampled, prompt: Rendered) -> Trajectory:
        """The trajectory with its tokens, `prompt` being what they begin with; an episode that the engine cut for length ends here, truncated."""
        trajectory = self.trajectory
        if not self.over:
            info = self.env.cut("token_budget")[-1]
            trajectory.status, trajectory.reward, trajectory.outcome, trajectory.reason = "truncated", info["reward"], info["outcome"], info["reason"]
        trajectory.ids, trajectory.mask, trajectory.logprobs = list(sampled.ids), list(sampled.mask), list(sampled.logprobs)
        _place(trajectory.turns, len(prompt.ids), len(trajectory.ids))
        opening = [Turn(m.role, m.content, span) for m, span in zip(self.opening, prompt.spans, strict=True)] if self.opening else []
        trajectory.turns = opening + trajectory.turns
        trajectory.cost = {"environment_s": self.environment_s}
        return trajectory

    def _fail(self, error: StateError) -> None:
        self.trajectory.status, self.trajectory.reason, self.trajectory.outcome = "failed", str(error), "infra"
        self.trajectory.reward, self.over = None, True


def _place(said: list[Turn], at: int, length: int) -> None:
    """Turn lengths into spans, in order from `at`; what the engine cut short ends where the tokens end."""
    for turn in said:
        turn.span = (min(at, length), min(at + turn.span[1], length))
        at += turn.span[1] - turn.span[0]


def rollout(
    tasks: Sequence[Task], group_size: int, engine: Engine, chat: Chat, make_env: Callable[[], SqlEnv], limits: SamplingLimits, *, seed: int
) -> list[Group]:
    """`group_size` trajectories for each task, as groups in the order of `tasks`.

    Sampled ids are never decoded and encoded again; a trajectory that failed for our reasons has status "failed" and reward None.
    """
    episodes = [
        Episode(make_env(), chat, task, seed=seed, group=g, member=m, weight_version=engine.version) for g, task in enumerate(tasks) for m in range(group_size)
    ]
    try:
        openings = [_opening(episodes[g * group_size : (g + 1) * group_size]) for g in range(len(tasks))]
        prompts = [chat.prompt(messages, episodes[0].env.tools) for messages in openings]

        def respond(slot: int, ids: list[int], finish: str) -> list[int] | None:
            return None if episodes[slot].over else episodes[slot].respond(ids, finish)

        sampled = engine.generate(
            [prompt.ids for prompt in prompts], group_size, respond, stop_ids=chat.stop_ids, temperature=limits.temperature,
            max_message_tokens=limits.max_message_tokens, max_tokens=limits.max_tokens, seed=seed,
        )  # fmt: skip
        done = [episode.finish(one, prompts[i // group_size]) for i, (episode, one) in enumerate(zip(episodes, sampled, strict=True))]
    finally:
        for episode in episodes:
            episode.env.close()
    for trajectory in done:
        audit(trajectory)
    return [Group(task.instance_id, done[g * group_size : (g + 1) * group_size]) for g, task in enumerate(tasks)]


def _opening(members: Sequence[Episode]) -> Sequence[Message]:
    """The prompt that a group shares. A member whose environment could not even start has none."""
    opening = next((episode.opening for episode in members if not episode.over), None)
    if opening is None:
        raise StateError(f"no environment could be opened for task {members[0].trajectory.task}: {members[0].trajectory.reason}")
    return opening


def audit(trajectory: Trajectory) -> None:
    """Prove that a trajectory's turns tile its tokens, and that exactly the policy's turns were sampled. ValueError where they do not."""
    at = 0
    for turn in trajectory.turns:
        start, end = turn.span
        if start != at or end < start:
            raise ValueError(f"trajectory {trajectory.task}: a turn spans {turn.span}, but the tokens before it end at {at}")
        if any(trajectory.mask[start:end]) != (turn.role == "assistant" and end > start) or (turn.role == "assistant" and not all(trajectory.mask[start:end])):
            raise ValueError(f"trajectory {trajectory.task}: the mask of a turn of role {turn.role!r} is wrong")
        at = end
    if not at <= len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs):
        raise ValueError(f"trajectory {trajectory.task}: {len(trajectory.ids)} tokens, but its turns end at {at}")
