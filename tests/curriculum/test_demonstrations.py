"""The demonstrator: imperfect by its settings, and acting in the very environments that the policy meets."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from savepoint.curriculum.demonstrations import DemonstratorSettings, demonstrate
from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.world import World
from savepoint.rollout.driver import audit
from savepoint.rollout.render import CompactChat, Part, train_tokenizer
from tests_support import debugging, renamed

CAREFUL = DemonstratorSettings(hasty=0.0, careless=0.0)


@pytest.fixture
def chat() -> CompactChat:
    return CompactChat(train_tokenizer(["SELECT city FROM people WHERE age > 40"], 300))


def act_out(world, chat, task, settings, mode="agentic", seed=0):
    return demonstrate(task, SqlEnv(mode=mode, world=world, prompt="brief"), chat, settings, random.Random(seed))


def test_without_errors_it_solves_every_task_by_looking(world: World, chat: CompactChat):
    for task in (debugging(), renamed()):
        trajectory, example = act_out(world, chat, task, CAREFUL)
        audit(trajectory)
        assert trajectory.reward == 1.0 and trajectory.assistant_turns == 2
        assert example.ids == trajectory.ids and [part == Part.OWN for part in example.parts] == trajectory.mask


def test_alone_it_can_only_guess_a_new_name(world: World, chat: CompactChat):
    rewards = [act_out(world, chat, renamed(), CAREFUL, "single_turn", seed)[0].reward for seed in range(60)]
    assert 0.1 < fmean(rewards) < 0.45  # four candidates


def test_its_habits_are_as_frequent_as_its_settings_say(world: World, chat: CompactChat):
    careless = [act_out(world, chat, debugging(), DemonstratorSettings(careless=0.4), seed=s)[0] for s in range(80)]
    assert 0.25 < fmean(t.outcome == "sql_error" and t.assistant_turns == 1 for t in careless) < 0.55
    hasty = [act_out(world, chat, renamed(), DemonstratorSettings(hasty=0.45), seed=s)[0] for s in range(80)]
    assert 0.3 < fmean(t.assistant_turns == 1 for t in hasty) < 0.6
