"""Rollouts: every trajectory accounts for its tokens, and our own failures poison nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from savepoint.envs.messages import Message, ToolCall
from savepoint.envs.sql.env import Budget, SqlEnv
from savepoint.envs.sql.world import World
from savepoint.rollout.driver import SamplingLimits, audit, rollout
from savepoint.rollout.engines.base import Sampled
from savepoint.rollout.render import CompactChat, train_tokenizer
from savepoint.state import Session, StateError
from savepoint.train.grpo import assign_advantages
from tests_support import debugging, renamed


def look(sql: str) -> Message:
    return Message("assistant", "look", ToolCall("execute_sql", {"sql": sql}))


def submit(sql: str) -> Message:
    return Message("assistant", "done", ToolCall("submit_solution", {"sql_list": [sql]}))


GOLD = submit("SELECT city FROM people WHERE age > 40")


class Script:
    """An engine that says what it is told: `lines[slot]` messages in turn; "length" cuts a message, None ends for want of tokens."""

    version = 3

    def __init__(self, chat: CompactChat, lines: Sequence[Sequence[Message | str | None]]) -> None:
        self.chat, self.lines = chat, lines

    def generate(self, prompts: list[list[int]], group_size: int, respond: Callable[..., list[int] | None], **_: object) -> list[Sampled]:
        out = []
        for slot, lines in enumerate(self.lines):
            prompt = prompts[slot // group_size]
            ids, mask = list(prompt), [False] * len(prompt)
            for line in lines:
                if line is None:
                    ids, mask = ids + [30, 31], mask + [True, True]
                    break
                said = [30, 31] if isinstance(line, str) else self.chat.own(line)
                ids, mask = ids + said, mask + [True] * len(said)
                answer = respond(slot, said, "length" if isinstance(line, str) else "stop")
                if answer is None:
                    break
                ids, mask = ids + answer, mask + [False] * len(answer)
            out.append(Sampled(ids, mask, [-0.5 if m else 0.0 for m in mask], "stop"))
        return out


@pytest.fixture
def chat() -> CompactChat:
    return CompactChat(train_tokenizer(["list city of people where age is over 40"], 300))


def roll(world: World, chat: CompactChat, lines, tasks=(debugging(),), group_size: int | None = None, **env):
    make = lambda: SqlEnv(world=world, prompt="brief", **env)  # noqa: E731
    return rollout(list(tasks), group_size or len(lines), Script(chat, lines), chat, make, SamplingLimits(), seed=5)  # type: ignore[arg-type]


def test_turns_tile_the_tokens_and_carry_calls_observations_and_rewards(world: World, chat: CompactChat):
    (group,) = roll(world, chat, [[look("SELECT * FROM people LIMIT 0"), GOLD]])
    (t,) = group.trajectories
    audit(t)
    assert [turn.role for turn in t.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert t.turns[2].tool_call == {"name": "execute_sql", "arguments": {"sql": "SELECT * FROM people LIMIT 0"}}
    assert t.turns[3].observation == "0 rows: id, name, city, age, height" and [turn.reward for turn in t.turns[2:]] == [0.0, None, 1.0]
    assert (t.status, t.outcome, t.reason, t.reward, t.weight_version, t.assistant_turns) == ("ok", "correct", "submitted", 1.0, 3, 2)
    assert [chat.decode(t.ids[slice(*turn.span)]) for turn in t.turns[:1]] == ["<|system|>tools"]
    for turn in t.turns[2:]:
        said = chat.decode(t.ids[slice(*turn.span)])
        assert said.endswith("<|assistant|>" if turn.role == "tool" else "<|end|>")
    assert t.to_json()["turns"][2]["tool_call"]["name"] == "execute_sql"


def test_every_way_to_end_has_its_status_and_reason(world: World, chat: CompactChat):
    lines = [[GOLD], [submit("SELECT 1")], [Message("assistant", "no idea")], [look("SELECT 1")] * 2, ["length"], [None]]
    (group,) = roll(world, chat, lines, budget=Budget(max_turns=2))
    found = [(t.status, t.reason, t.outcome, t.reward) for t in group.trajectories]
    assert found == [
        ("ok", "submitted", "correct", 1.0),
        ("ok", "submitted", "wrong_result", 0.0),
        ("invalid", "no_call", "no_answer", 0.0),
        ("truncated", "turn_budget", "no_answer", 0.0),
        ("truncated", "message_budget", "no_answer", 0.0),
        ("truncated", "token_budget", "no_answer", 0.0),
    ]


def test_failed_sibling_does_not_move_the_baseline(world: World, chat: CompactChat, monkeypatch: pytest.MonkeyPatch):
    real = Session.execute

    def fails_on_boom(self: Session, sql: str, **kwargs: object):
        if "boom" in sql:
            raise StateError("the worker is gone")
        return real(self, sql, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "execute", fails_on_boom)
    wrong = submit("SELECT 1")
    (healthy,) = roll(world, chat, [[GOLD], [wrong], [wrong]])
    (group,) = roll(world, chat, [[GOLD], [wrong], [wrong], [look("SELECT 'boom'"), GOLD]])
    failed = group.trajectories[3]
    assert (failed.status, failed.reward, failed.outcome, failed.valid) == ("failed", None, "infra", False)
    assign_advantages([healthy])
    assign_advantages([group])
    assert failed.advantage == 0.0
    assert [t.advantage for t in group.trajectories[:3]] == [t.advantage for t in healthy.trajectories]


def test_a_task_whose_environments_cannot_be_opened_fails_alone(world: World, chat: CompactChat, monkeypatch: pytest.MonkeyPatch):
    real = SqlEnv.reset

    def refuses(self: SqlEnv, *, seed: int | None = None, options: dict | None = None):
        if refused(options["task"].instance_id):  # type: ignore[index]
            raise StateError("no room")
        return real(self, seed=seed, options=options)

    monkeypatch.setattr(SqlEnv, "reset", refuses)
    refused = lambda name: name == "p1"  # noqa: E731
    gold = submit("SELECT town FROM people WHERE age > 40")
    bad, good = roll(world, chat, [[gold], [gold]], tasks=[debugging(), renamed()], group_size=2)
    assert [(t.status, t.outcome, t.reason, t.reward, t.ids) for t in bad.trajectories] == [("failed", "infra", "no room", None, [])] * 2
    assert [t.reward for t in good.trajectories] == [1.0, 1.0]
    assign_advantages([bad, good])
    assert {t.advantage for t in bad.trajectories} == {0.0}
    refused = lambda name: True  # noqa: E731
    with pytest.raises(StateError, match="no environment could be opened for any of 2 tasks: no room"):
        roll(world, chat, [[gold], [gold]], tasks=[debugging(), renamed()], group_size=1)


def test_groups_come_back_in_the_order_of_their_tasks(world: World, chat: CompactChat):
    gold = submit("SELECT town FROM people WHERE age > 40")
    groups = roll(world, chat, [[GOLD], [GOLD], [gold], [GOLD]], tasks=[debugging(), renamed()], group_size=2)
    assert [(g.task, [t.reward for t in g.trajectories]) for g in groups] == [("p1", [1.0, 1.0]), ("p2", [1.0, 0.0])]


def test_every_lease_is_given_back(world: World, chat: CompactChat):
    class Dies(Script):
        def generate(self, *args: object, **kwargs: object) -> list[Sampled]:
            raise KeyboardInterrupt

    opened: list[SqlEnv] = []

    def make() -> SqlEnv:
        opened.append(SqlEnv(world=world, prompt="brief"))
        return opened[-1]

    with pytest.raises(KeyboardInterrupt):
        rollout([debugging()], 4, Dies(chat, []), chat, make, SamplingLimits(), seed=0)  # type: ignore[arg-type]
    assert len(opened) == 4 and all(env._session is None for env in opened)


def test_the_audit_finds_a_turn_that_does_not_fit(world: World, chat: CompactChat):
    (group,) = roll(world, chat, [[GOLD]])
    (t,) = group.trajectories
    start, end = t.turns[-1].span
    t.turns[-1].span = (start + 1, end)
    with pytest.raises(ValueError, match="a turn spans"):
        audit(t)
    t.turns[-1].span = (start, end)
    t.mask[start] = False
    with pytest.raises(ValueError, match="mask"):
        audit(t)
