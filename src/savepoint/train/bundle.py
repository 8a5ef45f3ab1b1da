"""A policy with the chat that it speaks, in one folder: what a stage hands on, and what `savepoint eval` opens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from savepoint.errors import UserError
from savepoint.rollout.render import Chat, CompactChat, TemplateChat
from savepoint.train.policy import Policy

_CHAT_FILE = "savepoint_chat.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A policy, its chat, and the settings of the environment that it was trained in ({} where it was not trained here)."""

    policy: Policy
    chat: Chat
    environment: dict[str, Any]


def save_bundle(folder: Path, policy: Policy, chat: Chat, environment: dict[str, Any]) -> None:
    """Write weights, configuration, tokenizer and chat. The folder is a transformers model directory as well."""
    policy.save(folder)
    if isinstance(chat, CompactChat):
        chat.tokenizer.save(str(folder / "tokenizer.json"))
    elif isinstance(chat, TemplateChat):
        chat.tokenizer.save_pretrained(str(folder))
    kind = "compact" if isinstance(chat, CompactChat) else "template"
    (folder / _CHAT_FILE).write_text(json.dumps({"chat": kind, "environment": environment}, indent=1), encoding="utf-8")


def load_bundle(folder: Path) -> Bundle:
    """Open a folder that `save_bundle` wrote, or any local transformers model with a chat template. UserError that names it otherwise."""
    policy = Policy.load(folder)
    return Bundle(policy, *load_chat(folder))


def load_chat(folder: Path) -> tuple[Chat, dict[str, Any]]:
    """The chat of a folder and the settings of the environment that its policy was trained in, without the weights. UserError as `load_bundle`."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    described = folder / _CHAT_FILE
    if not described.is_file():
        return TemplateChat(_auto_tokenizer(folder)), {}
    settings = json.loads(described.read_text(encoding="utf-8"))
    if settings["chat"] == "compact":
        return CompactChat(Tokenizer.from_file(str(folder / "tokenizer.json"))), settings["environment"]
    return TemplateChat(_auto_tokenizer(folder)), settings["environment"]


def _auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from None
