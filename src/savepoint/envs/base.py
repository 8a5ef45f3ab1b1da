"""What every stateful environment has on top of `gymnasium.Env`: snapshot, restore, fork, and a close on every path out."""

from __future__ import annotations

import string
from abc import abstractmethod
from typing import Any

import gymnasium
from gymnasium import spaces

from savepoint.envs.tools import Tool


class UnicodeText(spaces.Text):
    """Any text of at most `max_length` characters. Gymnasium's own `Text` admits only an alphabet listed in full; samples here are ASCII."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length=max_length, min_length=0, charset=string.ascii_letters + string.digits + " _*,()='")

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class StatefulEnv(gymnasium.Env[str, dict[str, str]]):
    """An environment whose state can be kept, gone back to and split.

    An action is one message of the policy: `{"content": text, "name": tool or "", "arguments": JSON object as text}`. An observation is the
    text of the newest message. `info` is plain JSON. `terminated` means that the agent ended the episode, `truncated` that a budget (or our
    infrastructure) did; `info["reason"]` says which.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    @property
    @abstractmethod
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the agent may call in the current mode."""

    @abstractmethod
    def snapshot(self) -> Any:
        """The state of this moment, to be handed to `restore`. It stays valid until the next `reset` or `close`."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot: database, conversation and budgets."""

    @abstractmethod
    def fork(self, n: int = 1) -> list[StatefulEnv]:
        """`n` independent environments that go on from here."""
