"""A run's folder and its thread of time: seeds, metrics, traces, checkpoints, and a stop that loses nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from savepoint.errors import UserError
from savepoint.files import write_atomically
from savepoint.progress import Progress
from savepoint.rollout.trajectory import Trajectory


class Run:
    """Everything a run writes goes through here.

    Every random draw is a pure function of (seed, names, step): no generator has a state that a checkpoint would have to carry, and a run
    that was stopped and resumed draws what an unbroken one draws.
    """

    def __init__(self, folder: Path, seed: int, progress: Progress, *, tensorboard: bool = True) -> None:
        self.folder, self.seed, self.progress = folder, seed, progress
        self.stop_asked = False
        self._metrics = folder / "metrics.jsonl"
        self._board: Any = None
        self._tensorboard = tensorboard

    def seed_for(self, *names: object) -> int:
        """A 63-bit seed for a named draw, for example `seed_for("stage3", "tasks", step)`."""
        text = json.dumps([self.seed, *map(str, names)]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def rng(self, *names: object) -> random.Random:
        return random.Random(self.seed_for(*names))

    def log(self, record: dict[str, Any]) -> None:
        """Append a step to `metrics.jsonl` and TensorBoard."""
        with self.write_guard(), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._tensorboard:
            self._to_board(record)

    def _to_board(self, record: dict[str, Any]) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"))
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "of", "index"):
                self._board.add_scalar(f"{record['index']} {record['stage']}/{key}", value, record["step"])

    def trace(self, name: str, trajectories: Iterable[Trajectory]) -> None:
        """Write trajectories to `traces/<name>.jsonl`, one a line, whole or not at all."""
        path = self.folder / "traces" / f"{name}.jsonl"
        with self.write_guard():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, "".join(json.dumps(t.to_json(), ensure_ascii=False, default=str) + "\n" for t in trajectories))

    def cut_metrics(self, index: int, step: int) -> None:
        """Drop what was logged after stage `index`, step `step`: a resumed run logs those steps again."""
        if not self._metrics.exists():
            return
        kept = [line for line in self._metrics.read_text(encoding="utf-8").splitlines() if line and _upto(json.loads(line), index, step)]
        write_atomically(self._metrics, "".join(f"{line}\n" for line in kept))

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Within: the first Ctrl-C (or SIGTERM) asks to stop after the current step, the second stops at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop_asked:
                raise KeyboardInterrupt
            self.stop_asked = True
            self.progress.note("Stopping after this step; press Ctrl-C again to stop at once (the last checkpoint stays).")

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def write_guard(self) -> Iterator[None]:
        """A full disk (or a folder gone read-only) becomes one line that names the folder."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror or error}; make room, then go on with --resume") from error
        except RuntimeError as error:  # torch and safetensors word a failed write in their own way
            if "write" not in str(error).lower() and "space" not in str(error).lower():
                raise
            raise UserError(f"{self.folder}: cannot be written: {error}; make room, then go on with --resume") from error

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def save(self, state: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Replace the checkpoint: `state` (JSON: where the run stands) and `tensors` (weights, optimisers). Whole or not at all."""
        target, fresh, old = (self.folder / "checkpoints" / name for name in ("latest", ".new", ".old"))
        with self.write_guard():
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)
            fresh.mkdir(parents=True)
            torch.save(tensors, fresh / "tensors.pt")
            write_atomically(fresh / "state.json", json.dumps(state, indent=1))
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The last checkpoint, or None when there is none. A kill between two renames leaves the one before."""
        for name in ("latest", ".old"):
            folder = self.folder / "checkpoints" / name
            if (folder / "state.json").exists():
                state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
                return state, torch.load(folder / "tensors.pt", weights_only=True)
        return None


def _upto(record: dict[str, Any], index: int, step: int) -> bool:
    return (record["index"], record["step"]) <= (index, step)
