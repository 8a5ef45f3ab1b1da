"""Summaries of episodes: what is nobody's answer is in no figure but the count of outcomes."""

from __future__ import annotations

from savepoint.evals.evaluate import passes, summarise
from savepoint.evals.results import Sample


def sample(task: str, number: int, reward: float | None, turns: int = 2) -> Sample:
    outcome = "infra" if reward is None else "correct" if reward else "wrong_result"
    return Sample(task, number, outcome, "failed" if reward is None else "ok", None, reward, "Query", turns)


def test_failures_of_ours_move_no_rate_and_no_mean():
    good = [sample("a", 0, 1.0), sample("a", 1, 0.0), sample("b", 0, 1.0, turns=4)]
    with_failure = summarise([*good, sample("b", 1, None, turns=0)])
    for key in ("success", "low", "high", "n", "turns"):
        assert with_failure[key] == summarise(good)[key]
    assert with_failure["turns"] == (2 + 2 + 4) / 3 and with_failure["outcomes"] == {"correct": 2, "wrong_result": 1, "infra": 1}


def test_a_task_that_lacks_valid_samples_is_left_out_of_larger_k():
    episodes = [sample("a", 0, 1.0), sample("a", 1, 0.0), sample("a", 2, 1.0), sample("b", 0, 1.0), sample("b", 1, None), sample("b", 2, None)]
    found = passes(episodes, 3)
    rates = {name: {k: (round(rate["success"], 6), rate["n"]) for k, rate in of.items()} for name, of in found.items()}
    assert rates["pass_at"] == {"1": (0.833333, 2), "2": (1.0, 1), "3": (1.0, 1)}
    assert rates["pass_hat"] == {"1": (0.833333, 2), "2": (0.333333, 1), "3": (0.0, 1)}


def test_nothing_at_all_has_no_rate():
    assert summarise([])["success"] is None and summarise([])["turns"] is None and passes([], 4) == {"pass_at": {}, "pass_hat": {}}
