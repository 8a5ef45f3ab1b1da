"""A chat endpoint as the policy: the same episodes as anywhere else, and whatever the endpoint does wrong has its defined end."""

from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoint_server import Answer, Endpoint, Handler, failure, said
from savepoint.config import build
from savepoint.envs.messages import Message, ToolCall
from savepoint.envs.sql.env import Budget, SqlEnv
from savepoint.envs.sql.world import World
from savepoint.errors import UserError
from savepoint.rollout.converse import converse, sample_seed
from savepoint.rollout.driver import SamplingLimits
from savepoint.rollout.engines.openai import OFFICIAL, EndpointRefused, EndpointSettings, OpenAIEngine, _retry_after, price
from savepoint.rollout.engines.replies import Reply, UnreadableReply, endpoint_messages, read_reply
from savepoint.rollout.trajectory import Trajectory
from savepoint.state import Session, StateError
from tests_support import debugging

KEY = "sk-secret-123"
LOOK = said(None, ("execute_sql", {"sql": "SELECT * FROM people LIMIT 0"}))
RIGHT = ("submit_solution", {"sql_list": ["SELECT city FROM people WHERE age > 40"]})
GOLD = said("so", RIGHT)
WRONG = said("so", ("submit_solution", {"sql_list": ["SELECT 1"]}))


@pytest.fixture
def talk(world: World):
    """Run episodes against a script; (trajectories by sample, endpoint, engine)."""

    def run(script: Callable[[dict[str, Any], int], Answer], samples: int = 1, *, env: Any = None, limits=SamplingLimits(500, 100_000), **settings: Any):
        done: list[Trajectory] = []
        with Endpoint(script) as endpoint:
            chosen = EndpointSettings(**{"base_url": endpoint.url, "first_wait_seconds": 0.001, "retries": 2, "request_seconds": 20, **settings})
            engine = converse(
                [(debugging(), sample) for sample in range(samples)], lambda: OpenAIEngine("m", chosen, environment={"OPENAI_API_KEY": KEY}),
                lambda: SqlEnv(world=world, **(env or {})), limits, seed=3, each=done.append,
            )  # fmt: skip
        return sorted(done, key=lambda t: t.member), endpoint, engine

    return run


def ends(*answers: Answer) -> Callable[[dict[str, Any], int], Answer]:
    """Answers in turn, then the last again and again."""
    return lambda body, number: answers[min(number, len(answers) - 1)]


def test_an_endpoint_plays_the_same_episode_as_any_engine(talk, world: World):
    (t,), endpoint, engine = talk(ends(LOOK, GOLD))
    assert [turn.role for turn in t.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert (t.status, t.outcome, t.reason, t.reward) == ("ok", "correct", "submitted", 1.0)
    assert t.turns[3].observation == "0 rows: id, name, city, age, height" and t.turns[2].tool_call["name"] == "execute_sql"
    assert engine.counts == {"requests": 2, "retries": 0, "prompt": 200, "completion": 20, "cached": 0, "unmetered": 0}
    assert (t.cost["prompt_tokens"], t.cost["completion_tokens"], t.cost["requests"]) == (200, 20, 2)
    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"


def test_the_endpoint_is_sent_the_environments_own_messages_and_tools(talk, world: World):
    (_,), endpoint, _ = talk(ends(LOOK, GOLD))
    env = SqlEnv(world=world)
    env.reset(options={"task": debugging()})
    env.step({"content": "", "name": "execute_sql", "arguments": '{"sql": "SELECT * FROM people LIMIT 0"}'})
    first, second = endpoint.requests
    assert [(m["role"], m["content"]) for m in second["messages"]] == [(m.role, m.content) for m in env.messages]
    assert first["messages"] == second["messages"][:2] and first["tools"] == [tool.schema() for tool in env.tools]
    call = second["messages"][2]["tool_calls"][0]
    assert call["id"] == second["messages"][3]["tool_call_id"] and len(call["id"]) == 9 and call["id"].isalnum()
    assert (first["model"], first["max_tokens"], first["temperature"], first["seed"]) == ("m", 500, 1.0, sample_seed(3, "p1", 0))


def test_a_single_turn_is_graded_from_text_with_one_tool_on_offer(talk):
    (t,), endpoint, _ = talk(ends(said("```sql\nSELECT city FROM people WHERE age > 40\n```")), env={"mode": "single_turn"})
    assert t.outcome == "correct" and [tool["function"]["name"] for tool in endpoint.requests[0]["tools"]] == ["submit_solution"]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (said("cut", ("submit_solution", '{"sql_list": ["SEL'), finish="length"), ("truncated", "message_budget", "no_answer", 0.0)),
        (said("", RIGHT, finish="length"), ("truncated", "message_budget", "no_answer", 0.0)),
        (said("", finish="content_filter"), ("truncated", "content_filter", "no_answer", 0.0)),
        (failure(400, "filtered", "content_filter"), ("truncated", "content_filter", "no_answer", 0.0)),
        (failure(400, "This model's maximum context length is 10 tokens"), ("truncated", "token_budget", "no_answer", 0.0)),
        (failure(400, "too long", "context_length_exceeded"), ("truncated", "token_budget", "no_answer", 0.0)),
        (said("I cannot help with that."), ("invalid", "no_call", "no_answer", 0.0)),
        (failure(400, "bad schema"), ("failed", "endpoint: status 400: bad schema", "infra", None)),
        (failure(422, "no"), ("failed", "endpoint: status 422: no", "infra", None)),
        (failure(500, "oops"), ("failed", "endpoint: status 500: oops (3 attempts)", "infra", None)),
        (failure(429, "slow down"), ("failed", "endpoint: status 429: slow down (3 attempts)", "infra", None)),
        ((200, {"Content-Type": "text/html"}, b"<html>"), ("failed", "endpoint: the answer is not JSON (3 attempts)", "infra", None)),
        ((200, {"Content-Type": "application/json"}, b'{"choices": ['), ("failed", "endpoint: the answer is not JSON (3 attempts)", "infra", None)),
        ((200, {}, b"[" * 100_000), ("failed", "endpoint: the answer is not JSON (3 attempts)", "infra", None)),
        ({"choices": []}, ("failed", "endpoint: the answer holds no message (3 attempts)", "infra", None)),
        ({"error": {"message": "no GPU"}}, ("failed", "endpoint: the answer holds no message, but an error: no GPU (3 attempts)", "infra", None)),
    ],
)  # fmt: skip
def test_every_way_an_endpoint_ends_an_episode_has_its_status_and_reason(talk, answer: Answer, end: tuple[Any, ...]):
    (t,), _, _ = talk(ends(answer))
    assert (t.status, t.reason, t.outcome, t.reward) == end


