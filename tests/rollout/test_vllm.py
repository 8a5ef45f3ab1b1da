"""The seam to vLLM, with a stand-in for vLLM itself: tokens in, tokens out, and what is asked of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from savepoint.errors import UserError
from savepoint.rollout.engines.vllm import VllmEngine

STOP = 9


class Llm:
    """Says what it is told, message by message: `lines[prompt's first token]`."""

    def __init__(self, lines: dict[int, list[list[int]]]) -> None:
        self.lines, self.asked = lines, []

    def generate(self, prompts: list[dict[str, list[int]]], params: list[dict[str, Any]], use_tqdm: bool) -> list[Any]:
        self.asked.append(([prompt["prompt_token_ids"] for prompt in prompts], params))
        out = []
        for prompt in prompts:
            ids = self.lines[prompt["prompt_token_ids"][0]].pop(0)
            logprobs = [{token: SimpleNamespace(logprob=-token / 10)} for token in ids]
            out.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs)]))
        return out


def generate(llm: Llm, respond: Any, prompts: list[list[int]], group_size: int = 1, max_tokens: int = 20) -> list[Any]:
    engine = VllmEngine(Path("m"), max_tokens=max_tokens, llm=llm, params=lambda **given: given)
    return engine.generate(prompts, group_size, respond, stop_ids={STOP}, temperature=0.7, max_message_tokens=4, max_tokens=max_tokens, seed=5)


def test_answers_are_appended_and_sampled_ids_stay_as_they_were():
    llm = Llm({1: [[3, STOP], [4, 5, STOP]]})
    heard: list[Any] = []

    def respond(slot: int, ids: list[int], finish: str) -> list[int] | None:
        heard.append((slot, ids, finish))
        return [7, 8] if len(heard) == 1 else None

    (one,) = generate(llm, respond, [[1, 2]])
    assert one.ids == [1, 2, 3, STOP, 7, 8, 4, 5, STOP] and one.finish == "stop" and heard == [(0, [3, STOP], "stop"), (0, [4, 5, STOP], "stop")]
    assert one.mask == [False, False, True, True, False, False, True, True, True]
    assert one.logprobs == [0.0, 0.0, -0.3, -0.9, 0.0, 0.0, -0.4, -0.5, -0.9]
    assert [asked for asked, _ in llm.asked] == [[[1, 2]], [[1, 2, 3, STOP, 7, 8]]]


def test_each_message_is_asked_for_within_its_budget_and_with_a_seed_of_its_own():
    llm = Llm({1: [[3, STOP], [STOP], [STOP], [STOP]]})
    generate(llm, lambda slot, ids, finish: [7] if len(ids) == 2 else None, [[1]], group_size=2, max_tokens=6)
    (_, first), (_, second) = llm.asked
    assert {(p["max_tokens"], p["temperature"], tuple(p["stop_token_ids"]), p["logprobs"], p["detokenize"]) for p in first} == {(4, 0.7, (STOP,), 0, False)}
    assert [p["max_tokens"] for p in second] == [2] and len({p["seed"] for p in [*first, *second]}) == 3


def test_cut_messages_and_spent_budgets_are_told_apart():
    heard: list[str] = []

    def respond(slot: int, ids: list[int], finish: str) -> list[int] | None:
        heard.append(finish)
        return [7] * 3 if slot else None

    cut, spent = generate(Llm({1: [[3, 3, 3, 3]], 2: [[3, STOP]]}), respond, [[1], [2]], max_tokens=6)
    assert heard == ["length", "stop"] and cut.finish == "stop"
    assert spent.finish == "length" and spent.ids == [2, 3, STOP]  # the answer left no room, and is dropped


def test_without_vllm_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"--engine vllm: vLLM cannot be imported .*pip install vllm.*--engine embedded"):
        VllmEngine(Path("m"), max_tokens=10)


def test_a_model_that_vllm_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch):
    def refuses(**given: object) -> None:
        raise ValueError("\nno kernel for this\nmore")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuses, SamplingParams=dict))
    with pytest.raises(UserError, match="m: vLLM cannot run this model: no kernel for this$"):
        VllmEngine(Path("m"), max_tokens=10)
