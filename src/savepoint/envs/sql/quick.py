"""Quick tasks: small typed queries with one of ten bugs, or on a schema that was migrated since. A fraction of a millisecond each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, Literal

from savepoint.envs.sql.bugs import BUGS, break_query
from savepoint.envs.sql.part import Part
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.query import Query
from savepoint.envs.sql.renames import RENAMES, Rename, candidates
from savepoint.envs.sql.schema import Schema, quote
from savepoint.envs.sql.tasks import Task, TaskKind
from savepoint.envs.sql.verify import Images, doubt
from savepoint.envs.sql.wording import Wording, issue_text, request_text

Asks = Literal["debugging", "generation", "both"]


class QuickMaker:
    """Makes quick tasks over one database: one of `forms`, then a question, a bug, or (a `rename_share` of the debugging tasks) a migration."""

    def __init__(
        self, name: str, images: Images, part: Part, schema: Schema, *, kinds: Sequence[str], forms: Sequence[str], rename_share: float, wording: Wording,
        asks: Asks,
    ) -> None:  # fmt: skip
        self.name, self.images, self.image, self.part = name, images, images.base, part
        self.forms, self.wording, self.asks = tuple(forms), wording, asks
        self.bugs = tuple(kind for kind in kinds if kind in BUGS)
        self.renames = tuple(kind for kind in kinds if kind in RENAMES) or RENAMES[:1]
        self.rename_share = rename_share if self.bugs else 1.0
        self._candidates = candidates(schema)

    def attempt(self, rng: Random) -> Callable[[Random], Task | str]:
        """What a few tries in a row are to make: a form, and a question, a bug or a migration on it."""
        form = rng.choice(self.forms)
        generation = self.asks == "generation" or (self.asks == "both" and rng.random() < 0.5)
        make = self._generation if generation else self.renamed if rng.random() < self.rename_share else self._broken

        def attempt(rng: Random) -> Task | str:
            query = FORMS[form](self.part, rng)
            return make(query, rng) if query is not None else "no query of this form"

        return attempt

    # Each of these makes a task of a query, or says in a few words why it must not be kept.

    def _broken(self, query: Query, rng: Random) -> Task | str:
        made = break_query(query, self.part, self.bugs, rng)
        if made is None:
            return "no kind of bug applies"
        kind, broken = made
        issue = broken.sql()
        why = doubt(self.images, self.image, query, issue)
        if why is not None:
            return why
        failed = self.images.answer(self.image, issue).status == "sql_error"
        text = issue_text(query, self.wording, "error" if failed else "wrong", rng)
        return self._task("debugging", query, text, kind, {}, issue=issue, gold=query)

    def renamed(self, query: Query, rng: Random, kinds: Sequence[str] = ()) -> Task | str:
        """The query was right until a column (or table) that it uses was renamed: the user's SQL is in old names, the gold in new ones."""
        kinds = kinds or self.renames
        places: list[tuple[str, str | None]] = []
        if "renamed_column" in kinds:
            places += [ref for ref in query.refs if ref in self._candidates]
        if "renamed_table" in kinds and (not places or rng.random() < 0.25):
            places = [(table, None) for table in query.tables if (table, None) in self._candidates]
        if not places:
            return "nothing to rename"
        table, column = rng.choice(places)
        options = [Rename(table, column, new) for new in self._candidates[table, column]]
        rename = rng.choice(options)
        image = self.images.derived(rename.sql)
        if image is None:
            return "the migration fails"
        gold = query.renamed(rename)
        why = doubt(self.images, image, gold, query.sql(), must_fail=True)
        if why is not None:
            return why
        facts = {
            "table": quote(table), "old": rename.old, "new": rename.new,
            "candidates": [option.new for option in options], "guesses": [query.renamed(option).sql() for option in options],
        }  # fmt: skip
        text = issue_text(query, self.wording, "migrated", rng)
        return self._task("debugging", query, text, rename.kind, facts, issue=query.sql(), gold=gold, setup=(rename.sql,))

    def _generation(self, query: Query, rng: Random) -> Task | str:
        why = doubt(self.images, self.image, query, None)
        if why is not None:
            return why
        return self._task("generation", query, request_text(query, self.wording), "query", {}, gold=query)

    def _task(
        self, task: TaskKind, query: Query, text: str, kind: str, facts: dict[str, Any], *, gold: Query, issue: str | None = None, setup: tuple[str, ...] = ()
    ) -> Task:
        sql = gold.sql()
        content = "\0".join((task, text, issue or "", sql, *setup))
        return Task(
            instance_id=f"{self.name}-{blake2b(content.encode(), digest_size=6).hexdigest()}", task=task, db_id=self.name, query=text, sol_sql=(sql,),
            issue_sql=(issue,) if issue else (), preprocess_sql=setup, conditions={"order": True} if query.order else {}, category=kind,
            difficulty="moderate" if query.join else "simple", tags=(query.form,),
            synth={"kind": kind, "form": query.form, "tables": list(query.tables), **facts},
        )  # fmt: skip
