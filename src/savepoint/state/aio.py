"""The same backend and sessions for asyncio: nothing here blocks the event loop.

    backend = AsyncBackend(open_backend("sqlite", workers=2))
    async with await backend.lease(image, owner="rollout-17") as session:
        result = await session.execute("SELECT ...", deadline_s=2)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from savepoint.state.image import BaseImage
from savepoint.state.leases import BackendStats
from savepoint.state.pool import WorkerBackend
from savepoint.state.remote import RemoteSession
from savepoint.state.session import ExecResult, Quota, ResetProof, SessionStats, Snapshot
from savepoint.state.sqlite.diff import TableDiff
from savepoint.state.steps import finish_async
from savepoint.state.tree import AsyncTree


class AsyncSession:
    """A `RemoteSession` whose methods are coroutines. A cancelled call is interrupted in its worker; the session can be used again when it has stopped."""

    def __init__(self, session: RemoteSession) -> None:
        self.session = session

    async def execute(self, sql: str, *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False) -> ExecResult:
        return await finish_async(self.session.execute_steps(sql, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly))

    async def execute_all(
        self, scripts: Sequence[str], *, deadline_s: float = 5.0, max_rows: int = 1000, max_bytes: int = 1 << 20, readonly: bool = False
    ) -> list[ExecResult]:
        steps = self.session.execute_all_steps(scripts, deadline_s=deadline_s, max_rows=max_rows, max_bytes=max_bytes, readonly=readonly)
        return await finish_async(steps)

    async def checkpoint(self, label: str = "", *, keep: bool = False, ttl_s: float | None = None) -> Snapshot:
        return await finish_async(self.session.checkpoint_steps(label, keep=keep, ttl_s=ttl_s))

    async def restore(self, snapshot: Snapshot) -> None:
        await finish_async(self.session.restore_steps(snapshot))

    async def fork(self, n: int = 1, *, label: str = "") -> list[AsyncSession]:
        return [AsyncSession(fork) for fork in await finish_async(self.session.fork_steps(n, label=label))]

    async def reset(self) -> ResetProof:
        return await finish_async(self.session.reset_steps())

    async def digest(self, level: Literal["page", "logical"] = "page") -> str:
        return await finish_async(self.session.service_steps("digest", level))

    async def stats(self) -> SessionStats:
        return await finish_async(self.session.stats_steps())

    async def park(self) -> None:
        await finish_async(self.session.park_steps())

    async def delta(self, since: Snapshot | None = None) -> bytes:
        return await finish_async(self.session.delta_steps(since))

    async def apply(self, *deltas: bytes) -> None:
        await finish_async(self.session.apply_steps(*deltas))

    async def diff(self, before: Snapshot | None = None, after: Snapshot | None = None, *, samples: int = 3) -> tuple[TableDiff, ...]:
        return await finish_async(self.session.diff_steps(before, after, samples=samples))

    def close(self) -> None:
        """Sends a word and waits for nothing, so it is no coroutine."""
        self.session.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncBackend:
    """A `WorkerBackend` for coroutines. Importing and deriving read files and run for long: they go to a thread."""

    def __init__(self, backend: WorkerBackend) -> None:
        self.backend = backend

    async def import_base(self, path: str | Path) -> BaseImage:
        return await asyncio.to_thread(self.backend.import_base, path)

    async def derive(self, base: BaseImage, setup: Sequence[str]) -> BaseImage:
        return await asyncio.to_thread(self.backend.derive, base, setup)

    async def lease(
        self, image: BaseImage | Snapshot, *, owner: str, quota: Quota | None = None, ttl_s: float | None = 3600.0, **options: Any
    ) -> AsyncSession:
        return AsyncSession(await finish_async(self.backend.lease_steps(image, owner=owner, quota=quota, ttl_s=ttl_s, **options)))

    def tree(self, root: BaseImage | Snapshot) -> AsyncTree:
        return AsyncTree(self.backend.tree(root))

    def stats(self) -> BackendStats:
        return self.backend.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self.backend.close)

    async def __aenter__(self) -> AsyncBackend:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
