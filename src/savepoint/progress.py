"""What a person sees while a run goes on: a live display in a terminal, a line now and then in a log, nothing where asked.

Everything is written to stderr. The display never decides how a run ends: an exception or Ctrl-C passes through it and finds the cursor
restored, and a reader that goes away (`savepoint run 2>&1 | head`) silences it instead of stopping the run.
"""

from __future__ import annotations

import io
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SHOWN_STAGES, _WIDTH, _BAR = 6, 100, 24
_RECENT = 20
"""Steps that rates, loss and step time are averaged over; success over the last five."""


def clock(seconds: float) -> str:
    """`3:07`, or `1:02:03` from an hour on."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """The stages of a summary as a table: success before and after in both modes, steps, episodes, time."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("stage")
    for column in ("single-turn", "agentic", "steps", "episodes", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, stage in enumerate(stages, 1):
        changes = [_change(stage.get("before"), stage.get("after"), mode) for mode in ("single_turn", "agentic")]
        table.add_row(Text(f"{number} {stage['name']}"), *changes, f"{stage['steps']:,}", f"{stage['episodes']:,}", clock(stage["seconds"]))
    return table


def _change(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, mode: str) -> Text:
    """`28.2 → 49.7 %`, coloured where the interval left the earlier rate behind."""
    first, last = (((rates or {}).get(mode) or {}) for rates in (before, after))
    if first.get("success") is None and last.get("success") is None:
        return Text("–")
    shown = [f"{100 * rate['success']:.1f}" if rate.get("success") is not None else "–" for rate in (first, last)]
    text = Text(f"{shown[0]} → {shown[1]} %")
    if None not in (first.get("success"), last.get("low"), last.get("high")):
        text.stylize("green" if last["low"] > first["success"] else "red" if last["high"] < first["success"] else "")
    return text


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    tokens: int
    episodes: int
    success: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage as far as it has come. `expected`: its seconds as planned; `began`: steps that an earlier process did; `recent`: the last.

    Frozen and replaced whole, so that the display's thread reads a consistent state without a lock: a lock would deadlock with a note
    that a signal handler writes while the main thread holds it.
    """

    name: str
    steps: int
    expected: float | None = None
    kind: str = ""
    done: int = 0
    began: int = 0
    seconds: float = 0.0
    recent: tuple[_Step, ...] = ()

    def after(self, done: int, step: _Step) -> _Stage:
        return replace(self, done=done, seconds=self.seconds + step.seconds, recent=(*self.recent[-_RECENT + 1 :], step))

    @property
    def measured(self) -> int:
        return self.done - self.began if self.recent else 0

    def mean(self, name: str, last: int) -> float | None:
        values = [value for step in self.recent[-last:] if (value := getattr(step, name)) is not None]
        return fmean(values) if values else None

    def headline(self) -> str:
        """`success 51.2 %` or `loss 0.412`; empty before the first step."""
        success, loss = self.mean("success", 5), self.mean("loss", _RECENT)
        return f"success {100 * success:.1f} %" if success is not None else f"loss {loss:.3f}" if loss is not None else ""

    def rates(self) -> str:
        seconds = sum(step.seconds for step in self.recent)
        if not seconds:
            return ""
        tokens, episodes = (sum(getattr(step, name) for step in self.recent) / seconds for name in ("tokens", "episodes"))
        return f"{tokens:,.0f} tokens/s · {episodes:,.1f} episodes/s"


def time_left(stages: Sequence[_Stage], current: int | None, evaluated: int, gaps: Sequence[float]) -> float | None:
    """Seconds until a run is over, or None while there is nothing to tell it from.

    The current stage (`current`, from 0) at the pace of its last steps; later ones as planned, times how far plan and reality have differed
    so far; and after each stage but the `evaluated` ones what evaluation has taken on average (`gaps`, seconds; nothing before the first).
    What a stage prepares before its first step is left to the plan.
    """
    timed = [stage for stage in stages if stage.measured and stage.expected]
    planned = sum(stage.expected * stage.measured / stage.steps for stage in timed if stage.expected)
    stretch = sum(stage.seconds for stage in timed) / planned if planned else 1.0
    left = 0.0
    for index, stage in enumerate(stages[current or 0 :], current or 0):
        remaining = stage.steps - stage.done
        pace = stage.mean("seconds", _RECENT) if index == current else None
        if pace is None:
            if stage.expected is None:
                return None
            pace = stage.expected * stretch / max(1, stage.steps)
        left += remaining * pace
    return left + fmean(gaps or [0.0]) * (len(stages) - evaluated)


class Progress:
    """The progress of a run. Use as a context manager; `quiet` shows nothing.

    stages: for each stage its name, steps and, where known, expected seconds, which only weigh the estimate of the time left. `stream` is
    stderr unless given. A note may be written from a signal handler.

    ```python
    with Progress("quickstart on shop", [("imitation", 400, 90.0), ("agentic RL", 30, 200.0)]) as progress:
        progress.stage(1, "imitation", 400, "sft")
        progress.step(1, loss=2.31, tokens=1200, episodes=16)
    ```
    """

    def __init__(
        self, title: str, stages: Sequence[tuple[Any, ...]] = (), quiet: bool = False, *,
        stream: TextIO | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.title, self._now = title, now
        self._stages = [_Stage(*stage) for stage in stages]
        self._current: int | None = None
        self._activity: tuple[str, int, int] | None = None
        self._started = self._mark = now()
        self._evaluated = 0
        self._gaps: list[float] = []
        self._notes: deque[str] = deque()
        self._writing = False
        stream = stream or sys.stderr
        self._display: _Display = _Display() if quiet else _Terminal(stream, self) if stream.isatty() else _Log(stream, self)

    def __enter__(self) -> Progress:
        self._started = self._mark = self._now()
        self._show(self._display.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._show(self._display.stop)

    def stage(self, index: int, name: str, steps: int, kind: str, done: int = 0) -> None:
        """Stage `index` (from 1) begins, or goes on after `done` steps of an earlier process."""
        while len(self._stages) < index:
            self._stages.append(_Stage("", 0))
        self._stages[index - 1] = replace(self._stages[index - 1], name=name, steps=steps, kind=kind, done=done, began=done)
        self._lap()
        self._current, self._evaluated, self._activity = index - 1, index - 1, None
        self._show(self._display.stage)

    def step(self, step: int, success: float | None = None, loss: float | None = None, tokens: int = 0, episodes: int = 0) -> None:
        """Step `step` (from 1) of the current stage is done. success: share of this step's episodes, loss: of this step's batch."""
        if self._current is None:
            raise RuntimeError("progress: call stage() before step()")
        done = _Step(self._lap(), tokens, episodes, success, loss)
        self._stages[self._current] = self._stages[self._current].after(step, done)
        self._activity = None
        self._show(self._display.step)

    def activity(self, what: str, done: int, total: int) -> None:
        """Something other than a step is under way, and `done` of `total` of it is done."""
        self._activity = (what, done, total)
        self._show(self._display.activity)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._notes.append(text)
        if not self._writing:
            self._show(lambda: None)

    def table(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """The table of the stages so far: the `stages` of a summary. A stage and its evaluation are over."""
        self._gaps.append(self._lap())
        self._evaluated = len(stages)
        self._show(lambda: self._display.table(stage_table(stages)))

    @property
    def elapsed(self) -> float:
        return self._now() - self._started

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end of the run."""
        return time_left(self._stages, self._current, self._evaluated, self._gaps) if self._stages else None

    def _lap(self) -> float:
        before, self._mark = self._mark, self._now()
        return self._mark - before

    def _show(self, write: Callable[[], None]) -> None:
        """Write, then the notes that came meanwhile: a signal handler must not write inside a write (Python's streams refuse that)."""
        self._writing = True
        try:
            write()
            while self._notes:
                self._display.note(self._notes.popleft())
        except (OSError, ValueError):  # the reader of a pipe went away, a terminal was closed: nobody is watching any more
            self._display = _Display()
        finally:
            self._writing = False


class _Display:
    """Shows nothing; what the two that show something have in common."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def stage(self) -> None: ...
    def step(self) -> None: ...
    def activity(self) -> None: ...
    def note(self, text: str) -> None: ...
    def table(self, table: Table) -> None: ...


class _Log(_Display):
    """Plain lines: one when a stage begins and ends, and in between one in ten seconds, then one a minute as a run grows long."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self.stream, self.progress = stream, progress
        self._said = 0.0
        self._titled = False  # the title waits for the first line: input that is refused at once is then one line in all

    def stage(self) -> None:
        stage = self._stage()
        kind = f" ({stage.kind.upper()})" if stage.kind else ""
        steps = f"goes on after step {stage.done:,} of {stage.steps:,}" if stage.done else f"{stage.steps:,} steps"
        self._line(f"{self._name()}{kind}: {steps}")

    def step(self) -> None:
        stage = self._stage()
        if stage.done >= stage.steps:
            took = f"{self._name()}: done, {stage.measured:,} steps in {clock(stage.seconds)}"
            self._line(", ".join(filter(None, (took, stage.headline()))))
        elif self._due():
            left = self.progress.left
            parts = (f"{self._name()}: step {stage.done:,} of {stage.steps:,}", stage.headline(), stage.rates().replace(" · ", ", "),
                     f"about {clock(left)} left" if left is not None else "")  # fmt: skip
            self._line(", ".join(filter(None, parts)))

    def activity(self) -> None:
        if self.progress._activity is not None and self._due():
            what, done, total = self.progress._activity
            self._line(f"{what}: {done:,} of {total:,}")

    def note(self, text: str) -> None:
        self._line(text)

    def table(self, table: Table) -> None:
        text = io.StringIO()
        Console(file=text, width=100, color_system=None, force_terminal=False).print(table)
        self._write("".join(f"         {line.rstrip()}\n" for line in text.getvalue().splitlines()))

    def _stage(self) -> _Stage:
        return self.progress._stages[self.progress._current or 0]

    def _name(self) -> str:
        return f"{(self.progress._current or 0) + 1}/{len(self.progress._stages)} {self._stage().name}"

    def _due(self) -> bool:
        elapsed = self.progress.elapsed
        return elapsed - self._said >= min(60.0, max(10.0, elapsed / 30))

    def _line(self, text: str) -> None:
        self._said = self.progress.elapsed
        if not self._titled:
            self._titled = True
            self._write(f"[{clock(0):>6}] {self.progress.title}\n")
        self._write(f"[{clock(self._said):>6}] {text}\n")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


class _Terminal(_Display):
    """A live display of a few lines under what has been said."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self.stream, self.progress = stream, progress
        self.console = Console(file=stream)
        # What is printed meanwhile goes above the display, but for stdout that somebody else reads.
        self._live = Live(
            get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True, redirect_stdout=sys.stdout.isatty()
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        try:
            self._live.stop()
        finally:
            # A second Ctrl-C can strike inside rich and leave its buffer unwritten, and with it the sequence that shows the cursor.
            self.stream.write("\x1b[?25h")
            self.stream.flush()

    def note(self, text: str) -> None:
        self.console.print(Text(text))

    def table(self, table: Table) -> None:
        self.console.print(table)
        self.console.print()

    def render(self) -> RenderableType:
        """The title with the clock, a line a stage, and what else is going on."""
        progress = self.progress
        left = progress.left
        times = clock(progress.elapsed) + (f" · about {clock(left)} left" if left is not None else "")
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        head.add_column(no_wrap=True, justify="right")
        head.add_row(Text(progress.title, "bold"), Text(times, "dim"))
        body = Table.grid(padding=(0, 2, 0, 0))
        for width in (1, None, _BAR, 23):  # wide enough that nothing jumps as figures come and go
            body.add_column(no_wrap=True, overflow="ellipsis", min_width=width)
        first = max(0, min((progress._current or 0) - _SHOWN_STAGES + 3, len(progress._stages) - _SHOWN_STAGES))
        for index, stage in list(enumerate(progress._stages))[first : first + _SHOWN_STAGES]:
            self._add_stage(body, index, stage)
        foot = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(3):
            foot.add_column(no_wrap=True, overflow="ellipsis")
        if progress._activity is not None:
            what, done, total = progress._activity
            foot.add_row(Padding(_bar(total, done), (0, 0, 0, 3)), Text(f"{done:,}/{total:,}"), Text(what))
        elif progress._current is not None:
            foot.add_row(Text(f"   {progress._stages[progress._current].rates()}", "dim"))
        # Room for the ^C that a terminal echoes: wrapped, it would shift the display by a line.
        return Constrain(Group(head, body, foot), max(20, min(_WIDTH, self.console.width - 3)))

    def _add_stage(self, body: Table, index: int, stage: _Stage) -> None:
        current = self.progress._current
        name = f"{index + 1} {stage.name}"
        if current is None or index > current:
            body.add_row(Text("·", "dim"), Text(name, "dim"), Text(f"{stage.steps:,} steps", "dim"), "")
        elif index < current or stage.done >= stage.steps:
            took = f"{stage.steps:,} steps" + (f" in {clock(stage.seconds)}" if stage.measured == stage.steps else "")
            body.add_row(Text("✓", "green"), Text(name), Text(took, "dim"), Text(stage.headline(), "dim"))
        else:
            facts = "  ".join(filter(None, (f"{stage.done:,}/{stage.steps:,}", stage.headline())))
            body.add_row(Text("●", "cyan"), Text(name, "bold"), _bar(stage.steps, stage.done), Text(facts))


def _bar(total: int, done: int) -> ProgressBar:
    return ProgressBar(total or 1, done, width=_BAR, complete_style="cyan", finished_style="cyan")
