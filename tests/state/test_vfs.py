"""Which page store is used, and why; builds that fail, are stale or are absent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from savepoint.errors import UserError
from savepoint.state import doctor
from savepoint.state.sqlite import build, vfs


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has not looked for a store yet, with an empty cache and no installed library."""
    monkeypatch.setattr(vfs, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "installed_library", lambda: None)
    monkeypatch.delenv("SAVEPOINT_VFS", raising=False)
    yield


needs_compiler = pytest.mark.skipif(not build.has_header(), reason="no C compiler with sqlite3ext.h")


@needs_compiler
def test_it_is_built_at_first_use_and_found_at_the_second(monkeypatch: pytest.MonkeyPatch):
    assert vfs.page_store().kind == "c" and "built at first use" in str(vfs.status()["why"])
    assert vfs.status()["library"] == str(build.cached_library())
    monkeypatch.setattr(vfs, "_found", {})
    monkeypatch.setattr(build, "build_library", lambda: pytest.fail("built again"))
    assert vfs.page_store().kind == "c"


@needs_compiler
def test_an_installed_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    stale = tmp_path / "_cowvfs.so"
    command = [*(build.compiler() or []), *build.FLAGS, '-DCOW_SOURCE="older"', str(build.SOURCE), "-o", str(stale)]
    subprocess.run(command, check=True)
    monkeypatch.setattr(build, "installed_library", lambda: stale)
    assert vfs.page_store().kind == "c" and vfs.status()["library"] == str(build.cached_library())


def test_without_a_compiler_the_python_store_takes_over_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert vfs.page_store().kind == "python"
    status = vfs.status()
    assert status["vfs"] == "python" and "no C compiler" in str(status["why"]) and status["library"] is None


@needs_compiler
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "cowvfs.c"
    broken.write_text('#include "no_such_header.h"\n')
    monkeypatch.setattr(build, "SOURCE", broken)
    assert vfs.page_store().kind == "python" and "no_such_header.h" in str(vfs.status()["why"])


def test_a_library_that_cannot_be_loaded_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "_cowvfs.so").write_bytes(b"no library")
    monkeypatch.setattr(build, "installed_library", lambda: tmp_path / "_cowvfs.so")
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert vfs.page_store().kind == "python" and "_cowvfs.so" in str(vfs.status()["why"])


def test_a_forced_store_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAVEPOINT_VFS", "c")
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(UserError, match="SAVEPOINT_VFS=c: the C VFS cannot be used here: no C compiler"):
        vfs.page_store()
    assert vfs.status()["vfs"] is None and vfs.status()["forced"] == "c"
    monkeypatch.setenv("SAVEPOINT_VFS", "rust")
    with pytest.raises(UserError, match="use c or python"):
        vfs.page_store()


def test_python_can_be_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAVEPOINT_VFS", "python")
    assert vfs.page_store().kind == "python" and vfs.status()["why"] == "SAVEPOINT_VFS=python"


def test_a_cache_that_cannot_be_written_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert vfs.page_store().kind == "python"


def test_the_doctor_reports_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    report = {what: (works, detail) for what, works, detail in doctor(tmp_path / "new" / "store")}
    assert set(report) == {"apsw", "compiler", "sqlite3ext.h", "vfs", "sandbox", "store"}
    assert report["vfs"][0] and report["store"] == (True, report["store"][1]) and str(tmp_path / "new" / "store") in report["store"][1]
    assert "SQLite 3." in report["apsw"][1] and "GiB free" in report["store"][1]
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setattr(vfs, "_found", {})
    without = {what: (works, detail) for what, works, detail in doctor(tmp_path)}
    assert not without["compiler"][0] and not without["sqlite3ext.h"][0] and without["vfs"][0]


@needs_compiler
def test_setuptools_builds_the_library_beside_its_source(tmp_path: Path):
    root = Path(__file__).parents[2]
    for name in ("setup.py", "pyproject.toml"):
        shutil.copyfile(root / name, tmp_path / name)
    (tmp_path / "README.md").write_text("")
    (tmp_path / "LICENSE").write_text("")
    folder = tmp_path / "src" / "savepoint" / "state" / "sqlite"
    folder.mkdir(parents=True)
    shutil.copyfile(build.SOURCE, folder / "cowvfs.c")
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    (library,) = folder.glob("_cowvfs*.so")
    assert done.returncode == 0
    check = (
        "import sys; from pathlib import Path; from savepoint.state.sqlite import build; from savepoint.state.sqlite.native import NativeStore;"
        "print(NativeStore(Path(sys.argv[1]), build.source_hash()).kind)"
    )
    loaded = subprocess.run([sys.executable, "-c", check, str(library)], capture_output=True, text=True)
    assert loaded.stdout == "c\n", loaded.stderr


def test_installing_succeeds_where_nothing_can_be_compiled(tmp_path: Path):
    root = Path(__file__).parents[2]
    for name in ("setup.py", "pyproject.toml"):
        shutil.copyfile(root / name, tmp_path / name)
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("")
    folder = tmp_path / "src" / "savepoint" / "state" / "sqlite"
    folder.mkdir(parents=True)
    shutil.copyfile(build.SOURCE, folder / "cowvfs.c")
    environment = {**os.environ, "PYTHONPATH": "", "CC": "/nonexistent/cc"}
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not list(folder.glob("*.so"))
