"""Success rates: known values, and intervals that cover as often as they say."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.evals.metrics import over_tasks, pass_at_k, pass_hat_k, success_rate, wilson


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(k, n, low, high):
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_nothing_is_none_and_of_nonsense_an_error():
    assert wilson(0, 0) is None
    with pytest.raises(ValueError, match="k = 3"):
        wilson(3, 2)


def test_single_samples_give_wilsons_interval_itself():
    rate = success_rate([[1.0]] * 81 + [[0.0]] * 182)
    # The between-task variance has m - 1 where the binomial has m, so it is a hair wider.
    assert (rate["low"], rate["high"]) == pytest.approx(wilson(81, 263), abs=2e-4)
    assert rate["n"] == 263
    assert rate["success"] == pytest.approx(81 / 263)


def test_no_outcomes_give_none():
    assert success_rate([]) == {"success": None, "low": None, "high": None, "n": 0}
    assert success_rate([[], []])["success"] is None


def test_samples_that_always_agree_are_worth_one():
    once = success_rate([[1.0]] * 30 + [[0.0]] * 30)
    copied = success_rate([[1.0] * 8] * 30 + [[0.0] * 8] * 30)
    assert (copied["low"], copied["high"]) == pytest.approx((once["low"], once["high"]))


def test_all_right_is_as_certain_as_the_tasks_are_many():
    rate = success_rate([[1.0] * 16] * 10)
    assert rate["high"] == 1.0
    assert rate["low"] == pytest.approx(wilson(10, 10)[0])


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), max_size=5), max_size=30))
def test_the_interval_holds_the_rate_and_is_never_narrower_than_for_independent_samples(outcomes):
    rate = success_rate(outcomes)
    if rate["n"]:
        low, high = wilson(sum(map(sum, outcomes)), rate["n"])
        assert 0 <= rate["low"] <= rate["success"] <= rate["high"] <= 1
        assert rate["high"] - rate["low"] >= high - low - 1e-9


def test_intervals_cover_the_truth_in_95_of_100_runs_where_plain_wilson_does_not():
    rng = np.random.default_rng(0)
    tasks, samples, truth, runs = 60, 8, 0.4, 1500
    covered = naive = 0
    for _ in range(runs):
        difficulty = rng.beta(0.8, 1.2, size=tasks)  # mean .4, and tasks differ widely, as they do
        outcomes = (rng.random((tasks, samples)) < difficulty[:, None]).astype(float)
        rate = success_rate(outcomes.tolist())
        covered += rate["low"] <= truth <= rate["high"]
        low, high = wilson(outcomes.sum(), outcomes.size)
        naive += low <= truth <= high
    assert 0.93 <= covered / runs <= 0.975
    assert naive / runs < 0.80


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_success(case):
    n, c, k = case
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_needs_enough_samples():
    with pytest.raises(ValueError, match="k = 5"):
        pass_at_k(4, 1, 5)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_hat_k_is_the_share_of_draws_that_hold_nothing_but_successes(case):
    n, c, k = case
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_pass_hat_k_needs_enough_samples():
    with pytest.raises(ValueError, match="k = 5"):
        pass_hat_k(4, 1, 5)


def test_over_tasks_averages_estimates_and_leaves_out_tasks_with_too_few_samples():
    rate = over_tasks(pass_hat_k, [(4, 4), (4, 2), (4, 0), (1, 1)], 2)
    assert rate["success"] == pytest.approx((1 + 1 / 6 + 0) / 3) and rate["n"] == 3
    low, high = wilson(3 * rate["success"], 3)
    assert rate["low"] <= low and rate["high"] >= high
    assert over_tasks(pass_at_k, [(1, 1)], 2) == {"success": None, "low": None, "high": None, "n": 0}


def test_intervals_of_pass_hat_k_cover_at_least_as_often_as_they_say():
    rng = np.random.default_rng(3)
    truth = np.mean(rng.beta(0.6, 0.6, 200_000) ** 2)  # E[p^2] over tasks whose own success rates differ widely
    hits = 0
    for _ in range(400):
        wins = rng.binomial(4, rng.beta(0.6, 0.6, 60))
        rate = over_tasks(pass_hat_k, [(4, int(c)) for c in wins], 2)
        hits += rate["low"] <= truth <= rate["high"]
    assert hits / 400 >= 0.93
