"""Chat messages: the one form in which environments, demonstrators, rendering and traces pass a conversation on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


def bytes_over_four(text: str) -> int:
    """A count of tokens that needs no tokenizer, and so is the same for every model: four bytes of UTF-8 make one."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // 4)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A structured call, as the policy made it and as the loop recorded it. Rewards look at nothing else."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `quoted` is the part of a user's `content` that quotes SQL, as (start, end) in characters."""

    role: Role
    content: str
    tool_call: ToolCall | None = None
    quoted: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.tool_call is not None and self.role != "assistant":
            raise ValueError(f"only an assistant's message carries a tool call, not one of role {self.role!r}")
