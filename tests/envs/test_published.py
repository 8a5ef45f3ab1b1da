"""Published metrics give what their authors' definitions give."""

from __future__ import annotations

import math

import pytest

from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.published import bird_ex, measure, soft_f1, ves_value
from savepoint.envs.sql.world import World
from tests_support import debugging


def test_bird_ex_compares_sets_by_python_equality():
    assert bird_ex([(1,), (1,), (2,)], [(2.0,), (1,)]) == 1 and bird_ex([(1,)], [("1",)]) == 0 and bird_ex([(0.1 + 0.2,)], [(0.3,)]) == 0


@pytest.mark.parametrize(
    ("prediction", "gold", "value"),
    [
        ([], [], 1.0),
        ([(1,)], [], 0.0),
        ([(1, 2)], [(1, 2)], 1.0),
        ([(1,), (2,), (3,)], [(3,), (1,), (2,)], 0.0),  # row i against row i, so another order scores nothing
        ([(1, 1, 1)], [(1, 2, 3)], 2 * 1 * (1 / (1 + 2 / 3)) / (1 + 1 / (1 + 2 / 3))),
        ([(1, 2), (9, 9)], [(1, 2)], 2 * 0.5 / 1.5),
        ([(1, 2), (1, 2)], [(1, 2)], 1.0),
    ],
)
def test_soft_f1_goes_row_by_row_over_shares_of_cells(prediction, gold, value):
    assert soft_f1(prediction, gold) == pytest.approx(value)


@pytest.mark.parametrize(("ratio", "reward"), [(2.0, 1.25), (1.9, 1.0), (1.0, 1.0), (0.99, 0.75), (0.5, 0.75), (0.3, 0.5), (0.1, 0.25)])
def test_the_efficiency_score_puts_the_ratio_into_classes(ratio, reward):
    assert ves_value([ratio] * 100) == pytest.approx(100 * math.sqrt(reward))


def test_the_efficiency_score_drops_outliers_beyond_three_sigma():
    assert ves_value([1.0] * 99 + [1000.0]) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        ("SELECT city FROM people WHERE age > 40", {"bird_ex": 1, "critic_soft_ex": 1, "soft_f1": 1}),
        ("SELECT DISTINCT city FROM people WHERE age > 40", {"bird_ex": 1, "critic_soft_ex": 1}),  # as sets
        ("SELECT nobody FROM people", {"bird_ex": 0, "critic_soft_ex": 0, "soft_f1": 0}),
        ("DELETE FROM people", {"bird_ex": 0, "critic_soft_ex": 0}),
        ("SELECT 'x' WHERE 0", {"bird_ex": 0, "critic_soft_ex": 0, "soft_f1": 0}),
    ],
)
def test_metrics_of_a_graded_answer(world: World, sql: str, values: dict[str, float]):
    grader, task = Grader(world.backend), debugging()
    image = world.image(task)
    found = measure(tuple(values), grader, image, task, grader.examine(image, task, [sql]))  # type: ignore[arg-type]
    assert found == values


def test_soft_ex_takes_distinct_and_round_out_of_both_and_runs_them_again(world: World):
    grader, task = Grader(world.backend), debugging(sol_sql=["SELECT DISTINCT ROUND(height, 0) FROM people"])
    image = world.image(task)

    def soft(sql: str) -> dict[str, float]:
        return measure(("critic_soft_ex",), grader, image, task, grader.examine(image, task, [sql]))

    assert soft("SELECT height FROM people") == {"critic_soft_ex": 1} and soft("SELECT ROUND(height + 1, 0) FROM people") == {"critic_soft_ex": 0}


def test_the_efficiency_score_of_the_gold_itself_is_about_a_hundred_and_of_a_wrong_answer_zero(world: World, monkeypatch):
    monkeypatch.setattr("savepoint.envs.sql.published.VES_PAIRS", 10)
    grader, task = Grader(world.backend), debugging()
    image = world.image(task)
    right = measure(("r_ves",), grader, image, task, grader.examine(image, task, task.sol_sql))["r_ves"]
    assert right >= 50
    assert measure(("r_ves",), grader, image, task, grader.examine(image, task, ["SELECT 1"])) == {"r_ves": 0.0}


def test_an_answer_that_is_not_scored_has_no_metrics(world: World):
    grader, task = Grader(world.backend), debugging(sol_sql=["SELECT nobody FROM people"])
    image = world.image(task)
    assert measure(("bird_ex",), grader, image, task, grader.examine(image, task, ["SELECT 1"])) == {}
