"""`savepoint eval`: the same episodes as in training, resumable, with every fault told apart from a wrong answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from endpoint_server import Answer, Endpoint, failure, said
from savepoint.config import build
from savepoint.envs.sql.settings import LARGE, EnvironmentSettings
from savepoint.envs.sql.tasks import write_tasks
from savepoint.errors import Interrupted, UserError
from savepoint.evals.command import EvalOptions, evaluate_command
from savepoint.progress import Progress
from savepoint.rollout.render import CompactChat, TemplateChat, train_tokenizer
from savepoint.train.bundle import save_bundle
from savepoint.train.policy import Policy, TinyConfig
from tests_support import chatml_tokenizer, debugging

GOLD = said("so", ("submit_solution", {"sql_list": ["SELECT city FROM people WHERE age > 40"]}))
WRONG = said("so", ("submit_solution", {"sql_list": ["SELECT 1"]}))
LOOK = said(None, ("execute_sql", {"sql": "SELECT * FROM people LIMIT 0"}))
PATIENCE = ("endpoint.retries=0", "endpoint.first_wait_seconds=0")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [debugging(instance_id=f"t{i}", query=f"task {i}") for i in range(4)])
    return path


@pytest.fixture
def run(tasks: Path, people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def evaluate(model: str | Path, options: EvalOptions, file: Path = tasks) -> dict[str, Any]:
        with Progress("test", stages=[], quiet=True) as progress:
            return evaluate_command(str(model), file, [people], options, store=tmp_path / "store", progress=progress)

    return evaluate


def at(endpoint: Endpoint, **options: Any) -> EvalOptions:
    return EvalOptions(**{"engine": "openai", "base_url": endpoint.url, "settings": PATIENCE, **options})


def by_task(**answers: Answer):
    """Answers by the task whose text is in the prompt; GOLD for others."""
    return lambda body, number: next((answer for task, answer in answers.items() if f"task {task[1:]}\n" in body["messages"][1]["content"]), GOLD)


def tiny(folder: Path, *, template: bool = False) -> Path:
    """A policy of random weights, with a chat of its own or that of a template."""
    if template:
        tokenizer = chatml_tokenizer()
        chat: Any = TemplateChat(tokenizer)
        size, end = len(tokenizer), tokenizer.eos_token_id
    else:
        chat = CompactChat(train_tokenizer(["list city"], 300))
        size, end = chat.tokenizer.get_vocab_size(), chat.end_id
    config = TinyConfig(architecture="llama", hidden_size=16, layers=1, heads=2, kv_heads=2, head_dim=8, max_positions=1024)
    policy = Policy.tiny(config, vocab_size=size, pad_id=chat.pad_id, end_id=end, seed=1)
    save_bundle(folder, policy, chat, EnvironmentSettings(max_tokens=160, max_message_tokens=6).model_dump())
    return folder


def test_success_outcomes_and_usage_are_counted(run):
    with Endpoint(by_task(t1=WRONG, t2=said("no idea"))) as endpoint:
        result = run("m", at(endpoint, samples=2, settings=(*PATIENCE, "endpoint.price_in=10", "endpoint.price_out=100")))
    assert (result["success"], result["n"]) == (0.5, 8) and result["low"] < 0.5 < result["high"]
    assert result["outcomes"] == {"correct": 4, "wrong_result": 2, "no_answer": 2} and result["reasons"] == {"submitted": 6, "no_call": 2}
    usage = result["usage"]
    assert (usage["requests"], usage["prompt_tokens"], usage["completion_tokens"]) == (8, 800, 80)
    assert usage["price"] == pytest.approx((800 * 10 + 80 * 100) / 1e6)
    json.dumps(result, allow_nan=False)


def test_any_of_k_and_all_of_k_come_with_intervals(run):
    with Endpoint(lambda body, number: GOLD if body["seed"] % 2 else WRONG) as endpoint:
        result = run("m", at(endpoint, samples=3))
    assert set(result["pass_at"]) == set(result["pass_hat"]) == {"1", "2", "3"}
    assert result["pass_at"]["1"]["success"] == result["pass_hat"]["1"]["success"] == pytest.approx(result["success"])
    at_k, hat = ([result[name][k]["success"] for k in "123"] for name in ("pass_at", "pass_hat"))
    assert at_k == sorted(at_k) and hat == sorted(hat, reverse=True) and at_k[-1] > hat[-1]
    assert all(rate["low"] <= rate["success"] <= rate["high"] and rate["n"] == 4 for rate in result["pass_at"].values())


def test_a_failed_request_is_in_no_rate_and_the_rest_goes_on(run):
    with Endpoint(by_task(t1=failure(500, "no GPU"), t2=WRONG)) as endpoint:
        result = run("m", at(endpoint))
    assert result["outcomes"] == {"correct": 2, "wrong_result": 1, "infra": 1} and result["n"] == 3
    assert result["faults"] == {"t1#0": "endpoint: status 500: no GPU (1 attempts)"}


def test_a_task_whose_set_up_fails_is_invalid_and_the_rest_goes_on(run, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    write_tasks(path, [debugging(), debugging(instance_id="p9", preprocess_sql=["INSERT INTO nowhere VALUES (1)"])])
    with Endpoint(lambda body, number: GOLD) as endpoint:
        result = run("m", at(endpoint, samples=2), path)
    assert result["outcomes"] == {"correct": 2, "invalid_instance": 2} and result["n"] == 2 and "nowhere" in result["faults"]["p9#1"]


def test_the_sql_can_run_in_a_worker_process(run, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    write_tasks(path, [debugging(), debugging(instance_id="p9", preprocess_sql=["INSERT INTO nowhere VALUES (1)"])])
    with Endpoint(lambda body, number: LOOK if len(body["messages"]) == 2 else GOLD) as endpoint:
        result = run("m", at(endpoint, samples=2, settings=(*PATIENCE, "state.workers=1")), path)
    assert result["outcomes"] == {"correct": 2, "invalid_instance": 2} and result["settings"]["state"]["workers"] == 1


def test_results_and_traces_are_kept_by_task_and_sample(run, tmp_path: Path):
    out = tmp_path / "out"
    with Endpoint(lambda body, number: GOLD) as endpoint:
        result = run("m", at(endpoint, samples=2, out=out))
    results, traces = ([json.loads(line) for line in (out / name).read_text().splitlines()] for name in ("results.jsonl", "traces.jsonl"))
    keys = {(f"t{i}", sample) for i in range(4) for sample in range(2)}
    assert {(r["task"], r["sample"]) for r in results} == keys == {(t["task"], t["member"]) for t in traces}
    assert traces[0]["turns"][0]["role"] == "system" and json.loads((out / "summary.json").read_text())["success"] == result["success"]


def test_a_stopped_evaluation_goes_on_where_it_stopped(run, tmp_path: Path):
    out = tmp_path / "out"
    with Endpoint(lambda body, number: GOLD if number < 3 else failure(401)) as endpoint:
        options = at(endpoint, samples=2, out=out, settings=(*PATIENCE, "endpoint.concurrency=1"))
        with pytest.raises(UserError, match="refuses the key"):
            run("m", options)
        with (out / "results.jsonl").open("a") as file:
            file.write('{"task": "t3", "sam')  # as a killed process leaves it
        endpoint.script = lambda body, number: GOLD
        result = run("m", replace(options, resume=True))
    assert len(endpoint.requests) == 4 + 5 and result["n"] == 8 and result["outcomes"] == {"correct": 8}
    assert len({json.dumps(r["messages"]) + str(r["seed"]) for r in endpoint.requests}) == 8
    assert result["usage"]["requests"] == 8  # those of before the stop are counted too
    assert len((out / "traces.jsonl").read_text().splitlines()) == 8


def test_a_resumed_evaluation_tries_again_what_failed_for_our_reasons(run, tmp_path: Path):
    with Endpoint(by_task(t1=failure(500))) as endpoint:
        options = at(endpoint, out=tmp_path / "out")
        assert run("m", options)["outcomes"] == {"correct": 3, "infra": 1}
        endpoint.script = lambda body, number: WRONG
        result = run("m", replace(options, resume=True))
    assert result["outcomes"] == {"correct": 3, "wrong_result": 1} and len(endpoint.requests) == 5
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert sorted(line["task"] for line in lines) == ["t0", "t1", "t2", "t3"]
    assert len((tmp_path / "out" / "traces.jsonl").read_text().splitlines()) == 4


def test_a_person_who_stops_an_evaluation_is_told_how_to_go_on(run, tmp_path: Path):
    out = tmp_path / "out"
    with Endpoint(lambda body, number: GOLD) as endpoint:
        options = at(endpoint, out=out, settings=(*PATIENCE, "endpoint.concurrency=1"))

        def stop(body: dict[str, Any], number: int) -> Answer:
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return GOLD

        endpoint.script = stop
        with pytest.raises(Interrupted, match=rf"stopped; 2 of 4 episodes are in {out}: go on by the same command with --resume"):
            run("m", options)
        assert run("m", replace(options, resume=True))["outcomes"] == {"correct": 4}


def test_another_evaluation_is_not_gone_on_with(run, tmp_path: Path):
    out = tmp_path / "out"
    with Endpoint(lambda body, number: GOLD) as endpoint:
        options = at(endpoint, out=out)
        run("m", options)
        with pytest.raises(UserError, match="holds an evaluation already: go on with it by --resume"):
            run("m", options)
        with pytest.raises(UserError, match=r"was made with temperature = 1.0, not 0.5: choose another --out"):
            run("m", replace(options, temperature=0.5, resume=True))
        with pytest.raises(UserError, match="was made with model"):
            run("other", replace(options, resume=True))
        (out / "results.jsonl").write_text('{"task": "t0"}\n')
        with pytest.raises(UserError, match=r"results.jsonl:1: is no result"):
            run("m", replace(options, resume=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EvalOptions(base_url="http://localhost/v1"), "--base-url goes with --engine openai"),
        (EvalOptions(traces=Path("t.jsonl")), "--traces: the traces lie in --out"),
        (EvalOptions(engine="openai"), "no key for https://api.openai.com/v1: set OPENAI_API_KEY in the environment"),
        (EvalOptions(engine="openai", base_url="localhost:1"), "endpoint.base_url: must be an address"),
        (EvalOptions(engine="openai", settings=("endpoint.retry=1",)), "unknown key 'endpoint.retry'"),
        (EvalOptions(temperature=float("nan")), "--temperature must be 0 or more"),
        (EvalOptions(), "m: no such folder"),
        (EvalOptions(engine="vllm"), "m: no such folder"),
    ],
)
def test_options_that_cannot_be_used_are_told_in_one_line(run, tmp_path: Path, options: EvalOptions, words: str):
    with pytest.raises(UserError) as caught:
        run("m", replace(options, out=tmp_path / "out"))
    assert words in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_nothing_is_there_to_go_on_with_without_a_folder(run):
    with pytest.raises(UserError, match="--resume goes with --out DIR"):
        run("m", EvalOptions(engine="openai", resume=True))


def test_traces_alone_are_written_where_they_are_asked_for(run, tmp_path: Path):
    with Endpoint(lambda body, number: GOLD) as endpoint:
        run("m", at(endpoint, traces=tmp_path / "t.jsonl"))
        assert sorted(json.loads(line)["task"] for line in (tmp_path / "t.jsonl").read_text().splitlines()) == ["t0", "t1", "t2", "t3"]
        with pytest.raises(UserError, match="nowhere/t.jsonl: cannot be written"):
            run("m", at(endpoint, traces=tmp_path / "nowhere" / "t.jsonl"))


def test_a_tokenizer_without_a_chat_template_is_named(run, tmp_path: Path):
    folder = tiny(tmp_path / "model", template=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "savepoint_chat.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no chat template"):
        run(folder, EvalOptions())


def test_the_embedded_engine_resumes_to_the_very_same_results(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy = tiny(tmp_path / "policy")
    monkeypatch.setattr("savepoint.evals.command.BATCH", 2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(policy, EvalOptions(samples=2, out=whole))
    run(policy, EvalOptions(samples=2, out=parts))
    for name in ("results.jsonl", "traces.jsonl"):
        lines = (parts / name).read_text().splitlines()
        (parts / name).write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])  # killed in the middle of the second batch
    run(policy, EvalOptions(samples=2, out=parts, resume=True))

    def ids(folder: Path) -> dict[tuple[str, int], list[int]]:
        return {(t["task"], t["member"]): t["ids"] for t in map(json.loads, (folder / "traces.jsonl").read_text().splitlines())}

    assert len((parts / "results.jsonl").read_text().splitlines()) == len((parts / "traces.jsonl").read_text().splitlines()) == 8
    assert ids(whole) == ids(parts) and len(ids(whole)) == 8 and len({str(i) for i in ids(whole).values()}) > 1


def test_a_prompt_that_leaves_no_room_to_answer_is_a_spent_budget(run, tmp_path: Path):
    result = run(tiny(tmp_path / "policy"), EvalOptions(max_tokens=16))
    assert result["reasons"] == {"token_budget": 4} and result["outcomes"] == {"no_answer": 4} and result["success"] == 0.0


def test_no_more_tokens_are_asked_for_than_the_model_reads(run, tmp_path: Path):
    policy = tiny(tmp_path / "policy", template=True)
    with pytest.raises(UserError, match="max_tokens = 4000: the model reads no more than 1024 tokens"):
        run(policy, EvalOptions(max_tokens=4000))
    (policy / "savepoint_chat.json").unlink()  # a model that was not trained here: a default that is too long is shortened
    result = run(policy, EvalOptions(settings=("environment.max_message_tokens=4", "environment.schema_tokens=64")))
    assert result["settings"]["environment"]["max_tokens"] == 1024 and result["settings"]["environment"]["prompt"] == "full"


@pytest.mark.parametrize("style", ["brief", "full"])
def test_imitation_reinforcement_and_evaluation_show_the_same_bytes(style: str, run, tasks: Path, people: Path, tmp_path: Path):
    """The opening and an observation, as the four users of an environment show them."""
    import random

    from savepoint.curriculum.demonstrations import DemonstratorSettings, demonstrate
    from savepoint.envs.sql.grade import Grader
    from savepoint.envs.sql.tasks import read_tasks
    from savepoint.envs.sql.world import World
    from savepoint.rollout.driver import SamplingLimits, rollout
    from savepoint.rollout.engines.embedded import EmbeddedEngine
    from savepoint.state import open_backend
    from savepoint.train.bundle import load_bundle

    bundle = load_bundle(tiny(tmp_path / "policy"))
    settings = build(EnvironmentSettings, {**LARGE, "prompt": style, "sample_rows": 2}, source="test")
    task = read_tasks(tasks)[0]
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        world = World(people, backend=backend)
        grader = Grader(backend)
        imitated, _ = demonstrate(task, settings.environment("agentic", world, grader), bundle.chat, DemonstratorSettings(careless=0), random.Random(0))
        engine = EmbeddedEngine(bundle.policy.model, slots=2, max_tokens=3000, pad_id=bundle.chat.pad_id)
        make = lambda: settings.environment("agentic", world, grader)  # noqa: E731
        (group,) = rollout([task], 1, engine, bundle.chat, make, SamplingLimits(4, 3000), seed=0)
    call = imitated.turns[2].tool_call
    assert call is not None
    with Endpoint(lambda body, number: said(None, (call["name"], call["arguments"])) if len(body["messages"]) == 2 else GOLD) as endpoint:
        run("m", at(endpoint, settings=(*PATIENCE, f"environment.prompt={style}", "environment.sample_rows=2"), samples=1))
    sent = next(r["messages"] for r in endpoint.requests if "task 0\n" in r["messages"][1]["content"] and len(r["messages"]) > 2)
    opening = [turn.text for turn in imitated.turns[:2]]
    assert opening == [turn.text for turn in group.trajectories[0].turns[:2]] == [m["content"] for m in sent[:2]]
    assert imitated.turns[3].observation == sent[3]["content"]
    assert ("CREATE TABLE people" in opening[1]) == ("-- first 2 rows: id, name" in opening[1]) == (style == "full")
    prompt = imitated.ids[: imitated.turns[1].span[1]]
    assert prompt == group.trajectories[0].ids[: len(prompt)]


def test_a_killed_evaluation_keeps_what_was_done(tasks: Path, people: Path, tmp_path: Path):
    out = tmp_path / "out"
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}

    def slowly(body: dict[str, Any], number: int) -> Answer:
        time.sleep(0 if number < 2 else 60 if endpoint.script is slowly else 0)
        return GOLD

    with Endpoint(slowly) as endpoint:
        command = [sys.executable, "-m", "savepoint", "eval", "m", "--engine", "openai", "--base-url", endpoint.url, "--tasks", tasks, "--databases", people,
                   "--out", out, "--store", tmp_path / "store", "--set", "endpoint.concurrency=1", "--json"]  # fmt: skip
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(endpoint.requests) < 3 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        endpoint.script = lambda body, number: GOLD
        done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"correct": 4} and len(endpoint.requests) == 3 + 2
