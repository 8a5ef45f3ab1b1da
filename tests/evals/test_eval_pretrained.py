"""A real checkpoint with a real chat template, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pretrained import smollm2
from savepoint.cli import main
from savepoint.envs.messages import Message, ToolCall
from savepoint.envs.sql.env import EXECUTE, SUBMIT
from savepoint.envs.sql.tasks import write_tasks
from savepoint.rollout.driver import audit
from savepoint.rollout.trajectory import Trajectory, Turn
from savepoint.train.bundle import load_bundle
from tests_support import debugging


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory.getbasetemp().parent)


def trajectory(record: dict) -> Trajectory:
    turns = [Turn(**{**turn, "span": tuple(turn["span"])}) for turn in record.pop("turns")]
    return Trajectory(**record, turns=turns)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--single-turn"]], ids=["agentic", "single_turn"])
def test_a_pretrained_model_is_evaluated_end_to_end(model: Path, mode: list[str], people: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    count = debugging(instance_id="g", task="generation", issue_sql=[], query="How many people are there?", sol_sql=["SELECT count(*) FROM people"])
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [debugging(instance_id="t0"), debugging(instance_id="t1"), count])
    command = ["eval", str(model), "--tasks", str(tasks), "--databases", str(people), "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    command += ["--temperature", "0.7", "--max-tokens", "1500", "--set", "environment.max_message_tokens=48", "--set", "environment.max_turns=3", "--json"]
    assert main([*command, *mode]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["n"] == 3 and sum(result["outcomes"].values()) == 3 and "infra" not in result["outcomes"]
    bundle = load_bundle(model)
    for line in (tmp_path / "out" / "traces.jsonl").read_text().splitlines():
        t = trajectory(json.loads(line))
        audit(t)
        text = bundle.chat.decode(t.ids)
        assert text.startswith("<|im_start|>system\n") and "<tools>" in text and "CREATE TABLE people" in text
        ids = torch.tensor([t.ids])
        with torch.no_grad():
            learned = bundle.policy.logprobs(ids, torch.ones_like(ids), torch.tensor([t.mask]), temperature=0.7)
        sampled = torch.tensor([p for p, own in zip(t.logprobs, t.mask, strict=True) if own])
        assert (learned - sampled).abs().max() < 1e-3


@pytest.mark.slow
def test_a_call_in_a_real_template_is_read_back_and_answered(model: Path):
    chat = load_bundle(model).chat
    look = Message("assistant", "I look.", ToolCall("execute_sql", {"sql": "SELECT 'ü', \"a\" FROM t -- <|im_end|>"}))
    ids = chat.own(look)
    assert chat.parse(ids) == look
    prompt = chat.prompt([Message("system", "Help."), Message("user", "Hi")], (EXECUTE, SUBMIT)).ids
    grown = chat.decode(prompt + chat.own(Message("assistant", "Hello.")) + chat.reply(Message("tool", "1 row: one\n1")))
    assert grown.endswith("Hello.<|im_end|>\n<|im_start|>user\n<tool_response>\n1 row: one\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
