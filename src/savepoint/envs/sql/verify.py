"""Verification by execution: a task is kept when its gold gives a definite, non-empty answer and its buggy SQL does not give that answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from savepoint.envs.sql.compare import difference
from savepoint.envs.sql.query import Query
from savepoint.envs.sql.schema import QueryFailed, SqlValue
from savepoint.state import AnySession, Backend, BaseImage, ExecResult, Quota, SetupError

Rows = tuple[tuple[SqlValue, ...], ...]

MAX_ROWS = 1000
DEADLINE_S = 2.0
SETUP_DEADLINE_S = 30.0
_CACHED_ROWS = 200_000
_CACHED_ANSWERS = 50_000
_OPEN_SESSIONS = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """What one statement gave: rows, or how it failed (`sql_error` is the SQL's own fault; other statuses are ours or the limits'). steps: VM steps."""

    status: str
    rows: Rows = ()
    error: str = ""
    steps: int = 0


class Images:
    """Runs read-only SQL on a base image and on images derived from it. Answers are cached by (image digest, exact SQL)."""

    def __init__(self, backend: Backend, base: BaseImage, owner: str, max_rows: int = MAX_ROWS) -> None:
        self.backend, self.base, self.owner, self.max_rows = backend, base, owner, max_rows
        self._derived: dict[tuple[str, ...], BaseImage | None] = {}
        self._sessions: OrderedDict[str, AnySession] = OrderedDict()
        self._answers: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._rows = 0

    def derived(self, *setup: str, of: BaseImage | None = None) -> BaseImage | None:
        """The base image (or another, `of`) after set-up statements, made when it is first asked for; None where one of them fails on it."""
        start = of or self.base
        key = (start.digest, *setup)
        if key not in self._derived:
            try:
                self._derived[key] = self.backend.derive(start, list(setup)) if setup else start
            except SetupError:
                self._derived[key] = None
        return self._derived[key]

    def possible(self, statements: Sequence[str]) -> list[str]:
        """Those of the statements that run on the base image, one after another."""
        with self.lease(self.base) as session:
            return [sql for sql in statements if session.execute(sql, deadline_s=SETUP_DEADLINE_S).status == "ok"]

    def answer(self, image: BaseImage, sql: str) -> Answer:
        """What the statement gives on the image. A failure of our own infrastructure raises, and is never an answer."""
        key = (image.digest, sql)
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
            return found
        return self._take(key, self._session(image).execute(sql, deadline_s=DEADLINE_S, max_rows=self.max_rows, readonly=True))

    def answer_soon(self, image: BaseImage, statements: Sequence[str]) -> None:
        """Run in one call what `answer` is about to be asked for: a call to another process is not for nothing."""
        unknown = [sql for sql in dict.fromkeys(statements) if (image.digest, sql) not in self._answers]
        if len(unknown) > 1:
            results = self._session(image).execute_all(unknown, deadline_s=DEADLINE_S, max_rows=self.max_rows, readonly=True)
            for sql, result in zip(unknown, results, strict=False):
                self._take((image.digest, sql), result)

    def _take(self, key: tuple[str, str], result: ExecResult) -> Answer:
        if result.status == "infra":
            raise RuntimeError(f"{self.owner}: {result.error}")
        status = "too_big" if result.status == "ok" and result.truncated else result.status
        found = Answer(status, result.rows if status == "ok" else (), result.error or "", result.vm_steps)
        self._keep(key, found)
        return found

    def lease(self, image: BaseImage) -> AnySession:
        """A session of its own on an image, for what changes it."""
        return self.backend.lease(image, owner=self.owner, quota=Quota(length=64 << 20))

    def rows(self, sql: str) -> Rows:
        """All rows of a query of our own on the base image. Raises QueryFailed."""
        result = self._session(self.base).execute(sql, deadline_s=60.0, max_rows=1_000_000, max_bytes=1 << 30, readonly=True)
        if result.status != "ok" or result.truncated:
            raise QueryFailed(result.error or result.status)
        return result.rows

    def close(self) -> None:
        """Give back the leased sessions."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _session(self, image: BaseImage) -> AnySession:
        session = self._sessions.get(image.digest)
        if session is None:
            session = self.backend.lease(image, owner=self.owner, quota=Quota(length=64 << 20), ttl_s=None)
            self._sessions[image.digest] = session
            if len(self._sessions) > _OPEN_SESSIONS:
                self._sessions.popitem(last=False)[1].close()
        else:
            self._sessions.move_to_end(image.digest)
        return session

    def _keep(self, key: tuple[str, str], answer: Answer) -> None:
        self._answers[key] = answer
        self._rows += len(answer.rows)
        while self._rows > _CACHED_ROWS or len(self._answers) > _CACHED_ANSWERS:
            self._rows -= len(self._answers.popitem(last=False)[1].rows)


def doubt(images: Images, image: BaseImage, gold: Query, issue_sql: str | None, *, must_fail: bool = False) -> str | None:
    """Why a task must not be kept, in a few words; None when it may be.

    gold: the right query in the names of `image`. issue_sql: the buggy statement, None for a generation task. must_fail: it must end in an error (an old name
    after a migration), not merely give another answer.
    """
    longer = [] if gold.limit is None else [replace(gold, limit=gold.limit + 1).sql()]
    images.answer_soon(image, [gold.sql(), *longer, *([issue_sql] if issue_sql is not None else [])])
    right = images.answer(image, gold.sql())
    if right.status != "ok":
        return "gold too big" if right.status in ("too_big", "timeout") else "gold fails"
    if not right.rows or (gold.aggregate and not gold.group and right.rows[0][-1] is None):
        return "gold empty"
    if gold.limit is not None and _ambiguous(images, image, gold):
        return "gold cuts a tie"
    if issue_sql is None:
        return None
    wrong = images.answer(image, issue_sql)
    if wrong.status == "sql_error":
        return None
    if wrong.status != "ok":
        return "issue too big"
    if must_fail or difference(wrong.rows, right.rows, ordered=gold.order is not None) is None:
        return "issue does not fail"
    return None


def _ambiguous(images: Images, image: BaseImage, gold: Query) -> bool:
    """Whether an ordered, limited query leaves open which rows it gives, or in which order: equal keys, up to the first row cut off, or NULL keys."""
    assert gold.limit is not None and gold.order is not None
    rows = images.answer(image, replace(gold, limit=gold.limit + 1).sql()).rows
    keys = [row[gold.select.index(gold.order[0])] for row in rows]
    return None in keys or len(set(keys)) < len(keys)
