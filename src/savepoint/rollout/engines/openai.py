"""Any OpenAI-compatible chat endpoint, through the `openai` client: one message at a time, with its tool calls as published.

What an endpoint does wrong is never the agent's mistake: a request that fails for good is an EndpointError (that episode is `infra`), and one
that every later request would share is an EndpointRefused (the evaluation stops, and what is done is kept). The client's own retries are
off: those here are counted, wait no shorter than the endpoint asks, and give up where it asks for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from savepoint.config import Settings, build
from savepoint.envs.messages import Message
from savepoint.envs.tools import Tool
from savepoint.errors import UserError
from savepoint.rollout.engines.replies import WITHHELD, Reply, UnreadableReply, endpoint_messages, read_reply

OFFICIAL = "https://api.openai.com/v1"
_PASSING = frozenset({408, 409, 425, 429})
_TOO_LONG = re.compile(r"context.{0,3}(length|window|size)|maximum context|too many (input )?tokens|(prompt|input) is too long", re.IGNORECASE)


class EndpointError(Exception):
    """A request failed for good, after its retries. `str()` is one line without any key in it."""


class EndpointRefused(UserError):
    """The endpoint refuses this key, this model or this address: no later request would fare better."""


class ContextFull(EndpointError):
    """The conversation is longer than the model can read."""


class EndpointSettings(Settings):
    """An endpoint, how patiently it is asked, and what it charges. The key itself is in no setting: only the name of its variable."""

    base_url: str | None = Field(None, description="address of an OpenAI-compatible endpoint (default: $OPENAI_BASE_URL, else OpenAI's own)")
    key_variable: str = Field("OPENAI_API_KEY", min_length=1, description="environment variable that holds the key")
    concurrency: int = Field(8, ge=1, le=1024, description="requests at a time")
    request_seconds: float = Field(120.0, gt=0, description="deadline of one request, from asking to the last byte")
    retries: int = Field(6, ge=0, description="attempts more at a request that failed in passing (no connection, too slow, nonsense, 408, 409, 425, 429, 5xx)")
    first_wait_seconds: float = Field(0.5, ge=0, description="wait before the first retry; doubled for each further one, less up to half of it at random")
    longest_wait_seconds: float = Field(60.0, ge=0, description="longest wait before a retry; an endpoint that asks for longer (Retry-After) has failed")
    failures_in_a_row: int = Field(20, ge=1, description="so many failed episodes without a good one between them end the evaluation")
    limit_field: str | None = Field(None, description="field that limits a message's tokens (default: max_completion_tokens at OpenAI's own, else max_tokens)")
    price_in: float = Field(0.0, ge=0, description="price of a million prompt tokens")
    price_cached: float | None = Field(None, ge=0, description="price of a million cached prompt tokens (default: as the others)")
    price_out: float = Field(0.0, ge=0, description="price of a million completion tokens")
    extra: dict[str, Any] = Field(default_factory=dict, description="further fields of every request, e.g. {parallel_tool_calls = false}")

    @field_validator("base_url")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        parts = urlsplit(value or OFFICIAL)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an address that begins with http:// or https://")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must not hold credentials or a query: the key comes from the environment")
        return value


class OpenAIEngine:
    """Asks a chat endpoint for the policy's messages. Make it and use it inside one event loop; close it there.

    `counts` adds up over its life: requests (attempts that were sent), retries, prompt, completion and cached tokens, unmetered (answers without usage).
    UserError as `resolve`.
    """

    def __init__(self, model: str, settings: EndpointSettings, *, temperature: float = 1.0, environment: Mapping[str, str] | None = None) -> None:
        self.model, self.settings, self.temperature = model, settings, temperature
        self.base_url, key = resolve(settings, environment)
        self.counts = dict.fromkeys(("requests", "retries", "prompt", "completion", "cached", "unmetered"), 0)
        self._key = key
        self._client = _client(self.base_url, key)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._jitter = random.Random()

    async def reply(self, messages: Sequence[Message], tools: Sequence[Tool], *, max_tokens: int, seed: int) -> Reply:
        """The policy's next message. EndpointError, ContextFull or EndpointRefused where there is none."""
        limit = self.settings.limit_field or ("max_completion_tokens" if self.base_url == OFFICIAL else "max_tokens")
        body: dict[str, Any] = {"model": self.model, "messages": endpoint_messages(messages), "tools": [tool.schema() for tool in tools]}
        # As `extra_body`, so that a field the client does not know by name goes through as well.
        body["extra_body"] = {"temperature": self.temperature, "seed": seed, limit: max_tokens, **self.settings.extra}
        async with self._slots:
            for attempt in range(self.settings.retries + 1):
                self.counts["requests"] += 1
                self.counts["retries"] += attempt > 0
                try:
                    return self._count(await self._ask(body))
                except _Passing as failure:
                    last = failure
                if attempt < self.settings.retries:
                    await asyncio.sleep(self._wait(attempt, last))
        raise EndpointError(f"{last} ({self.settings.retries + 1} attempts)")

    def cost(self) -> float:
        """What all tokens so far cost, in the currency of the prices."""
        return price(self.settings, self.counts["prompt"], self.counts["completion"], self.counts["cached"])

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, body: dict[str, Any]) -> Reply:
        """One attempt."""
        import openai

        try:
            async with asyncio.timeout(self.settings.request_seconds):
                raw = await self._client.chat.completions.with_raw_response.create(**body)
            return read_reply(json.loads(raw.content))
        except (TimeoutError, openai.APITimeoutError):
            raise _Passing(f"no answer within {self.settings.request_seconds:g} s") from None
        except openai.APIStatusError as error:
            return self._refusal(error)
        except openai.APIConnectionError as error:
            raise _Passing(self._clean(f"cannot be reached: {_root(error)}")) from None
        except UnreadableReply as error:
            raise _Passing(self._clean(str(error))) from None
        except (ValueError, RecursionError):
            raise _Passing("the answer is not JSON") from None

    def _refusal(self, error: Any) -> Reply:
        """What a status of 400 or more means. Only a refusal by a content filter is an answer."""
        status, code = error.status_code, str(error.code or "")
        said = self._clean(_said(error))
        if status in (401, 403):
            # What an endpoint says about a key may quote a part of it.
            raise EndpointRefused(f"{self.base_url} refuses the key in {self.settings.key_variable} (status {status})") from None
        if status == 402 or code == "insufficient_quota":
            raise EndpointRefused(f"{self.base_url} has no credit left for the key in {self.settings.key_variable} (status {status})") from None
        if status == 404:
            raise EndpointRefused(f"{self.base_url} knows no model {self.model!r}, or is no chat endpoint (status 404: {said})") from None
        if status in _PASSING or status >= 500:
            raise _Passing(f"status {status}: {said}", _retry_after(error.response.headers)) from None
        if "content_filter" in code:
            return WITHHELD
        if code == "context_length_exceeded" or status == 413 or _TOO_LONG.search(said):
            raise ContextFull(f"status {status}: {said}") from None
        raise EndpointError(f"status {status}: {said}") from None

    def _wait(self, attempt: int, failure: _Passing) -> float:
        """Seconds before the next attempt: exponential with jitter, and never less than the endpoint asks for."""
        longest = self.settings.longest_wait_seconds
        if failure.retry_after > longest:
            raise EndpointError(f"{failure} (it asks to wait {failure.retry_after:.0f} s, more than {longest:g})")
        wait = min(self.settings.first_wait_seconds * 2.0 ** min(attempt, 30), longest)
        return max(failure.retry_after, wait * (1 - self._jitter.random() / 2))

    def _count(self, reply: Reply) -> Reply:
        if reply.usage is None:
            self.counts["unmetered"] += 1
        else:
            for name in ("prompt", "completion", "cached"):
                self.counts[name] += getattr(reply.usage, name)
        return reply

    def _clean(self, text: str) -> str:
        """One short line without the key."""
        line = " ".join(text.split())
        line = line.replace(self._key, "[key]") if self._key else line
        return line if len(line) <= 300 else f"{line[:300]}..."


