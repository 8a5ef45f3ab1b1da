"""The SQL environments: real Gymnasium environments, budgets with reasons, rewards by execution."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from savepoint.envs.sql.env import Budget, SqlEnv
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.tasks import write_tasks
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.state import Session
from tests_support import debugging, renamed


def call(name: str, **arguments: object) -> dict[str, str]:
    return {"content": "", "name": name, "arguments": json.dumps(arguments)}


def submit(*sql: str) -> dict[str, str]:
    return call("submit_solution", sql_list=list(sql))


@pytest.mark.parametrize("name", ["savepoint/SqlDebug-v0", "savepoint/SqlGenerate-v0"])
@pytest.mark.parametrize("mode", ["agentic", "single_turn"])
def test_it_passes_the_gymnasium_checker(name: str, mode: str, people: Path, tmp_path: Path):
    generation = debugging(instance_id="g1", task="generation", issue_sql=[], category=None)
    write_tasks(tmp_path / "tasks.jsonl", [debugging(), renamed(), generation])
    env = gymnasium.make(name, tasks=str(tmp_path / "tasks.jsonl"), databases=str(people), mode=mode)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_the_prompt_shows_the_query_and_what_it_gave(world: World):
    text, info = SqlEnv([debugging()], world=world, prompt="brief").reset(options={"task": "p1"})
    assert text == "list city of people where age is over 40\nsql: SELECT cty FROM people WHERE age > 40\nresult: error: no such column: cty"
    assert json.loads(json.dumps(info)) == json.loads(json.dumps(info)) and info["task"] == "p1"
    start, end = info["messages"][1]["quoted"]
    assert text[start:end] == "SELECT cty FROM people WHERE age > 40"


def test_the_full_prompt_documents_the_schema_before_the_migration(world: World):
    text, _ = SqlEnv([renamed()], world=world).reset(options={"task": "p2"})
    assert "city TEXT" in text and "town" not in text


def test_gold_is_paid_and_the_issue_is_not(world: World):
    for task in (debugging(), renamed()):
        for sql, reward, outcome in ((task.sol_sql, 1.0, "correct"), (task.issue_sql, 0.0, "sql_error")):
            env = SqlEnv([task], world=world)
            env.reset(options={"task": task.instance_id})
            _, paid, terminated, truncated, info = env.step(submit(*sql))
            assert (paid, terminated, truncated, info["outcome"], info["reason"]) == (reward, True, False, outcome, "submitted")


def test_the_live_database_tells_what_the_prompt_cannot(world: World):
    env = SqlEnv([renamed()], world=world)
    env.reset(options={"task": "p2"})
    text, reward, terminated, truncated, _ = env.step(call("execute_sql", sql="SELECT * FROM people LIMIT 0"))
    assert text == "0 rows: id, name, town, age, height" and reward == 0.0 and not terminated and not truncated


def test_what_the_agent_does_to_its_database_stays_and_never_reaches_the_grade(world: World):
    env = SqlEnv([debugging()], world=world)
    env.reset(options={"task": "p1"})
    assert env.step(call("execute_sql", sql="DELETE FROM people"))[0] == "ok, 60 rows changed"
    assert env.step(call("execute_sql", sql="SELECT count(*) FROM people"))[0] == "1 row: count(*)\n0"
    assert env.step(submit("SELECT city FROM people WHERE age > 40"))[1] == 1.0
    env.reset(options={"task": "p1"})
    assert env.step(call("execute_sql", sql="SELECT count(*) FROM people"))[0] == "1 row: count(*)\n60"


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [
        ("SELECT city FROM people", "wrong_result"),
        ("DROP TABLE people", "wrong_state"),
        ("DELETE FROM people; SELECT city FROM people", "wrong_state"),
        ("CREATE TEMP VIEW people AS SELECT 'x' AS city, 50 AS age; SELECT city FROM people WHERE age > 40", "wrong_result"),
        ("DROP TABLE notes; SELECT city FROM people WHERE age > 40", "wrong_state"),
        ("UPDATE people SET age = age + 0; SELECT city FROM people WHERE age > 40", "correct"),
        ("SELECT city, age FROM people WHERE age > 40", "wrong_result"),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c", "timeout"),
        ("ATTACH '/etc/passwd' AS p", "denied"),
        ("  -- nothing", "no_answer"),
        ("```sql\nSELECT 1\n```", "sql_error"),
    ],
)
def test_graders_are_not_fooled(world: World, sql: str, outcome: str):
    grader = Grader(world.backend)
    grader.limits = type(grader.limits)(deadline_s=0.3)
    env = SqlEnv([debugging()], world=world, grader=grader)
    env.reset(options={"task": "p1"})
    info = env.step(submit(sql))[-1]
    assert info["outcome"] == outcome
    assert info["reward"] == (1.0 if outcome == "correct" else 0.0)


def test_a_state_changing_gold_is_graded_by_the_state_it_leaves(world: World):
    task = debugging(issue_sql=["UPDATE people SET age = 1"], sol_sql=["UPDATE people SET age = 1 WHERE city = 'Rome'"])
    grader = Grader(world.backend)
    image = world.image(task)
    assert grader.grade(image, task, ["UPDATE people SET age = CASE city WHEN 'Rome' THEN 1 ELSE age END"]).outcome == "correct"
    assert grader.grade(image, task, ["UPDATE people SET age = 1"]).outcome == "wrong_state"
    assert grader.grade(image, task, ["BEGIN; UPDATE people SET age = 1 WHERE city = 'Rome'"]).outcome == "wrong_state"
    assert grader.grade(image, task, ["SELECT 1"]).outcome == "wrong_state"


def test_uncommitted_work_does_not_exist_even_where_it_has_left_the_cache(world: World):
    update = "UPDATE people SET name = hex(zeroblob(3000))"
    task = debugging(issue_sql=["SELECT 1"], sol_sql=[update])
    grader = Grader(world.backend)
    assert grader.grade(world.image(task), task, [update]).outcome == "correct"
    assert grader.grade(world.image(task), task, [f"BEGIN; {update}"]).outcome == "wrong_state"


def test_a_gold_that_proves_nothing_is_invalid_and_never_scored(world: World):
    grader = Grader(world.backend)
    for gold in ("SELECT city FROM people WHERE age > 1000", "DELETE FROM people WHERE age > 1000", "SELECT nobody FROM people"):
        task = debugging(sol_sql=[gold])
        verdict = grader.grade(world.image(task), task, [gold])
        assert verdict.outcome == "invalid_instance" and verdict.reward is None


def test_generation_is_read_only(world: World):
    task = debugging(task="generation", issue_sql=[], category=None)
    env = SqlEnv([task], kind="generation", world=world)
    env.reset(options={"task": "p1"})
    assert env.step(call("execute_sql", sql="DELETE FROM people"))[0].startswith("denied")
    assert env.step(submit("CREATE TABLE x(a)", "SELECT city FROM people WHERE age > 40"))[-1]["outcome"] == "denied"


def test_single_turn_grades_the_first_message_from_its_text_or_its_call(world: World):
    for action, outcome in (
        (submit("SELECT city FROM people WHERE age > 40"), "correct"),
        ({"content": "So:\n```sql\nSELECT 1\n```\nNo:\n```sql\nSELECT city FROM people WHERE age > 40\n```", "name": "", "arguments": ""}, "correct"),
        ({"content": "I do not know", "name": "", "arguments": ""}, "no_answer"),
        (call("execute_sql", sql="SELECT city FROM people WHERE age > 40"), "no_answer"),
    ):
        env = SqlEnv([debugging()], mode="single_turn", world=world)
        assert [tool.name for tool in env.tools] == ["submit_solution"]
        env.reset(options={"task": "p1"})
        _, _, terminated, _, info = env.step(action)
        assert terminated and info["outcome"] == outcome


def test_text_is_no_submission_where_there_are_tools(world: World):
    env = SqlEnv([debugging()], world=world)
    env.reset(options={"task": "p1"})
    info = env.step({"content": "```sql\nSELECT city FROM people WHERE age > 40\n```", "name": "", "arguments": ""})[-1]
    assert info["reason"] == "no_call" and info["reward"] == 0.0


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (call("drop_database"), "there is no tool 'drop_database': call execute_sql or submit_solution"),
        (call("execute_sql"), "execute_sql needs the argument 'sql'"),
        (call("execute_sql", sql=7), "execute_sql: 'sql' must be a string"),
        (call("submit_solution", sql_list="SELECT 1"), "submit_solution: 'sql_list' must be an array of strings"),
        (call("execute_sql", sql="SELECT 1", limit=3), "execute_sql has no argument 'limit'"),
        ({"content": "", "name": "execute_sql", "arguments": "{"}, "the arguments of execute_sql are not JSON"),
        ({"content": "", "name": "execute_sql", "arguments": "[1]"}, "the arguments of execute_sql must be a JSON object"),
    ],
)
def test_a_bad_call_is_answered_and_costs_a_turn(world: World, action: dict[str, str], says: str):
    env = SqlEnv([debugging()], world=world)
    env.reset(options={"task": "p1"})
    text, reward, terminated, truncated, info = env.step(action)
    assert text.startswith(f"error: {says}") and (reward, terminated, truncated, info["turns"]) == (0.0, False, False, 1)


def test_budgets_truncate_with_their_reason(world: World):
    look = call("execute_sql", sql="SELECT 1")
    for budget, reason in ((Budget(max_turns=2), "turn_budget"), (Budget(max_tokens=60), "token_budget"), (Budget(max_seconds=1e-9), "time_budget")):
        env = SqlEnv([debugging()], world=world, budget=budget, prompt="brief")
        env.reset(options={"task": "p1"})
        for _ in range(8):
            _, reward, terminated, truncated, info = env.step(look)
            if truncated:
                break
        assert (reward, terminated, info["reason"], info["reward"]) == (0.0, False, reason, 0.0)


def test_the_last_turn_may_still_submit(world: World):
    env = SqlEnv([debugging()], world=world, budget=Budget(max_turns=1))
    env.reset(options={"task": "p1"})
    assert env.step(submit("SELECT city FROM people WHERE age > 40"))[1] == 1.0


def test_an_infrastructure_failure_is_no_reward(world: World, monkeypatch: pytest.MonkeyPatch):
    env = SqlEnv([debugging()], world=world)
    env.reset(options={"task": "p1"})
    real = Session.execute

    def broken(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        return type(result)(**{**{f: getattr(result, f) for f in result.__dataclass_fields__}, "status": "infra", "error": "disk gone"})

    monkeypatch.setattr(Session, "execute", broken)
    _, reward, terminated, truncated, info = env.step(call("execute_sql", sql="SELECT 1"))
    assert (reward, terminated, truncated, info["reason"], info["reward"]) == (0.0, False, True, "infra", None)


def test_snapshot_and_restore_bring_back_database_conversation_and_budgets(world: World):
    env = SqlEnv([debugging()], world=world, budget=Budget(max_turns=4))
    env.reset(options={"task": "p1"})
    env.step(call("execute_sql", sql="DELETE FROM people WHERE id > 10"))
    kept = env.snapshot()
    env.step(call("execute_sql", sql="DROP TABLE people"))
    env.step(submit("SELECT 1"))
    env.restore(kept)
    assert env.step(call("execute_sql", sql="SELECT count(*) FROM people"))[0] == "1 row: count(*)\n10"
    assert len(env.messages) == 6
    assert env.step(submit("SELECT city FROM people WHERE age > 40"))[1] == 1.0


def test_forks_go_on_independently(world: World):
    env = SqlEnv([debugging()], world=world)
    env.reset(options={"task": "p1"})
    env.step(call("execute_sql", sql="DELETE FROM people WHERE id > 10"))
    left, right = env.fork(2)
    left.step(call("execute_sql", sql="DELETE FROM people"))
    for one, count in ((left, 0), (right, 10), (env, 10)):
        assert one.step(call("execute_sql", sql="SELECT count(*) FROM people"))[0] == f"1 row: count(*)\n{count}"
    left.close()
    right.close()


def test_bad_input_is_one_line(people: Path, tmp_path: Path, world: World):
    with pytest.raises(UserError, match="no database 'nowhere': looked for"):
        world.image(debugging(db_id="nowhere"))
    with pytest.raises(UserError, match="must be a plain name"):
        world.image(debugging(db_id="../people"))
    with pytest.raises(UserError, match="no such folder"):
        World(tmp_path / "missing")
    with pytest.raises(UserError, match="no task 'p9' among the 1"):
        SqlEnv([debugging()], world=world).reset(options={"task": "p9"})
    with pytest.raises(UserError, match="mode must be"):
        SqlEnv([debugging()], mode="two_turns", world=world)  # type: ignore[arg-type]
