"""One episode as messages: the environment's side of a trajectory, whatever it is that speaks for the policy."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Literal

from savepoint.envs.messages import Message
from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.tasks import Task
from savepoint.rollout.trajectory import Trajectory, Turn
from savepoint.state import StateError

Finish = Literal["stop", "length", "content_filter"]
_CUT_AS: dict[str, str] = {"length": "message_budget", "content_filter": "content_filter"}


class MessageEpisode:
    """A trajectory in the making, one message at a time.

    A failure of ours (the state layer's or an endpoint's, not the agent's SQL) marks the trajectory `failed`: it has no reward, moves no
    baseline, and is in no rate.
    """

    def __init__(self, env: SqlEnv, task: Task, *, seed: int, group: int, member: int, weight_version: int) -> None:
        self.env, self.over = env, False
        self.trajectory = Trajectory(
            task.instance_id, seed, group, member, category=task.category, kind=task.synth.get("kind"), mode=env.mode, weight_version=weight_version
        )
        self.environment_s = 0.0
        started = time.perf_counter()
        try:
            env.reset(seed=seed, options={"task": task})
        except StateError as error:
            self.fail(error)
        self.environment_s += time.perf_counter() - started
        self.opening = env.messages if not self.over else ()

    def take(self, message: Message, action: dict[str, str], finish: Finish, length: int = 0) -> str | None:
        """Act on the policy's message (of `length` tokens), and give the observation, or None when the episode is over.

        A message that was cut ("length") or withheld ("content_filter") is not acted on, whatever is in it: the episode ends, truncated.
        """
        trajectory = self.trajectory
        call = asdict(message.tool_call) if message.tool_call else None
        turn = Turn("assistant", message.content, (0, length), tool_call=call, reward=0.0, finish_reason=finish)
        trajectory.turns.append(turn)
        started = time.perf_counter()
        try:
            text, _, terminated, truncated, info = self.env.step(action) if finish == "stop" else self.env.cut(_CUT_AS[finish])
        except StateError as error:
            self.fail(error)
            return None
        finally:
            self.environment_s += time.perf_counter() - started
        if not terminated and not truncated:
            trajectory.turns.append(Turn("tool", "", (0, 0), observation=text))
            return text
        turn.reward = trajectory.reward = info["reward"]
        trajectory.outcome, trajectory.reason, self.over = info["outcome"], info["reason"], True
        trajectory.status = "failed" if info["reward"] is None else "truncated" if truncated else "invalid" if info["reason"] == "no_call" else "ok"
        return None

    def cut(self, reason: str) -> None:
        """End the episode for a spent budget: truncated."""
        info = self.env.cut(reason)[-1]
        trajectory = self.trajectory
        trajectory.status, trajectory.reward, trajectory.outcome, trajectory.reason = "truncated", info["reward"], info["outcome"], info["reason"]
        self.over = True

    def fail(self, error: Exception) -> None:
        """End the episode for a fault of ours."""
        self.trajectory.status, self.trajectory.reason, self.trajectory.outcome = "failed", str(error), "infra"
        self.trajectory.reward, self.over = None, True
