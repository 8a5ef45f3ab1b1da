"""The progress display: readable logs, honest estimates, and a terminal that is left as it was found."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from savepoint.progress import Progress, clock, stage_table

PLAN = [("reasoning imitation", 400, 105.0), ("tool-use imitation", 618, 165.0), ("reasoning RL", 20, 80.0), ("agentic RL", 30, 180.0)]


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def now() -> FakeClock:
    return FakeClock()


def rate(success: float) -> dict:
    known = {"success": success, "low": success - 0.05, "high": success + 0.05}
    return {"single_turn": known, "agentic": {"success": None, "low": None, "high": None}}


def row(name: str, before: dict | None, after: dict | None) -> dict:
    return {"name": name, "steps": 400, "episodes": 6400, "seconds": 107.4, "before": before, "after": after}


def whole_run(progress: Progress, now: FakeClock, *, stretch: float = 1.0) -> Iterator[None]:
    """A run of the plan at `stretch` times its expected seconds, 30 s of evaluation after each stage. Yields after each step."""
    for index, (name, steps, seconds) in enumerate(PLAN, 1):
        progress.stage(index, name, steps, "sft" if index < 3 else "grpo")
        for step in range(1, steps + 1):
            now.time += stretch * seconds / steps
            progress.step(step, success=0.5 if index > 2 else None, loss=None if index > 2 else 0.7, tokens=3000, episodes=16)
            yield
        for done in range(200):
            now.time += 30 / 200
            progress.activity("evaluating agentic", done, 200)
        progress.table([row(stage[0], rate(0.2), rate(0.3)) for stage in PLAN[:index]])


def log_of(now: FakeClock, *, stretch: float = 1.0) -> str:
    stream = io.StringIO()
    with Progress("quickstart on shop", PLAN, stream=stream, now=now) as progress:
        for _ in whole_run(progress, now, stretch=stretch):
            pass
    return stream.getvalue()


def test_a_run_of_eleven_minutes_gives_a_log_of_less_than_150_lines(now):
    lines = log_of(now).splitlines()
    assert 50 < len(lines) < 150
    assert max(map(len, lines)) <= 140


def test_a_long_run_speaks_at_most_once_a_minute(now):
    lines = log_of(now, stretch=30).splitlines()
    said = [line for line in lines if line.startswith("[")]
    assert len(said) < now.time / 60 + 60


def test_a_log_names_each_stage_at_its_start_and_its_end(now):
    log = log_of(now)
    for index, (name, steps, _) in enumerate(PLAN, 1):
        assert re.search(rf"{index}/4 {name} \((SFT|GRPO)\): {steps} steps", log)
        assert re.search(rf"{index}/4 {name}: done, {steps} steps in \d+:\d\d, (loss 0.700|success 50.0 %)", log)


def test_log_lines_are_ten_seconds_apart_and_tell_rates_and_time_left(now):
    within = [line for line in log_of(now).splitlines() if ": step " in line]
    seconds = [int(m) * 60 + int(s) for m, s in (re.match(r"\[ *(\d+):(\d+)\]", line).groups() for line in within)]
    assert min(b - a for a, b in zip(seconds, seconds[1:], strict=False)) >= 9
    assert all(re.search(r"[\d,]+ tokens/s, [\d.]+ episodes/s, about \d+:\d\d left", line) for line in within)


def test_time_left_follows_measured_steps_where_the_plan_was_wrong(now):
    progress = Progress("run", PLAN, quiet=True, now=now)
    started, estimates = now.time, []
    for _ in whole_run(progress, now, stretch=2.0):
        estimates.append((now.time, progress.left))
    total = now.time - started
    # Everything takes twice as long as planned. Late in the run (one evaluation seen) the estimate is within a tenth of the whole.
    late = [(at, left) for at, left in estimates if at - started > 0.4 * total]
    assert max(abs(at + left - now.time) for at, left in late) < 0.1 * total
    assert estimates[0][1] == pytest.approx(2 * sum(seconds for *_, seconds in PLAN), rel=0.05)


def test_time_left_is_unknown_without_expectations(now):
    progress = Progress("run", [("a", 10), ("b", 10)], quiet=True, now=now)
    progress.stage(1, "a", 10, "sft")
    assert progress.left is None


def test_a_resumed_stage_is_timed_by_its_own_steps_only(now):
    progress = Progress("run", [("a", 100, 100.0)], quiet=True, now=now)
    now.time += 500
    progress.stage(1, "a", 100, "sft", done=90)
    now.time += 3
    progress.step(91)
    assert progress.left == pytest.approx(9 * 3)
    stream = io.StringIO()
    resumed = Progress("run", [("a", 100, 100.0)], stream=stream, now=now)
    resumed.stage(1, "a", 100, "sft", done=90)
    for step in range(91, 101):
        resumed.step(step)
    assert "goes on after step 90 of 100" in stream.getvalue()
    assert "done, 10 steps in 0:00" in stream.getvalue()


def test_an_evaluation_is_expected_again_after_each_stage_that_is_left(now):
    progress = Progress("run", [("a", 1, 10.0), ("b", 1, 10.0), ("c", 1, 10.0)], quiet=True, now=now)
    for index, name in ((1, "a"), (2, "b")):
        now.time += 100  # preparations, which say nothing about the stages to come
        progress.stage(index, name, 1, "sft")
        now.time += 10
        progress.step(1)
        if index == 1:
            now.time += 7
            progress.table([row("a", None, None)])
    assert progress.left == pytest.approx(10 + 2 * 7)


def test_quiet_writes_nothing(now):
    stream = io.StringIO()
    with Progress("run", PLAN, quiet=True, stream=stream, now=now) as progress:
        progress.note("hello")
        for _ in whole_run(progress, now):
            pass
    assert stream.getvalue() == ""


def test_a_reader_that_goes_away_silences_the_display_and_does_not_stop_the_run(now):
    class Gone(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Gone()
    with Progress("run", PLAN, stream=stream, now=now) as progress:
        for _ in whole_run(progress, now):
            pass
    assert stream.writes == 1


def test_a_note_made_inside_a_write_waits_for_its_end(now):
    class Interrupted(io.StringIO):
        """A stream in whose write a signal handler makes a note, once."""

        depth = 0

        def write(self, text: str) -> int:
            assert self.depth == 0, "written inside a write"
            self.depth = 1
            if "note" not in text and progress is not None and "1/4" in text:
                progress.note("a note")
            written = super().write(text)
            self.depth = 0
            return written

    progress, stream = None, Interrupted()
    progress = Progress("run", PLAN, stream=stream, now=now)
    progress.stage(1, "reasoning imitation", 400, "sft")
    assert [line.split("] ")[1] for line in stream.getvalue().splitlines()] == ["run", "1/4 reasoning imitation (SFT): 400 steps", "a note"]


def test_nothing_is_said_before_there_is_something_to_say(now):
    stream = io.StringIO()
    with Progress("run", PLAN, stream=stream, now=now):
        assert stream.getvalue() == ""
    assert stream.getvalue() == ""


def test_a_step_before_any_stage_is_a_clear_error(now):
    with pytest.raises(RuntimeError, match="call stage"):
        Progress("run", PLAN, quiet=True, now=now).step(1)


def test_the_stage_table_shows_change_and_unknowns():
    console = Console(file=io.StringIO(), width=100)
    console.print(stage_table([row("reasoning [imitation]", rate(0.123), rate(0.456)), row("later", rate(0.456), None)]))
    lines = console.file.getvalue().splitlines()
    assert re.search(r"1 reasoning \[imitation\]\s+12.3 → 45.6 %\s+–\s+400\s+6,400\s+1:47", lines[1])
    assert "45.6 → – %" in lines[2]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.7, "1:00:00"), (3723, "1:02:03")])
def test_clock_reads_as_people_write_it(seconds, text):
    assert clock(seconds) == text


def test_the_cursor_comes_back_even_where_a_second_ctrl_c_strikes_inside_the_display(monkeypatch, now):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich.live.Live.stop", Mock(side_effect=KeyboardInterrupt))
    progress = Progress("run", PLAN, stream=stream, now=now)
    with pytest.raises(KeyboardInterrupt):
        progress.__exit__(None, None, None)
    assert stream.getvalue().endswith("\x1b[?25h")


PROGRAM = """
import sys, time
from savepoint.progress import Progress
with Progress("quickstart on shop", [("imitation", 3, 1.0), ("agentic RL", 500, 9.0)]) as progress:
    progress.stage(1, "imitation", 3, "sft")
    for step in range(3):
        progress.step(step + 1, loss=0.5, tokens=100, episodes=10)
    progress.note("a note that stays")
    progress.stage(2, "agentic RL", 500, "grpo")
    for step in range(500):
        time.sleep(0.02)
        progress.step(step + 1, success=0.25, tokens=100, episodes=10)
        if "fail" in sys.argv and step == 30:
            raise SystemExit(7)
