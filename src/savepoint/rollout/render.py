"""Chat to tokens, and back, append-only: what the policy sampled stays as sampled, and only what the environment says is encoded and added."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from savepoint.envs.messages import Message, ToolCall
from savepoint.envs.tools import Tool
from savepoint.errors import UserError


class Part(IntEnum):
    """What a token is part of; imitation weighs them differently."""

    CONTEXT = 0
    QUOTED = 1
    OWN = 2


@dataclass(slots=True)
class Rendered:
    """Tokens, what each is part of, and the half-open span of each message; the marker that asks for the policy's first belongs to the last."""

    ids: list[int]
    parts: list[Part]
    spans: list[tuple[int, int]]

    def add(self, ids: Sequence[int], parts: Sequence[Part] | Part) -> None:
        self.ids += ids
        self.parts += [parts] * len(ids) if isinstance(parts, Part) else parts


class Chat(Protocol):
    """A way to write a chat in tokens. The policy's message ends with one of `stop_ids`."""

    stop_ids: frozenset[int]
    pad_id: int

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        """The opening messages and the marker that asks for the policy's first."""

    def own(self, message: Message) -> list[int]:
        """The tokens with which a policy would say `message`, its stop token included (for demonstrations)."""

    def reply(self, message: Message) -> list[int]:
        """What is appended after the policy's message: a tool's answer, and the marker that asks for the next."""

    def parse(self, ids: Sequence[int]) -> Message:
        """The message that sampled tokens stand for. Never fails: what is no call is content."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, markers included."""