def test_nonsense_arguments_and_unknown_tools_cost_a_turn_and_are_told_to_the_agent(talk):
    (t,), endpoint, _ = talk(ends(said(None, ("execute_sql", "{sql: 1")), said(None, ("drop everything!", {})), said(None, ("execute_sql", "[" * 5000)), GOLD))
    told = [turn.observation for turn in t.turns if turn.role == "tool"]
    assert told[0].startswith("error: the arguments of execute_sql are not JSON") and told[2].startswith("error: the arguments of execute_sql are not JSON")
    assert told[1] == "error: there is no tool 'drop everything!': call execute_sql or submit_solution"
    assert t.outcome == "correct" and t.assistant_turns == 4 and t.turns[2].tool_call["arguments"] == {"unreadable": "{sql: 1"}
    history = endpoint.requests[-1]["messages"]
    assert history[4]["tool_calls"][0]["function"]["name"] == "drop_everything_"  # endpoints refuse other letters in the history
    assert all(json.loads(m["tool_calls"][0]["function"]["arguments"]) == {} for m in history if "tool_calls" in m)


def test_only_the_first_of_several_calls_is_made_and_the_others_are_counted(talk, world: World):
    two = said(None, ("execute_sql", {"sql": "SELECT 1 AS one"}), ("submit_solution", {"sql_list": ["SELECT 1"]}))
    (t,), endpoint, _ = talk(ends(two, GOLD))
    assert t.outcome == "correct" and t.cost["more_calls"] == 1 and len(endpoint.requests[1]["messages"][2]["tool_calls"]) == 1


def test_budgets_of_turns_and_tokens_end_an_episode(talk):
    (t,), endpoint, _ = talk(ends(LOOK), env={"budget": Budget(max_turns=3)})
    assert (t.status, t.reason) == ("truncated", "turn_budget") and len(endpoint.requests) == 3
    (t,), endpoint, _ = talk(ends(LOOK), limits=SamplingLimits(50, 110))
    assert (t.status, t.reason, t.outcome) == ("truncated", "token_budget", "no_answer") and len(endpoint.requests) == 1


def test_passing_faults_are_retried_and_then_forgotten(talk):
    (t,), endpoint, engine = talk(ends(failure(429), failure(503), GOLD))
    assert t.outcome == "correct" and (engine.counts["requests"], engine.counts["retries"]) == (3, 2)
    assert endpoint.requests[0] == endpoint.requests[2]


def test_a_fault_of_one_episode_is_no_other_ones(talk):
    bad = sample_seed(3, "p1", 2)
    done, _, _ = talk(lambda body, number: failure(500) if body["seed"] == bad else GOLD, samples=5)
    assert [(t.member, t.outcome, t.valid) for t in done] == [(i, "infra" if i == 2 else "correct", i != 2) for i in range(5)]