"""


def in_a_terminal(tmp_path: Path, *arguments: str, interrupt: bool = False) -> tuple[str, int]:
    """Run PROGRAM with stderr on a terminal; all that was written to it, and the exit status."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    master, slave = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    command = [sys.executable, str(program), *arguments]
    process = subprocess.Popen(command, stderr=slave, stdout=subprocess.DEVNULL, env=env, start_new_session=True)
    os.close(slave)
    out = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        out += chunk
        if interrupt and b"success 25.0" in out:
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            interrupt = False
    os.close(master)
    return out.decode(), process.wait(timeout=10)


def test_a_terminal_shows_stage_step_success_and_rates_and_keeps_notes(tmp_path):
    out, status = in_a_terminal(tmp_path, "fail")
    assert status == 7
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out)
    assert re.search(r"✓\s+1 imitation\s+3 steps in 0:00", plain)
    assert re.search(r"●\s+2 agentic RL\s+[━╸╺]+\s+\d+/500\s+success 25.0 %", plain)
    assert re.search(r"[\d,]+ tokens/s · [\d.]+ episodes/s", plain)
    assert "about 0:" in plain
    assert plain.count("a note that stays") == 1


@pytest.mark.parametrize("how", ["exception", "ctrl_c"])
def test_the_cursor_comes_back_however_the_run_ends(tmp_path, how):
    out, status = in_a_terminal(tmp_path, *(["fail"] if how == "exception" else []), interrupt=how == "ctrl_c")
    assert status == (7 if how == "exception" else -signal.SIGINT)
    assert "\x1b[?25l" in out
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")
