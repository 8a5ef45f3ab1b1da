"""What goes to a chat endpoint and what comes back, as pure functions: nothing that an endpoint answers makes them fail in a way of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from savepoint.envs.messages import Message, ToolCall
from savepoint.rollout.episode import Finish

_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


class UnreadableReply(Exception):
    """An answer of status 200 that is no chat completion. `str()` says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the endpoint counts them; `cached` are those of `prompt` that it did not read anew."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's message: its text, its first call with the arguments as they came (text, perhaps no JSON), how many calls more it made."""

    content: str
    name: str
    arguments: str
    more_calls: int
    finish: Finish
    usage: Usage | None

    @property
    def action(self) -> dict[str, str]:
        """What `SqlEnv.step` takes; the environment itself says what is wrong with arguments or a name."""
        return {"content": self.content, "name": self.name, "arguments": self.arguments}

    @property
    def message(self) -> Message:
        """The message for the record: arguments that are no JSON object are kept as text under `unreadable`."""
        if not self.name:
            return Message("assistant", self.content)
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return Message("assistant", self.content, ToolCall(self.name, arguments if isinstance(arguments, dict) else {"unreadable": self.arguments}))


WITHHELD = Reply("", "", "", 0, "content_filter", None)
"""What stands for a message that the endpoint's filter refused to make at all."""


def endpoint_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The chat so far in the endpoint's form, a pure function of the environment's own messages; contents are theirs, byte for byte.

    Ids of calls follow from their place (nine letters and digits, which the strictest servers demand). A made-up name of a tool is
    spelled in the letters that endpoints allow.
    """
    out: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": _clean(message.content)}
        if message.tool_call is not None:
            function = {"name": _NO_NAME.sub("_", message.tool_call.name)[:64], "arguments": json.dumps(message.tool_call.arguments)}
            entry["tool_calls"] = [{"id": f"call{at:05}", "type": "function", "function": function}]
        elif message.role == "tool":
            entry["tool_call_id"] = f"call{at - 1:05}"
        out.append(entry)
    return out


def read_reply(body: Any) -> Reply:
    """The message in a decoded chat completion. UnreadableReply where there is none."""
    if not isinstance(body, dict):
        raise UnreadableReply(f"the answer is no JSON object but {type(body).__name__}")
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        error = body.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        raise UnreadableReply(f"the answer holds no message{f', but an error: {said}' if said else ''}")
    calls = _calls(message)
    name, arguments = calls[0] if calls else ("", "")
    content = _text(message.get("content")) or _text(message.get("refusal"))
    finish: Finish = choice["finish_reason"] if choice.get("finish_reason") in ("length", "content_filter") else "stop"
    return Reply(content, name, arguments, max(0, len(calls) - 1), finish, _usage(body.get("usage")))


def _calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments) of each call; one without a name gets a name that no tool has."""
    listed = message.get("tool_calls")
    functions = [call.get("function") if isinstance(call, dict) else None for call in listed] if isinstance(listed, list) else []
    if not functions and isinstance(message.get("function_call"), dict):
        functions = [message["function_call"]]
    out = []
    for function in functions:
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        text = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)
        out.append((name if isinstance(name, str) and name else "unreadable", text))
    return out


def _text(content: Any) -> str:
    """Text, or the text parts of a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(*(count if isinstance(count, int) and count > 0 else 0 for count in (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)))


def _clean(text: str) -> str:
    """Text that UTF-8 can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
