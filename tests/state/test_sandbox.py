"""What a worker gives up: each measure is tried from inside, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from savepoint.state.sandbox import LEVELS, SandboxReport, reaches

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux; elsewhere the report says so")


def inside(code: str, **arguments: object) -> str:
    """What `code` prints after the sandbox was entered; `report` is at its hand."""
    options = ", ".join(f"{name}={value!r}" for name, value in {"memory_bytes": 512 << 20, "file_bytes": 1 << 20, **arguments}.items())
    begin = "import os, socket, subprocess, sys, threading, ctypes\nfrom savepoint.state import sandbox\n"
    script = f"{begin}report = sandbox.enter({options})\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def attempt(expression: str) -> str:
    return inside(f"try:\n    {expression}\n    print('done')\nexcept BaseException as error:\n    print(type(error).__name__)")


@linux
def test_the_report_says_what_holds():
    level, *measures = inside("print(report.level, *(name for name, holds in report.measures.items() if holds))").split()
    assert level in ("full", "partial")
    assert {"memory", "files", "no_new_privs"} <= set(measures)


@linux
@pytest.mark.parametrize(
    ("expression", "measure"),
    [
        ("open('/etc/passwd').read()", "landlock"),
        ("open('/tmp/savepoint-sandbox-test', 'w')", "landlock"),
        ("os.listdir('/')", "landlock"),
        ("socket.socket()", "seccomp"),
        ("os.execv('/bin/true', ['true'])", "seccomp"),
        ("os.kill(1, 0)", "seccomp"),
        ("os.kill(os.getppid(), 0)", "seccomp"),
        ("os.setuid(0)", "seccomp"),
        ("os.unlink('/tmp/nothing-there')", "seccomp"),
        ("ctypes.CDLL(None).unshare(0x10000000) == 0 or (_ for _ in ()).throw(PermissionError())", "seccomp"),
        ("bytearray(1 << 30)", "memory"),
        ("os.ftruncate(os.memfd_create('x'), 2 << 20)", "files"),
    ],
)
def test_what_was_given_up_cannot_be_had(expression: str, measure: str):
    if inside(f"print(report.measures[{measure!r}])") != "True":
        pytest.skip(f"this system has no {measure}: {inside(f'print(report.missing[{measure!r}])')}")
    assert attempt(expression) == {"memory": "MemoryError", "files": "OSError"}.get(measure, "PermissionError")


@linux
def test_the_same_attempts_succeed_outside():
    code = "import os, socket; open('/etc/passwd').read(); socket.socket(); os.kill(os.getppid(), 0); bytearray(1 << 30); print('all')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "all"


@linux
def test_threads_still_start():
    assert inside("thread = threading.Thread(target=lambda: print('thread')); thread.start(); thread.join()") == "thread"


@linux
def test_a_readable_folder_stays_readable_and_no_more(tmp_path: Path):
    (tmp_path / "file").write_text("words")
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        parent.chmod(0o755)
    code = f"print(open({str(tmp_path / 'file')!r}).read())\ntry:\n    open({str(tmp_path / 'other')!r}, 'w')\nexcept OSError as error:\n    print('refused')"
    assert inside(code, readable=[str(tmp_path)]).split() == ["words", "refused"]


def test_levels_are_ordered_and_a_wrong_name_is_an_error():
    assert [reaches("partial", level) for level in LEVELS] == [True, True, True, False]
    with pytest.raises(ValueError, match="sandbox level 'some'"):
        reaches("some", "none")


def test_the_report_reads_as_a_sentence():
    report = SandboxReport("partial", {"seccomp": True, "landlock": False}, {"landlock": "the kernel has no Landlock"})
    assert str(report) == "partial (seccomp; no landlock: the kernel has no Landlock)"
