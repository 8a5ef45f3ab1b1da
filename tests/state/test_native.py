"""The C page store by itself: under the sanitizers, and when memory runs out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from state_support import make_shop

from savepoint.state.sqlite import build

HERE = Path(__file__).parent


def build_and_run(source: str, sanitizer: str, folder: Path, rows: int) -> subprocess.CompletedProcess[str]:
    command, program = build.compiler(), folder / "program"
    if command is None:
        pytest.skip("no C compiler")
    flags = ["-g", "-O1", "-std=c11", "-D_GNU_SOURCE", "-DSQLITE_CORE", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    built = subprocess.run([*command, *flags, str(HERE / source), "-o", str(program), "-lsqlite3", "-lpthread"], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"cannot be built here: {built.stderr.splitlines()[-1:]}")
    return subprocess.run([program, make_shop(folder / "shop.sqlite", rows)], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_threads_that_share_an_image_are_clean_under_the_sanitizers(tmp_path: Path, sanitizer: str):
    done = build_and_run("stress.c", sanitizer, tmp_path, 2000)
    assert done.returncode == 0, done.stderr[-4000:]


def test_no_allocation_that_fails_crashes_leaks_or_corrupts(tmp_path: Path):
    done = build_and_run("oom.c", "address,undefined", tmp_path, 300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 30, "the failures were injected"
