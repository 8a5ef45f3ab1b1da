"""The one trajectory type of SFT, RL and evaluation: what was said, what came back, and every token of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "truncated", "failed", "invalid"]


@dataclass(slots=True)
class Turn:
    """One message of a trajectory. `span` is its half-open range in the trajectory's tokens, markers included.

    `observation` is what a tool answered (role "tool"); `reward` is what the environment paid for an assistant's turn.
    `finish_reason`: "stop" (the policy ended its message), "length" (cut at the message's budget), "content_filter" (an endpoint withheld it),
    None for turns that were not sampled.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    span: tuple[int, int]
    tool_call: dict[str, Any] | None = None
    observation: str | None = None
    reward: float | None = None
    finish_reason: Literal["stop", "length", "content_filter"] | None = None


@dataclass(slots=True)
class Trajectory:
    """Flat tokens of one episode. `mask[i]`: the policy sampled `ids[i]`, at log-prob `logprobs[i]` (0.0 elsewhere).

    status: "ok" the environment ended it; "truncated" a budget of turns, tokens or time ran out; "failed" our infrastructure failed
    (`reward` is None: masked, and out of its group's baseline); "invalid" its last message was no call that the environment knows.
    `outcome` is the grader's code ("correct", "wrong_result", "sql_error", ...), `reason` says why the episode ended. `kind`: the bug of a made task.
    """

    task: str
    seed: int
    group: int
    member: int
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = "ok"
    reason: str | None = None
    reward: float | None = None
    outcome: str | None = None
    category: str | None = None
    mode: str = "agentic"
    weight_version: int = 0
    learner_logprobs: list[float] | None = None
    advantage: float | None = None
    cost: dict[str, float] = field(default_factory=dict)
    kind: str | None = None

    @property
    def valid(self) -> bool:
        """Whether it may move a baseline: a reward that the environment stands behind."""
        return self.reward is not None and self.status != "failed"

    @property
    def assistant_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """One JSON object, a line of `traces/*.jsonl`."""
        return asdict(self)


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt. Its valid members are one another's baseline."""

    task: str
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float | None]:
        return [t.reward if t.valid else None for t in self.trajectories]
