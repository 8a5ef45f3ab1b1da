"""Episodes against a chat endpoint: many conversations at a time, each in an environment of its own.

The environments' work (SQL, grading) is done in one thread beside the event loop, so that no statement holds up anybody's answer and no
two touch the shared caches at once. Every await has a deadline: a request that of the endpoint's settings, a statement that of the budget.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.tasks import Task
from savepoint.rollout.driver import SamplingLimits
from savepoint.rollout.engines.openai import ContextFull, EndpointError, EndpointRefused, OpenAIEngine, price
from savepoint.rollout.episode import MessageEpisode
from savepoint.rollout.trajectory import Trajectory, Turn

T = TypeVar("T")


def converse(
    jobs: Sequence[tuple[Task, int]], make_engine: Callable[[], OpenAIEngine], make_env: Callable[[], SqlEnv], limits: SamplingLimits, *,
    seed: int, each: Callable[[Trajectory], None],
) -> OpenAIEngine:  # fmt: skip
    """One episode for each (task, sample), given to `each` as it ends, in any order; the engine, for its counts.

    A failed request makes its episode `infra`, and the others go on. EndpointRefused when the endpoint refuses every request (key, model,
    address), or when `failures_in_a_row` episodes fail with no good one between them; episodes that have ended were given to `each` by then.
    """
    return asyncio.run(_Conversations(make_env, limits, seed, each).run(jobs, make_engine))


def sample_seed(seed: int, task: str, sample: int) -> int:
    """The seed of one episode, 31 bits: a function of names alone, so that neither order nor company nor a resume changes it."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{task}\0{sample}".encode(), digest_size=4).digest(), "big") >> 1


class _Conversations:
    """One call of `converse`."""

    def __init__(self, make_env: Callable[[], SqlEnv], limits: SamplingLimits, seed: int, each: Callable[[Trajectory], None]) -> None:
        self.make_env, self.limits, self.seed, self.each = make_env, limits, seed, each
        self.failures = 0

    async def run(self, jobs: Sequence[tuple[Task, int]], make_engine: Callable[[], OpenAIEngine]) -> OpenAIEngine:
        engine = make_engine()
        waiting = iter(jobs)

        async def work() -> None:
            for task, sample in waiting:
                await self._episode(engine, task, sample)

        with ThreadPoolExecutor(1, thread_name_prefix="environments") as self.thread:
            workers = [asyncio.create_task(work()) for _ in range(min(engine.settings.concurrency, len(jobs)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                await engine.close()
        return engine

    async def _episode(self, engine: OpenAIEngine, task: Task, sample: int) -> None:
        env = await self._beside(self.make_env)
        try:
            seed = sample_seed(self.seed, task.instance_id, sample)
            make = partial(MessageEpisode, env, task, seed=seed, group=0, member=sample, weight_version=0)
            episode = await self._beside(make)
            cost = {"request_s": 0.0, "requests": 0.0, "prompt_tokens": 0.0, "completion_tokens": 0.0, "more_calls": 0.0, "price": 0.0}
            answered = False
            try:
                while not episode.over:
                    await self._turn(engine, episode, seed, cost)
                    answered = True
            except EndpointRefused:
                raise
            except EndpointError as error:
                episode.fail(EndpointError(f"endpoint: {error}"))
                self._failed(engine, error, answered)
            else:
                self.failures = 0
        finally:
            # Not awaited: a cancelled task may not wait, and the thread ends only when this is done.
            self.thread.submit(env.close)
        trajectory = episode.trajectory
        trajectory.turns = [Turn(m.role, m.content, (0, 0)) for m in episode.opening] + trajectory.turns
        trajectory.cost = {"environment_s": episode.environment_s, **cost}
        self.each(trajectory)

    async def _turn(self, engine: OpenAIEngine, episode: MessageEpisode, seed: int, cost: dict[str, float]) -> None:
        """Ask for a message and act on it."""
        started = time.perf_counter()
        try:
            reply = await engine.reply(episode.env.messages, episode.env.tools, max_tokens=self.limits.max_message_tokens, seed=seed)
        except ContextFull:
            return await self._beside(partial(episode.cut, "token_budget"))
        finally:
            cost["request_s"] += time.perf_counter() - started
        cost["requests"] += 1
        cost["more_calls"] += reply.more_calls
        used = reply.usage
        if used is not None:
            cost["prompt_tokens"] += used.prompt
            cost["completion_tokens"] += used.completion
            cost["price"] += price(engine.settings, used.prompt, used.completion, used.cached)
        await self._beside(partial(episode.take, reply.message, reply.action, reply.finish))
        if not episode.over and used is not None and used.prompt + used.completion >= self.limits.max_tokens:
            await self._beside(partial(episode.cut, "token_budget"))
        return None

    def _failed(self, engine: OpenAIEngine, error: EndpointError, answered: bool) -> None:
        self.failures = 0 if answered else self.failures + 1
        if self.failures >= engine.settings.failures_in_a_row:
            raise EndpointRefused(f"{engine.base_url}: {self.failures} episodes in a row failed, the last because: {error}")

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)