_MARKERS = ("<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>", "<|end|>")
_INSIDE_MARKER = re.compile(r"(?<=<)(?=\||pad>)")
_ROLES = {"system": "<|system|>", "user": "<|user|>", "tool": "<|tool|>"}


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose units are a word or a number with its leading space, or one sign: a frequent identifier is one token everywhere."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?[\p{L}_][\p{L}\p{N}_]*| ?[0-9]+| ?[^\s\p{L}\p{N}_]|\s"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_MARKERS), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class CompactChat:
    """The chat of our tiny models: one marker a message, a call as `<|call|>name SQL`, nothing that costs a token and says nothing.

    `<|system|>tools<|user|>...<|assistant|>look<|call|>execute_sql SELECT 1<|end|><|tool|>1 row: 1 ...<|assistant|>`. A list of statements is
    written with `;` between them; it is read back as one string, which the environment splits as SQLite does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = {marker: tokenizer.token_to_id(marker) for marker in _MARKERS}
        self._id = {marker: i for marker, i in ids.items() if i is not None}
        if len(self._id) < len(_MARKERS):
            raise UserError("the tokenizer lacks the markers of the compact chat")
        self.pad_id: int = self._id["<pad>"]
        self.end_id: int = self._id["<|end|>"]
        self.stop_ids = frozenset({self.end_id})
        self._argument = {"execute_sql": "sql", "submit_solution": "sql_list"}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        out = Rendered([], [], [])
        for message in messages:
            start = len(out.ids)
            encoding = self.tokenizer.encode(message.content, add_special_tokens=False)
            out.add([self._id[_ROLES[message.role]]], Part.CONTEXT)
            low, high = message.quoted or (0, 0)
            out.add(encoding.ids, [Part.QUOTED if low < b <= high and a < b else Part.CONTEXT for a, b in encoding.offsets])
            out.spans.append((start, len(out.ids)))
        out.add([self._id["<|assistant|>"]], Part.CONTEXT)
        if out.spans:
            out.spans[-1] = (out.spans[-1][0], len(out.ids))
        return out

    def own(self, message: Message) -> list[int]:
        ids = self._encode(message.content)
        if message.tool_call is not None:
            value = message.tool_call.arguments[self._argument[message.tool_call.name]]
            text = value if isinstance(value, str) else "; ".join(value)
            ids += [self._id["<|call|>"], *self._encode(f"{message.tool_call.name} {text}")]
        return [*ids, self._id["<|end|>"]]

    def reply(self, message: Message) -> list[int]:
        return [self._id[_ROLES[message.role]], *self._encode(message.content), self._id["<|assistant|>"]]

    def parse(self, ids: Sequence[int]) -> Message:
        body = [i for i in ids if i not in self.stop_ids]
        if self._id["<|call|>"] not in body:
            return Message("assistant", self.decode(body))
        cut = body.index(self._id["<|call|>"])
        name, _, text = self.decode(body[cut + 1 :]).partition(" ")
        argument = self._argument.get(name, "sql")
        return Message("assistant", self.decode(body[:cut]), ToolCall(name, {argument: [text] if argument == "sql_list" else text}))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        # Text that spells a marker must not become one (an observation could then speak for the user): it is encoded in two pieces.
        return [i for piece in _INSIDE_MARKER.split(text) for i in self.tokenizer.encode(piece, add_special_tokens=False).ids]


# A code point that Unicode sets aside for use inside programs.
_BREAK = "\ufdd0"
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_INSTRUCTIONS = (
    "\n\nYou may call these functions; their signatures are JSON, one a line:\n<tools>\n{schemas}\n</tools>\n"
    'To call one, end your message with its name and arguments as JSON:\n<tool_call>\n{{"name": ..., "arguments": ...}}\n</tool_call>'
)


class TemplateChat:
    """The chat of any transformers model that has a chat template. Tools are described in the system message and called in `<tool_call>` blocks
    (the Hermes convention), and their answers come as user messages in `<tool_response>`: every template can write those.

    The template must be append-only: a later message may not change how earlier ones are written. That is checked when this is made.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"{tokenizer.name_or_path}: its tokenizer has no chat template")
        self.tokenizer = tokenizer
        stop = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
        self.stop_ids = frozenset({stop})
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special and len(token.content) > 1}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._reply_text("probe")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        schemas = "\n".join(json.dumps(tool.schema()["function"]) for tool in tools)
        chat = [{"role": m.role, "content": self._defuse(m.content)} for m in messages]
        if chat and chat[0]["role"] == "system":
            chat[0]["content"] += _INSTRUCTIONS.format(schemas=schemas)
        ids = self._encode(self._apply(chat))
        return Rendered(ids, [Part.CONTEXT] * len(ids), [(0, len(ids))] + [(len(ids), len(ids))] * (len(messages) - 1))

    def own(self, message: Message) -> list[int]:
        text = message.content
        if message.tool_call is not None:
            call = {"name": message.tool_call.name, "arguments": message.tool_call.arguments}
            text = f"{text}\n{_CALL_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{_CALL_CLOSE}".lstrip("\n")
        return [*self._encode(self._defuse(text)), *self.stop_ids]

    def reply(self, message: Message) -> list[int]:
        return self._encode(self._reply_text(self._defuse(message.content)))

    def parse(self, ids: Sequence[int]) -> Message:
        text = self.decode([i for i in ids if i not in self.stop_ids])
        before, marker, rest = text.partition(_CALL_OPEN)
        if not marker:
            return Message("assistant", text.strip())
        try:
            call = json.loads(rest.partition(_CALL_CLOSE)[0])
            return Message("assistant", before.strip(), ToolCall(str(call["name"]), dict(call["arguments"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Message("assistant", before.strip(), ToolCall("unreadable", {"text": rest}))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _apply(self, chat: list[dict[str, str]], generate: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
        except TemplateError as error:
            raise UserError(f"{self.tokenizer.name_or_path}: its chat template refuses a chat of {', '.join(m['role'] for m in chat)}: {error}") from None

    def _defuse(self, text: str) -> str:
        """Text whose spellings of special tokens are broken by `_BREAK`: a value in a database must not be able to end the tool's message."""
        return self._special.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text.replace(_BREAK, "\N{REPLACEMENT CHARACTER}"))

    def _encode(self, text: str) -> list[int]:
        return [i for piece in text.split(_BREAK) if piece for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]

    def _reply_text(self, content: str) -> str:
        """What the template writes between the stop token of the policy's message and the policy's next."""
        said = "\N{WHITE SQUARE}said\N{WHITE SQUARE}"
        opening = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": said}]
        answer = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        whole, before = self._apply([*opening, answer]), self._apply(opening, generate=False)
        stop = self.tokenizer.eos_token
        mark = f"{said}{stop}"
        if mark not in before or not whole.startswith(before[: before.index(mark) + len(mark)]):
            raise UserError(f"{self.tokenizer.name_or_path}: its chat template is not append-only, or does not end messages with {stop!r}")
        return whole[whole.index(mark) + len(mark) :]