def test_retry_after_is_never_cut_short(talk):
    started = time.monotonic()
    (t,), _, _ = talk(ends(failure(429, Retry_After="0.4"), GOLD))
    assert t.outcome == "correct" and time.monotonic() - started >= 0.4
    (t,), endpoint, _ = talk(ends(failure(429, Retry_After="900"), GOLD))
    assert t.outcome == "infra" and "it asks to wait 900 s, more than 60" in t.reason and len(endpoint.requests) == 1


def test_retry_after_is_read_in_all_its_forms():
    assert _retry_after({"retry-after": "7"}) == 7 and _retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert 55 < _retry_after({"retry-after": email.utils.formatdate(time.time() + 60, usegmt=True)}) <= 60
    for nonsense in ("", "soon", "-3", "nan", "inf", email.utils.formatdate(0, usegmt=True)):
        assert _retry_after({"retry-after": nonsense}) == 0.0


def test_waits_double_with_jitter_up_to_the_longest():
    async def waits() -> list[list[float]]:
        engine = OpenAIEngine("m", EndpointSettings(base_url="http://localhost:1/v1", first_wait_seconds=1, longest_wait_seconds=8), environment={})
        failed = type("F", (Exception,), {"retry_after": 0.0})()
        return [[engine._wait(attempt, failed) for _ in range(50)] for attempt in (0, 1, 2, 3, 9)]

    for drawn, full in zip(asyncio.run(waits()), (1, 2, 4, 8, 8), strict=True):
        assert all(full / 2 <= wait <= full for wait in drawn) and len(set(drawn)) > 10