class _Passing(Exception):
    """An attempt failed in a way that may pass. retry_after: seconds that the endpoint asks to wait."""

    def __init__(self, text: str, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


def resolve(settings: EndpointSettings, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The endpoint's address and the key for it ("" where it needs none), as settings and environment have them.

    UserError for a key that is needed and missing: OpenAI's own endpoint needs one, and any whose variable was named on purpose.
    """
    environment = os.environ if environment is None else environment
    named = environment.get("OPENAI_BASE_URL") or OFFICIAL
    base_url = settings.base_url or str(build(EndpointSettings, {"base_url": named}, source="OPENAI_BASE_URL").base_url)
    key = environment.get(settings.key_variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{settings.key_variable}: holds characters that no key has")
    if not key and (base_url == OFFICIAL or settings.key_variable != "OPENAI_API_KEY"):
        raise UserError(f"no key for {base_url}: set {settings.key_variable} in the environment")
    return base_url, key


def price(settings: EndpointSettings, prompt: int, completion: int, cached: int = 0) -> float:
    """What tokens cost; `cached` are among those of `prompt`."""
    cached_price = settings.price_in if settings.price_cached is None else settings.price_cached
    return ((prompt - cached) * settings.price_in + cached * cached_price + completion * settings.price_out) / 1e6


def _client(base_url: str, key: str) -> Any:
    from openai import AsyncOpenAI  # a second's import, and only evaluation at an endpoint needs it

    # A server of one's own needs no key, but the client insists on one.
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, max_retries=0, timeout=None)


def _said(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def _root(error: BaseException) -> str:
    """The innermost cause, where the operating system says what happened."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error) or type(error).__name__


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that `Retry-After` (a number of seconds, or a date) or `retry-after-ms` asks to wait; 0 where neither is there or readable."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError, TypeError):
            seconds = float(headers.get(name, "")) / unit
            if math.isfinite(seconds) and seconds >= 0:
                return seconds
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    return 0.0
