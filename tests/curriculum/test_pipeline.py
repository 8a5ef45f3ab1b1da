"""A whole run, small: it learns, stops anywhere, goes on to the same bits, and refuses what does not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from savepoint.curriculum.estimate import estimate, parameters_of
from savepoint.curriculum.pipeline import run_recipe
from savepoint.curriculum.plan import Recipe, load_recipe
from savepoint.errors import Interrupted, UserError
from savepoint.progress import Progress
from savepoint.rollout.trajectory import Group
from savepoint.train import grpo

TINY = [
    "threads=1", "tensorboard=false", "tasks.heldout=6", "evaluation.samples=1", "environment.max_message_tokens=24",
    "stages.1.demonstrations=64", "stages.2.demonstrations=48", "stages.2.single_turn_demonstrations=16",
    "stages.3.steps=2", "stages.3.prompts_per_step=4", "stages.3.group_size=4", "stages.4.steps=3", "stages.4.prompts_per_step=4", "stages.4.group_size=4",
]  # fmt: skip


def recipe(*sets: str) -> Recipe:
    return load_recipe("quickstart", [*TINY, *sets])[0]


def go(folder: Path, store: Path, *sets: str, resume: bool = False, progress: Progress | None = None, stop_after: tuple[int, int] | None = None) -> dict:
    """Run; `stop_after=(stage, step)` asks to stop as Ctrl-C would, in the middle of that step."""
    quiet = progress or StopAt(stop_after)
    with quiet:
        return run_recipe(recipe(*sets), None, folder, resume=resume, progress=quiet, store=store)


class StopAt(Progress):
    """A quiet display that sends this process SIGINT when a given step has been shown."""

    def __init__(self, at: tuple[int, int] | None = None) -> None:
        super().__init__("test", stages=[], quiet=True)
        self.at, self.now = at, 0

    def stage(self, index: int, name: str, steps: int, kind: str, done: int = 0) -> None:
        self.now = index

    def step(self, step: int, **_: object) -> None:
        if self.at == (self.now, step):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, go(folder, store)


def test_a_run_leaves_everything_that_it_promises(whole: tuple[Path, dict]):
    folder, summary = whole
    assert [s["name"] for s in summary["stages"]] == ["reasoning imitation", "tool-use imitation", "reasoning RL", "agentic RL"]
    for before, after in zip(summary["stages"], summary["stages"][1:], strict=False):
        assert before["after"] == after["before"]
    assert summary == json.loads((folder / "summary.json").read_text()) and not summary["interrupted"]
    assert summary["gain"]["from"] == "tool-use imitation" and summary["gain"]["to"] == "agentic RL"
    assert summary["peak_memory_bytes"] > 1e8 and summary["demonstrator"]["n"] == 6
    assert summary["planned_memory"]["total"] > summary["planned_memory"]["learner"]["peak"] and summary["environment"]["attention_backend"] == "cpu_flash"
    checked = summary["environment"]["attention_check"]
    assert (checked["backend"], checked["dtype"]) == ("cpu_flash", "float32") and max(checked["errors"].values()) < 1e-5
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [(r["index"], r["step"]) for r in records] == [(i, k) for i, steps in ((1, 4), (2, 4), (3, 2), (4, 3)) for k in range(1, steps + 1)]
    assert all(r["logprob_gap"] <= 1e-4 for r in records if r["kind"] == "grpo")
    trace = [json.loads(line) for line in (folder / "traces" / "stage4-step-0001.jsonl").open()]
    assert len(trace) == 16 and all(len(t["ids"]) == len(t["mask"]) == len(t["logprobs"]) for t in trace)
    for k in range(5):
        assert (folder / "traces" / f"eval-{k}-agentic.jsonl").exists()
    assert (folder / "checkpoints" / "stage4" / "config.json").exists()


@pytest.mark.parametrize("stop_after", [(1, 2), (2, 4), (3, 1), (4, 2)])
def test_a_stopped_run_goes_on_to_the_same_bits(whole: tuple[Path, dict], tmp_path: Path, store: Path, stop_after: tuple[int, int]):
    with pytest.raises(Interrupted, match="saved. To go on: savepoint run --out"):
        go(tmp_path / "run", store, stop_after=stop_after)
    go(tmp_path / "run", store, resume=True)
    folder, _ = whole
    ours, theirs = (torch.load(f / "checkpoints" / "latest" / "tensors.pt", weights_only=True)["policy"] for f in (tmp_path / "run", folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    exact = ("loss", "tokens", "reward_mean", "grad_norm")
    lines = [[{k: r.get(k) for k in exact} for r in map(json.loads, (f / "metrics.jsonl").open())] for f in (tmp_path / "run", folder)]
    assert lines[0] == lines[1]


def test_reinforcement_goes_on_with_its_optimiser(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch):
    """A policy this raw earns nothing, and then no step depends on the one before: so every trajectory is given an advantage here."""

    def by_member(groups: list[Group]) -> None:
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.advantage = 1.0 if trajectory.member % 2 else -1.0

    monkeypatch.setattr(grpo, "assign_advantages", by_member)
    go(tmp_path / "whole", store)
    with pytest.raises(Interrupted):
        go(tmp_path / "stopped", store, stop_after=(4, 2))
    go(tmp_path / "stopped", store, resume=True)
    ours, theirs = (torch.load(tmp_path / f / "checkpoints" / "latest" / "tensors.pt", weights_only=True)["policy"] for f in ("stopped", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_killed_run_goes_on_from_its_last_checkpoint(whole: tuple[Path, dict], tmp_path: Path, store: Path):
    folder = tmp_path / "run"
    sets = [part for text in [*TINY, "stages.1.checkpoint_every=1", "stages.3.checkpoint_every=1"] for part in ("--set", text)]
    command = [sys.executable, "-m", "savepoint", "run", "quickstart", *sets, "--out", str(folder), "--store", str(store), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "latest" / "state.json").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert (folder / "checkpoints").exists(), process.stderr.read().decode()[-500:]
    with (folder / "metrics.jsonl").open("a") as file:  # a step that was logged, and whose checkpoint was never written
        file.write(json.dumps({"stage": "reasoning imitation", "index": 1, "step": 4, "loss": 99.0}) + "\n")
    go(folder, store, "stages.1.checkpoint_every=1", "stages.3.checkpoint_every=1", resume=True)
    ours, theirs = (torch.load(f / "checkpoints" / "latest" / "tensors.pt", weights_only=True)["policy"] for f in (folder, whole[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    logged = [(r["index"], r["step"]) for r in map(json.loads, (folder / "metrics.jsonl").open())]
    assert logged == [(r["index"], r["step"]) for r in map(json.loads, (whole[0] / "metrics.jsonl").open())]


def test_a_run_stopped_before_its_first_step_goes_on_as_well(whole: tuple[Path, dict], tmp_path: Path, store: Path):
    class StopAtOnce(StopAt):
        def activity(self, what: str, done: int, total: int) -> None:
            os.kill(os.getpid(), signal.SIGINT) if what == "making held-out tasks" and done == 2 else None

    with pytest.raises(Interrupted, match="while making held-out tasks; .* To go on: savepoint run --out"):
        go(tmp_path / "run", store, progress=StopAtOnce())
    go(tmp_path / "run", store, resume=True)
    ours, theirs = (torch.load(f / "checkpoints" / "latest" / "tensors.pt", weights_only=True)["policy"] for f in (tmp_path / "run", whole[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_was_refused_at_once_leaves_the_folder_free(tmp_path: Path, store: Path):
    with pytest.raises(UserError, match="set tasks.heldout lower"):
        go(tmp_path / "run", store, "tasks.heldout=1000000", "tasks.max_tables=1", "tasks.max_columns=2", "tasks.forms=['list']", "tasks.renamed_share=1.0")
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten_and_nothing_else_is_resumed(whole: tuple[Path, dict], tmp_path: Path, store: Path):
    folder, summary = whole
    with pytest.raises(UserError, match="already holds a run: pass --resume"):
        go(folder, store)
    with pytest.raises(UserError, match="stages.4.lr was 0.0006 when the run began and is 0.001 now"):
        go(folder, store, "stages.4.lr=0.001", resume=True)
    with pytest.raises(UserError, match="holds no run to go on with"):
        go(tmp_path / "nowhere", store, resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds something else"):
        go(tmp_path / "full", store)
    assert go(folder, store, resume=True)["stages"] == summary["stages"]


def test_a_database_that_changed_is_not_gone_on_with(tmp_path: Path, store: Path):
    import sqlite3

    from savepoint.envs.sql import databases

    path = tmp_path / "mine.sqlite"
    databases.build("shop", path)
    with pytest.raises(Interrupted):
        go(tmp_path / "run", store, f"tasks.database={path}", stop_after=(1, 1))
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE later (a)")
    db.close()
    with pytest.raises(UserError, match="the database has changed since the run"):
        go(tmp_path / "run", store, f"tasks.database={path}", resume=True)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch):
    saved = torch.save
    calls = iter(range(100))

    def full(*args: object, **kwargs: object) -> None:
        if next(calls) == 1:
            raise OSError(28, "No space left on device")
        saved(*args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device; make room"):
        go(tmp_path / "run", store, "stages.1.checkpoint_every=1")
    go(tmp_path / "run", store, "stages.1.checkpoint_every=1", resume=True)


def test_the_plan_counts_what_a_run_does(whole: tuple[Path, dict]):
    plan, (_, summary) = estimate(recipe()), whole
    assert [row["steps"] for row in plan["stages"]] == [stage["steps"] for stage in summary["stages"]]
    assert [row["trajectories"] for row in plan["stages"]] == [stage["episodes"] for stage in summary["stages"]]
    counted = sum(p.numel() for p in torch.load(whole[0] / "checkpoints" / "latest" / "tensors.pt", weights_only=True)["policy"].values())
    assert parameters_of(recipe()) == pytest.approx(counted, rel=0.1)
