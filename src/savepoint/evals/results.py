"""What an evaluation keeps of each episode, in memory or in a folder, where a stopped evaluation finds it again.

    evaluation.json   what was asked for: the same command goes on only with the same answers to that
    results.jsonl     one line an episode, keyed by task and sample, written as it ends
    traces.jsonl      the whole trajectory of each
    summary.json      what the command printed
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from savepoint.errors import UserError
from savepoint.files import write_atomically
from savepoint.rollout.trajectory import Trajectory

Key = tuple[str, int]


class Scored(Protocol):
    """What a summary needs to know of an episode: a Trajectory and a Sample both have it."""

    @property
    def task(self) -> str: ...
    @property
    def category(self) -> str | None: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def outcome(self) -> str | None: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def valid(self) -> bool: ...
    @property
    def assistant_turns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """How one episode ended. `sample` counts from 0 within its task; `cost` are seconds, tokens, requests and price, by name."""

    task: str
    sample: int
    outcome: str
    status: str
    reason: str | None
    reward: float | None
    category: str | None = None
    assistant_turns: int = 0
    cost: dict[str, float] = field(default_factory=dict)
    kind: str | None = None

    @property
    def valid(self) -> bool:
        return self.reward is not None and self.status != "failed"

    @classmethod
    def of(cls, t: Trajectory) -> Sample:
        """What is kept of a trajectory; `member` is its sample."""
        own = sum(t.mask)
        tokens = {"prompt_tokens": float(len(t.ids) - own), "completion_tokens": float(own)} if t.ids else {}
        return cls(t.task, t.member, t.outcome or "none", t.status, t.reason, t.reward, t.category, t.assistant_turns, {**tokens, **t.cost}, t.kind)


class Results:
    """The episodes of one evaluation. `folder` None: in memory only, with traces to `traces` where that is given.

    With a folder: it is new, or `resume` is true and it holds an evaluation with the same `identity`; UserError otherwise. Episodes that
    failed for our reasons are no results: a resumed evaluation tries them again.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any], *, resume: bool = False, traces: Path | None = None) -> None:
        self.folder, self.identity = folder, identity
        self.samples: dict[Key, Sample] = {}
        self._traces = folder / "traces.jsonl" if folder is not None else traces
        with _writing(folder or traces):
            if folder is None:
                if traces is not None:
                    traces.write_text("", encoding="utf-8")
            elif resume and (folder / "evaluation.json").exists():
                self._reopen(folder)
            else:
                self._create(folder)

    def __contains__(self, key: Key) -> bool:
        return key in self.samples

    def add(self, trajectory: Trajectory) -> None:
        """Keep an episode that has ended. Its trace is written first, so that no result is without one."""
        sample = Sample.of(trajectory)
        with _writing(self._traces):
            _append(self._traces, trajectory.to_json())
        self.put(sample)

    def put(self, sample: Sample) -> None:
        """Keep how an episode ended."""
        self.samples[sample.task, sample.sample] = sample
        if self.folder is not None:
            with _writing(self.folder):
                _append(self.folder / "results.jsonl", asdict(sample))

    def ordered(self, keys: Sequence[Key]) -> list[Sample]:
        """The samples there are, in the order of `keys`, whatever order they ended in."""
        return [self.samples[key] for key in keys if key in self.samples]

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, where there is a folder."""
        if self.folder is not None:
            with _writing(self.folder):
                write_atomically(self.folder / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

    def _create(self, folder: Path) -> None:
        if (folder / "evaluation.json").exists():
            raise UserError(f"{folder}: holds an evaluation already: go on with it by --resume, or choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "traces.jsonl"):
            (folder / name).write_text("", encoding="utf-8")
        write_atomically(folder / "evaluation.json", json.dumps(self.identity, indent=1, ensure_ascii=False) + "\n")

    def _reopen(self, folder: Path) -> None:
        (_, before), *_ = _lines(folder / "evaluation.json", whole=True)
        for key, value in json.loads(json.dumps(self.identity)).items():
            if before.get(key) != value:
                raise UserError(f"{folder}: was made with {key} = {_short(before.get(key))}, not {_short(value)}: choose another --out")
        for where, record in _lines(folder / "results.jsonl"):
            try:
                sample = Sample(**record)
            except TypeError as error:
                raise UserError(f"{where}: is no result of an evaluation: {error}") from None
            self.samples[sample.task, sample.sample] = sample
        self.samples = {key: sample for key, sample in self.samples.items() if sample.outcome != "infra"}
        kept = {(t["task"], t["member"]): t for _, t in _lines(folder / "traces.jsonl") if (t["task"], t["member"]) in self.samples}
        _rewrite(folder / "traces.jsonl", kept.values())
        _rewrite(folder / "results.jsonl", map(asdict, self.samples.values()))


def _lines(path: Path, *, whole: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line (`whole`: of the file). A last line without its end is what a killed process leaves: it is passed over."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: is missing, so the evaluation cannot go on") from None
    for number, line in enumerate([text] if whole else text.split("\n")[:-1], 1):
        where = str(path) if whole else f"{path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"{where}: must be a JSON object")
        yield where, value


def _append(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(_line(record))


def _rewrite(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_atomically(path, "".join(map(_line, records)))


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."


@contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
