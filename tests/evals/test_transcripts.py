"""Transcripts: what is counted in traces, and which episodes are shown."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from savepoint.errors import UserError
from savepoint.evals.transcripts import behaviour, cut, highlighted, pairs, read, scan
from savepoint.rollout.trajectory import Trajectory, Turn

ISSUE = "SELECT age FROM people ORDER BY age DESC"
PROMPT = f"age of people, lowest first\nsql: {ISSUE}\nresult: error: no such column: age"


def episode(task: str, *calls: tuple[str, str, str | None], reward: float | None = 0.0, category: str = "wrong_direction", user: str = PROMPT) -> Trajectory:
    """An episode of calls (tool, SQL, observation)."""
    turns = [Turn("system", "tools", (0, 1)), Turn("user", user, (1, 9))]
    for name, sql, seen in calls:
        arguments = {"sql": sql} if name == "execute_sql" else {"sql_list": [sql]}
        turns.append(Turn("assistant", "so", (9, 9), tool_call={"name": name, "arguments": arguments}, reward=0.0, finish_reason="stop"))
        if seen is not None:
            turns.append(Turn("tool", "", (9, 9), observation=seen))
    turns[-1].reward = reward
    status, outcome = "ok" if reward is not None else "failed", "correct" if reward else "wrong_result"
    return Trajectory(task, 0, 0, 0, turns=turns, status=status, reward=reward, category=category, outcome=outcome, reason="submitted")


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, *trajectories: Trajectory) -> list:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(t.to_json(), ensure_ascii=False) + "\n" for t in trajectories), encoding="utf-8")
        return scan(path)

    return write


def submit(sql: str) -> tuple[str, str, None]:
    return "submit_solution", sql, None


def test_a_query_handed_back_with_other_spacing_is_unchanged(write):
    (record,) = write("a", episode("t", submit("SELECT  age FROM people\nORDER BY age DESC ;")))
    assert record.unchanged is True


def test_a_repair_that_only_drops_the_end_of_the_query_is_a_change(write):
    (record,) = write("a", episode("t", submit("SELECT age FROM people ORDER BY age"), reward=1.0))
    assert record.unchanged is False
    assert record.success


def test_nothing_submitted_is_neither_changed_nor_unchanged(write):
    (record,) = write("a", episode("t", ("execute_sql", ISSUE, "1 row: age\n3")))
    assert record.unchanged is None
    assert record.looked


def test_a_prompt_without_a_query_has_none_to_hand_back(write):
    (record,) = write("a", episode("t", submit(ISSUE), user="How old are the people?"))
    assert record.unchanged is None
    assert read(record).issue is None
    assert read(record).question == "How old are the people?"


def test_a_name_is_found_only_where_an_observation_told_it(write):
    look = ("execute_sql", "SELECT * FROM people LIMIT 0", "0 rows: name, years")
    told, guessed, ignored = write(
        "a", episode("told", look, submit("SELECT years FROM people")), episode("guessed", submit("SELECT years FROM people")),
        episode("ignored", look, submit("SELECT span FROM people")),
    )  # fmt: skip
    assert [told.found, guessed.found, ignored.found] == [True, False, False]


def test_episodes_that_our_infrastructure_failed_are_not_counted(write):
    records = write("a", episode("t", submit(ISSUE), reward=None), episode("u", submit(ISSUE)))
    assert [record.task for record in records] == ["u"]


def test_behaviour_counts_shares_and_has_none_for_nothing(write):
    look = ("execute_sql", "SELECT 1", "1 row: 1\n1")
    kinds = {"category": "renamed_column"}
    renamed = [episode("a", look, submit("SELECT b"), reward=1.0, **kinds), episode("b", look, submit("SELECT b"), **kinds)]
    renamed += [episode(task, submit("SELECT b"), **kinds) for task in "cd"]
    records = write("a", *renamed, episode("e", submit(ISSUE)), episode("f", submit("SELECT b"), reward=1.0))
    counted = behaviour(records)
    assert counted["renamed"] == {"n": 4, "success": 0.25, "looked": 0.5, "when_looked": 0.5, "when_not": 0.0, "unchanged": 0.0}
    assert counted["bug"] == {"n": 2, "success": 0.5, "looked": 0.0, "when_looked": None, "when_not": 0.5, "unchanged": 0.5}


def test_a_renamed_task_is_shown_where_a_guess_failed_and_a_look_at_the_database_solved_it(write):
    look, kinds = ("execute_sql", "SELECT * FROM people LIMIT 0", "0 rows: years"), {"category": "renamed_column"}
    before = write("before", *(episode(task, submit("SELECT span FROM people"), **kinds) for task in "abc"))
    after = write(
        "after", episode("a", submit("SELECT years FROM people"), reward=1.0, **kinds), episode("b", look, submit("SELECT span FROM people"), **kinds),
        episode("c", look, submit("SELECT years FROM people"), reward=1.0, **kinds),
    )  # fmt: skip
    (pair,) = pairs(before, after)
    assert (pair.before.task, pair.after.task, pair.alike, pair.of) == ("c", "c", 1, 3)
    assert "reading it from the live database" in pair.pattern
    assert [turn.tool for turn in pair.after.turns] == ["execute_sql", "submit_solution"]
    assert pair.after.turns[0].observation == "0 rows: years"
    assert [turn.reward for turn in pair.after.turns] == [0.0, 1.0]


def test_a_task_whose_every_sample_shows_the_pattern_is_preferred(write):
    mixed = [episode("mixed", submit(ISSUE)), episode("mixed", submit("SELECT 1"), reward=1.0)]
    before = write("before", *mixed, episode("clear", submit(ISSUE)), episode("clear", submit(ISSUE)))
    after = write("after", *(episode(task, submit("SELECT 1"), reward=1.0) for task in ("mixed", "mixed", "clear", "clear")))
    (pair,) = pairs(before, after)
    assert (pair.before.task, pair.how) == ("clear", "in every sample")
    (pair,) = pairs(before[:2], after)
    assert (pair.before.task, pair.how, pair.before.reward) == ("mixed", "in at least one sample", 0.0)


def test_without_a_telling_task_one_that_is_on_both_sides_is_shown(write):
    before, after = write("before", episode("a", submit("SELECT 1")), episode("b", submit("SELECT 1"))), write("after", episode("b", submit("SELECT 2")))
    (pair,) = pairs(before, after)
    assert pair.before.task == pair.after.task == "b"
    assert pairs(before, []) == []


def test_a_line_that_is_no_trajectory_is_named(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(episode("t", submit(ISSUE)).to_json()) + '\n{"task": 1}\n')
    with pytest.raises(UserError, match=r"traces\.jsonl:2: not a trajectory"):
        scan(path)


def test_text_that_is_cut_says_by_how_much():
    assert cut("x" * 5000).endswith("… 1,000 more characters")
    assert cut("short") == "short"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=200))
def test_highlighting_escapes_everything_and_loses_nothing(sql):
    shown = highlighted(sql)
    assert isinstance(shown, Markup)
    text = re.sub(r'<span class="\w+">|</span>', "", str(shown))
    assert "<" not in text
    assert unescape(text).rstrip("\n") == sql.rstrip("\n")
