"""A run's folder: draws that depend on names only, records that can be cut, checkpoints that are whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from savepoint.errors import UserError
from savepoint.files import write_atomically
from savepoint.progress import Progress
from savepoint.rollout.trajectory import Trajectory
from savepoint.train.run import Run


def run(folder: Path, seed: int = 0) -> Run:
    return Run(folder, seed, Progress("test", stages=[], quiet=True), tensorboard=False)


def test_draws_depend_on_seed_and_names_only(tmp_path: Path):
    a, b = run(tmp_path), run(tmp_path)
    b.rng("something else").random()
    assert a.seed_for("stage", 1, 2) == b.seed_for("stage", 1, 2) != a.seed_for("stage", 12) != run(tmp_path, 1).seed_for("stage", 12)
    assert a.rng("x").random() == b.rng("x").random() and 0 <= a.seed_for("x") < 2**63


def test_records_after_a_step_can_be_cut(tmp_path: Path):
    r = run(tmp_path)
    for index, step in ((1, 1), (1, 2), (2, 1), (2, 2)):
        r.log({"stage": "s", "index": index, "step": step})
    r.cut_metrics(2, 1)
    assert [(x["index"], x["step"]) for x in map(json.loads, (tmp_path / "metrics.jsonl").open())] == [(1, 1), (1, 2), (2, 1)]


def test_a_checkpoint_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    r = run(tmp_path)
    assert r.load() is None
    r.save({"step": 1}, {"policy": torch.ones(2)})
    real = Path.rename

    def dies_after_the_first(self: Path, target: Path) -> Path:
        if self.name == ".new":
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", dies_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        r.save({"step": 2}, {"policy": torch.zeros(2)})
    monkeypatch.undo()
    state, tensors = run(tmp_path).load() or ({}, {})
    assert state == {"step": 1} and tensors["policy"].sum() == 2
    r.save({"step": 3}, {"policy": torch.zeros(2)})
    assert (r.load() or ({}, {}))[0] == {"step": 3}


def test_a_file_is_written_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_trace_keeps_text_that_is_no_unicode(tmp_path: Path):
    r = run(tmp_path)
    r.trace("t", [Trajectory("id", 0, 0, 0, reason="lone \ud800 surrogate")])
    assert json.loads((tmp_path / "traces" / "t.jsonl").read_text())["task"] == "id"


def test_ctrl_c_asks_first_and_insists_second(tmp_path: Path):
    r = run(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with r.stoppable():
        assert not r.stop_asked
        os.kill(os.getpid(), signal.SIGINT)
        assert r.stop_asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    r = run(tmp_path / "gone")
    with pytest.raises(UserError, match="gone: cannot be written: No such file or directory; make room"):
        r.log({"stage": "s", "index": 1, "step": 1})
