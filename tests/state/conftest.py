"""A small shop database, and a backend on each of the two page stores: what holds for one must hold for the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from state_support import Lease, make_shop

from savepoint.errors import UserError
from savepoint.state import BaseImage, Quota, Session, SqliteBackend, open_backend
from savepoint.state.sqlite import vfs


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(params=["c", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page store under test; the C one is skipped where it cannot be had."""
    monkeypatch.setenv("SAVEPOINT_VFS", request.param)
    try:
        vfs.page_store()
    except UserError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def backend(kind: str, tmp_path: Path) -> Iterator[SqliteBackend]:
    with open_backend("sqlite", store=tmp_path / "store") as backend:
        yield backend


@pytest.fixture
def base(backend: SqliteBackend, shop: Path) -> BaseImage:
    return backend.import_base(shop)


@pytest.fixture
def lease(backend: SqliteBackend, base: BaseImage) -> Iterator[Lease]:
    """`lease(**quota)`: a session on the shop, closed at the end."""
    sessions: list[Session] = []

    def make(**quota: int) -> Session:
        sessions.append(backend.lease(base, owner="test", quota=Quota(**quota)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def session(lease: Lease) -> Session:
    return lease()
