"""The rollout: tasks times group size, each in an environment of its own, against one batched engine; out come groups of trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from savepoint.envs.messages import Message
from savepoint.envs.sql.env import SqlEnv, make_action
from savepoint.envs.sql.tasks import Task
from savepoint.rollout.engines.base import Sampled, Sampler
from savepoint.rollout.episode import MessageEpisode
from savepoint.rollout.render import Chat, Rendered
from savepoint.rollout.trajectory import Group, Trajectory, Turn
from savepoint.state import StateError


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How the engine samples: tokens of one message, tokens of a whole trajectory (prompt and observations included), temperature."""

    max_message_tokens: int = 64
    max_tokens: int = 400
    temperature: float = 1.0


class Episode(MessageEpisode):
    """One trajectory in the making, in tokens: messages are parsed from what was sampled, and observations rendered to be appended."""

    def __init__(self, env: SqlEnv, chat: Chat, task: Task, *, seed: int, group: int, member: int, weight_version: int) -> None:
        super().__init__(env, task, seed=seed, group=group, member=member, weight_version=weight_version)
        self.chat = chat

    def respond(self, ids: Sequence[int], finish: str) -> list[int] | None:
        """Take the policy's message (its tokens, stop token included) and give what is appended, or None when the episode is over."""
        message = self.chat.parse(ids)
        text = self.take(message, make_action(message), "stop" if finish == "stop" else "length", len(ids))
        if text is None:
            return None
        answer = self.chat.reply(Message("tool", text))
        self.trajectory.turns[-1].span = (0, len(answer))
        return answer

    def finish(self, sampled: Sampled, prompt: Rendered) -> Trajectory:
        """The trajectory with its tokens, `prompt` being what they begin with; an episode that the engine cut for length ends here, truncated."""
        trajectory = self.trajectory
        if not self.over:
            self.cut("token_budget")
        trajectory.ids, trajectory.mask, trajectory.logprobs = list(sampled.ids), list(sampled.mask), list(sampled.logprobs)
        _place(trajectory.turns, len(prompt.ids), len(trajectory.ids))
        opening = [Turn(m.role, m.content, span) for m, span in zip(self.opening, prompt.spans, strict=True)] if self.opening else []
        trajectory.turns = opening + trajectory.turns
        trajectory.cost = {"environment_s": self.environment_s}
        return trajectory


def _place(said: list[Turn], at: int, length: int) -> None:
    """Turn lengths into spans, in order from `at`; what the engine cut short ends where the tokens end."""
    for turn in said:
        turn.span = (min(at, length), min(at + turn.span[1], length))
        at += turn.span[1] - turn.span[0]


def rollout(
    tasks: Sequence[Task], group_size: int, engine: Sampler, chat: Chat, make_env: Callable[[], SqlEnv], limits: SamplingLimits, *, seed: int
) -> list[Group]:
    """`group_size` trajectories for each task, as groups in the order of `tasks`.

    Sampled ids are never decoded and encoded again; a trajectory that failed for our reasons has status "failed" and reward None.
    """
    episodes = [
        Episode(make_env(), chat, task, seed=seed, group=g, member=m, weight_version=engine.version) for g, task in enumerate(tasks) for m in range(group_size)
    ]
    try:
        prompts = [_prompt(episodes[g * group_size : (g + 1) * group_size], chat) for g in range(len(tasks))]
        if len(tasks) > 1 and not any(prompt.ids for prompt in prompts):
            raise StateError(f"no environment could be opened for any of {len(tasks)} tasks: {episodes[0].trajectory.reason}")
        sampled = _generate(episodes, prompts, group_size, engine, chat, limits, seed)
        done = [episode.finish(one, prompts[i // group_size]) for i, (episode, one) in enumerate(zip(episodes, sampled, strict=True))]
    finally:
        for episode in episodes:
            episode.env.close()
    for trajectory in done:
        audit(trajectory)
    return [Group(task.instance_id, done[g * group_size : (g + 1) * group_size]) for g, task in enumerate(tasks)]


def _prompt(members: Sequence[Episode], chat: Chat) -> Rendered:
    """The prompt that a group shares; empty where no environment of the group could be opened, which makes all of it `failed`."""
    opening = next((episode.opening for episode in members if not episode.over), None)
    return Rendered([], [], []) if opening is None else chat.prompt(opening, members[0].env.tools)


def _generate(
    episodes: Sequence[Episode], prompts: Sequence[Rendered], group_size: int, engine: Sampler, chat: Chat, limits: SamplingLimits, seed: int
) -> list[Sampled]:
    """What the engine samples for each episode. A prompt that leaves no room to sample is the budget's end before the first message: it is not asked for."""
    sampled = [Sampled(list(prompt.ids), [False] * len(prompt.ids), [0.0] * len(prompt.ids), "length") for prompt in prompts for _ in range(group_size)]
    fits = [i for i, prompt in enumerate(prompts) if 0 < len(prompt.ids) < limits.max_tokens]
    slots = [i * group_size + member for i in fits for member in range(group_size)]

    def respond(slot: int, ids: list[int], finish: str) -> list[int] | None:
        episode = episodes[slots[slot]]
        return None if episode.over else episode.respond(ids, finish)

    if fits:
        generated = engine.generate(
            [prompts[i].ids for i in fits], group_size, respond, stop_ids=chat.stop_ids, temperature=limits.temperature,
            max_message_tokens=limits.max_message_tokens, max_tokens=limits.max_tokens, seed=seed,
        )  # fmt: skip
        for slot, one in zip(slots, generated, strict=True):
            sampled[slot] = one
    return sampled


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
