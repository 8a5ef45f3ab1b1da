"""A policy in a folder comes back with the chat that it speaks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from savepoint.errors import UserError
from savepoint.rollout.render import CompactChat, TemplateChat, train_tokenizer
from savepoint.train.bundle import load_bundle, save_bundle
from savepoint.train.policy import Policy, TinyConfig


def tiny(vocab: int, architecture: str = "gpt_oss") -> Policy:
    config = TinyConfig(hidden_size=32, layers=2, head_dim=8, vocab_size=vocab, architecture=architecture)  # type: ignore[arg-type]
    return Policy.tiny(config, vocab_size=vocab, pad_id=0, end_id=6, seed=0)


@pytest.mark.parametrize("architecture", ["gpt_oss", "llama"])
def test_a_tiny_policy_comes_back_with_its_chat_and_settings(tmp_path: Path, architecture: str):
    chat = CompactChat(train_tokenizer(["SELECT city FROM people"], 300))
    policy = tiny(300, architecture)
    save_bundle(tmp_path / "p", policy, chat, {"max_turns": 4})
    bundle = load_bundle(tmp_path / "p")
    assert isinstance(bundle.chat, CompactChat) and bundle.environment == {"max_turns": 4}
    ids = torch.tensor([chat.tokenizer.encode("SELECT city FROM people").ids])
    ones, trained = torch.ones_like(ids), torch.ones_like(ids).bool()
    trained[:, 0] = False
    assert torch.equal(bundle.policy.logprobs(ids, ones, trained), policy.logprobs(ids, ones, trained))


def test_any_local_model_with_a_chat_template_is_taken(tmp_path: Path):
    from tests_support import chatml_tokenizer

    tokenizer = chatml_tokenizer()
    policy = tiny(len(tokenizer), "llama")
    policy.model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    bundle = load_bundle(tmp_path / "m")
    assert isinstance(bundle.chat, TemplateChat) and bundle.environment == {}
    save_bundle(tmp_path / "again", bundle.policy, bundle.chat, {})
    assert isinstance(load_bundle(tmp_path / "again").chat, TemplateChat)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path):
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError) as error:
            load_bundle(folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)