def drip(handler: Handler) -> None:
    """An answer that never ends, a byte at a time: no deadline between bytes would ever notice."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def test_a_slow_endpoint_meets_the_deadline_of_the_whole_request(talk):
    started = time.monotonic()
    (t,), _, _ = talk(ends(drip), request_seconds=0.2, retries=1)
    assert t.outcome == "infra" and t.reason == "endpoint: no answer within 0.2 s (2 attempts)" and time.monotonic() - started < 3


def test_an_endpoint_that_hangs_up_or_is_down_is_infra(talk):
    (t,), _, _ = talk(ends(lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)))
    assert t.outcome == "infra" and "cannot be reached" in t.reason
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (t,), _, _ = talk(ends(GOLD), base_url=f"http://127.0.0.1:{free.getsockname()[1]}/v1")
    assert t.outcome == "infra" and "cannot be reached" in t.reason and "onnect" in t.reason


def test_an_endpoint_that_fails_every_episode_ends_the_evaluation(talk):
    with pytest.raises(EndpointRefused, match=r"3 episodes in a row failed, the last because: status 500: no"):
        talk(ends(failure(500)), samples=50, failures_in_a_row=3, concurrency=1, retries=0)
    # Good episodes between them are a sign of life.
    done, _, _ = talk(lambda body, number: GOLD if number % 3 == 2 else failure(500), samples=12, failures_in_a_row=3, concurrency=1, retries=0)
    assert [t.outcome for t in done].count("correct") == 4
    # So is an answer in an episode that fails later.
    done, _, _ = talk(lambda body, number: LOOK if len(body["messages"]) == 2 else failure(500), samples=6, failures_in_a_row=3, concurrency=1, retries=0)
    assert [t.outcome for t in done] == ["infra"] * 6


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failure(401, f"Incorrect API key provided: {KEY}"), "refuses the key in OPENAI_API_KEY (status 401)"),
        (failure(403, KEY), "refuses the key in OPENAI_API_KEY (status 403)"),
        (failure(402), "has no credit left for the key in OPENAI_API_KEY"),
        (failure(429, "quota", "insufficient_quota"), "has no credit left for the key in OPENAI_API_KEY"),
        (failure(404, "model not found"), "knows no model 'm', or is no chat endpoint (status 404: model not found)"),
    ],
)
def test_what_every_request_would_share_stops_at_once_in_one_line(talk, answer: Answer, words: str):
    with pytest.raises(EndpointRefused) as caught:
        talk(ends(answer), samples=20, concurrency=1)
    text = str(caught.value)
    assert words in text and KEY not in text and "\n" not in text and caught.value.__cause__ is None


def test_the_key_is_in_no_trace_error_or_log(talk, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    done, _, engine = talk(ends(failure(400, f"your header was Bearer {KEY}"), failure(500, KEY), GOLD), samples=3, concurrency=1)
    assert {t.outcome for t in done} == {"infra", "correct"} and "[key]" in str([t.reason for t in done])
    assert KEY not in json.dumps([t.to_json() for t in done]) and KEY not in caplog.text and KEY not in repr(engine) + repr(engine.settings)


def test_no_more_requests_at_a_time_than_allowed(talk):
    def slowly(body: dict[str, Any], number: int) -> Answer:
        time.sleep(0.03)
        return GOLD

    _, endpoint, _ = talk(slowly, samples=12, concurrency=3)
    assert endpoint.most_open == 3 and len(endpoint.requests) == 12


def test_an_engine_itself_keeps_to_the_limit():
    def slowly(body: dict[str, Any], number: int) -> Answer:
        time.sleep(0.03)
        return GOLD

    async def ask(url: str) -> None:
        engine = OpenAIEngine("m", EndpointSettings(base_url=url, concurrency=2), environment={})
        await asyncio.gather(*(engine.reply([Message("user", "hi")], (), max_tokens=5, seed=0) for _ in range(6)))
        await engine.close()

    with Endpoint(slowly) as endpoint:
        asyncio.run(ask(endpoint.url))
    assert endpoint.most_open == 2


def test_a_failure_of_the_state_layer_is_infra_too(talk, monkeypatch: pytest.MonkeyPatch):
    def broken(self: Session, sql: str, **kwargs: object):
        raise StateError("the worker is gone")

    monkeypatch.setattr(Session, "execute", broken)
    (t,), _, _ = talk(ends(LOOK, GOLD), env={"prompt": "brief"})
    assert (t.status, t.outcome, t.reason, t.reward) == ("failed", "infra", "the worker is gone", None)


def test_all_sessions_are_given_back(talk, world: World):
    talk(ends(failure(500), LOOK, GOLD, WRONG), samples=6, retries=0)
    with pytest.raises(EndpointRefused):
        talk(ends(failure(401)), samples=6)
    assert not [session for session in world.backend._sessions if not session.closed]


def test_tokens_cost_what_the_settings_say():
    settings = EndpointSettings(price_in=2.0, price_out=10.0, price_cached=0.5)
    assert price(settings, 1_000_000, 100_000, 400_000) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 0.1 * 10)
    assert price(EndpointSettings(price_in=2.0), 500_000, 7, 100_000) == pytest.approx(1.0)


def test_answers_without_usage_are_counted_as_such(talk):
    (t,), _, engine = talk(ends(said("x", ("submit_solution", {"sql_list": ["SELECT 1"]}), usage=None)))
    assert engine.counts["unmetered"] == 1 and t.outcome == "wrong_result"


def test_a_key_is_needed_where_there_is_no_endpoint_of_ones_own():
    async def make(environment: dict[str, str], **settings: Any) -> OpenAIEngine:
        return OpenAIEngine("m", EndpointSettings(**settings), environment=environment)

    with pytest.raises(UserError, match=f"no key for {OFFICIAL}: set OPENAI_API_KEY in the environment"):
        asyncio.run(make({}))
    with pytest.raises(UserError, match="set LAB_KEY in the environment"):
        asyncio.run(make({}, base_url="http://localhost:1/v1", key_variable="LAB_KEY"))
    with pytest.raises(UserError, match="OPENAI_API_KEY: holds characters that no key has") as caught:
        asyncio.run(make({"OPENAI_API_KEY": "sk-a\nb"}))
    assert "sk-a" not in str(caught.value)
    assert asyncio.run(make({"OPENAI_BASE_URL": "http://localhost:1/v1"})).base_url == "http://localhost:1/v1"


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/v1", "http://user:pass@host/v1", "https://host/v1?key=1"])
def test_addresses_that_hold_credentials_or_are_none_are_refused(address: str):
    with pytest.raises(UserError, match="base_url: must"):
        build(EndpointSettings, {"base_url": address}, source="--base-url")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(["choices", "message", "content", "tool_calls", "function", "name", "arguments", "finish_reason", "usage", "error", "prompt_tokens",
                     "prompt_tokens_details", "function_call", "refusal", "text"]), inner, max_size=4), max_leaves=25)  # fmt: skip


@given(JSON, JSON)
def test_no_answer_whatever_is_more_than_unreadable(body: Any, message: Any):
    for answer in (body, {"choices": [{"message": message}], "usage": body}, {"choices": [{"message": {"tool_calls": message, "content": body}}]}):
        try:
            reply = read_reply(answer)
        except UnreadableReply:
            continue
        assert isinstance(reply, Reply) and isinstance(reply.message, Message) and all(isinstance(text, str) for text in reply.action.values())


def test_other_published_forms_of_a_message_are_read():
    parts = read_reply({"choices": [{"message": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}}]})
    legacy = read_reply({"choices": [{"message": {"content": None, "function_call": {"name": "f", "arguments": {"a": 1}}}}]})
    refused = read_reply({"choices": [{"message": {"content": None, "refusal": "I won't."}}]})
    assert parts.content == "ab" and legacy.message.tool_call == ToolCall("f", {"a": 1}) and refused.content == "I won't."


def test_text_that_is_no_unicode_can_be_sent():
    assert json.dumps(endpoint_messages([Message("user", "a\ud800b")]), ensure_ascii=False).encode() is not None
