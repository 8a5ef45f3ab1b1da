"""Run folders of invented figures (see `fake_run.py`), small enough to be made for every session."""

from __future__ import annotations

import shutil
from pathlib import Path

import fake_run
import pytest


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run.write_run(tmp_path_factory.mktemp("runs") / "finished", tasks=40)


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run's folder, for a test to change."""
    return Path(shutil.copytree(_finished, tmp_path / "finished"))
