"""`savepoint synth`: verified tasks from any SQLite database, as many as one asks for, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal

from savepoint.envs.sql import databases
from savepoint.envs.sql.bugs import BUGS, break_query
from savepoint.envs.sql.part import Part, pick
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.query import Query
from savepoint.envs.sql.renames import RENAMES, Rename, candidates
from savepoint.envs.sql.schema import quote, read_schema
from savepoint.envs.sql.tasks import Task, TaskKind, write_tasks
from savepoint.envs.sql.verify import Images, doubt
from savepoint.envs.sql.wording import Wording, issue_text, request_text
from savepoint.errors import UserError
from savepoint.state import Backend, open_backend

SMALL_FORMS: tuple[str, ...] = ("list", "aggregate", "group", "top")
SMALL_KINDS: tuple[str, ...] = (
    "misspelled_column", "wrong_table", "wrong_aggregate", "missing_group_by", "wrong_comparison", "wrong_direction", "renamed_column"
)  # fmt: skip
KINDS: tuple[str, ...] = (*BUGS, *RENAMES)
_TRIES_A_FORM = 12
_ROUNDS = 60
_STALE = 400


class Synthesizer:
    """Makes verified tasks over one database, one after another, for as long as one asks.

    forms, kinds: names of `FORMS` and `KINDS`; the defaults are what small policies learn. rename_share: the share of debugging tasks on a schema migrated
    since the query was written (1 where `kinds` has renames only; renamed columns where it has none). task: `both` makes as many generation as debugging
    tasks. part: what questions use; by default picked within `max_tables` and `max_columns`, a simple part where the wording is brief.
    UserError: no such file, no database, unknown names, nothing to ask about.
    """

    def __init__(
        self, backend: Backend, path: str | Path, *, forms: Sequence[str] = SMALL_FORMS, kinds: Sequence[str] = SMALL_KINDS, rename_share: float = 0.5,
        part: Part | None = None, max_tables: int = 5, max_columns: int = 25, wording: Wording = "brief",
        task: Literal["debugging", "generation", "both"] = "debugging",
    ) -> None:  # fmt: skip
        check_names(forms, kinds)
        if not 0 <= rename_share <= 1:
            raise UserError(f"rename_share must be between 0 and 1, not {rename_share}")
        path = Path(path)
        self.name = path.stem.removesuffix("_template")
        self.image = backend.import_base(path)
        self.wording, self.asks = wording, task
        self.images = Images(backend, self.image, owner=f"synth {self.name}")
        self.rejected: Counter[str] = Counter()
        schema = read_schema(self.images.rows)
        try:
            self.part = part or pick(schema, max_tables, max_columns, simple=wording == "brief")
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        self.forms = tuple(form for form in forms if FORMS[form](self.part, Random(0)) is not None)
        if not self.forms:
            raise UserError(f"{path}: no query of the forms {', '.join(forms)} can be asked here: allow more forms, tables or columns")
        self.bugs = tuple(kind for kind in kinds if kind in BUGS)
        self.renames = tuple(kind for kind in kinds if kind in RENAMES) or RENAMES[:1]
        self.rename_share = rename_share if self.bugs else 1.0
        self._candidates = candidates(schema)

    def task(self, rng: Random) -> Task:
        """A fresh verified task. UserError when none can be made in many tries."""
        for _ in range(_ROUNDS):
            form = rng.choice(self.forms)
            kind: TaskKind = "generation" if self.asks == "generation" or (self.asks == "both" and rng.random() < 0.5) else "debugging"
            make = self._generation if kind == "generation" else self._renamed if rng.random() < self.rename_share else self._broken
            for _ in range(_TRIES_A_FORM):
                query = FORMS[form](self.part, rng)
                made = make(query, rng) if query is not None else "no query of this form"
                if isinstance(made, Task):
                    return made
                self.rejected[made] += 1
        reasons = ", ".join(f"{reason} ({count})" for reason, count in self.rejected.most_common(3))
        raise UserError(f"{self.name}: no task holds: {reasons or 'no kind of bug applies'}; allow more forms, kinds, tables or columns")

    def describe(self) -> dict[str, Any]:
        """What tasks are made from, for summaries: name, digest and size (bytes) of the database, columns used by table, and what was left out and why."""
        tables = {table.name: [column.name for column in table.columns] for table in self.part.tables}
        return {"name": self.name, "digest": self.image.digest, "size": self.image.size, "tables": tables, "left_out": dict(self.part.left_out)}

    def close(self) -> None:
        """Give back the leased sessions."""
        self.images.close()

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

    def _renamed(self, query: Query, rng: Random) -> Task | str:
        """The query was right until a column (or table) that it uses was renamed: the user's SQL is in old names, the gold in new ones."""
        places: list[tuple[str, str | None]] = []
        if "renamed_column" in self.renames:
            places += [ref for ref in query.refs if ref in self._candidates]
        if "renamed_table" in self.renames and (not places or rng.random() < 0.25):
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


def check_names(forms: Sequence[str], kinds: Sequence[str]) -> None:
    """UserError for a form or kind that there is none of (with those that there are), or for none at all."""
    for what, given, known in (("form", forms, tuple(FORMS)), ("kind", kinds, KINDS)):
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None or not given:
            wrong = f"unknown {what} {unknown!r}" if unknown is not None else f"no {what} given"
            raise UserError(f"{wrong}: known are {', '.join(known)}")


def distinct_tasks(source: Synthesizer, n: int, *, seed: int, each: Callable[[int], None] = lambda done: None) -> list[Task]:
    """`n` different tasks. `each` hears how many are done, and may raise to stop. UserError when the database has not that many."""
    if n <= 0:
        raise UserError(f"n must be at least 1, not {n}")
    rng, tasks, stale = Random(seed), dict[str, Task](), 0
    while len(tasks) < n:
        each(len(tasks))
        task = source.task(rng)
        stale = stale + 1 if task.instance_id in tasks else 0
        tasks[task.instance_id] = task
        if stale == _STALE:
            raise UserError(
                f"{source.name}: only {len(tasks)} different tasks of {n} can be made: ask for fewer, or allow more forms, kinds, tables or columns"
            )
    return list(tasks.values())


def synthesize(database: str | Path, n: int, *, seed: int = 0, backend: Backend | None = None, **settings: Any) -> list[Task]:
    """`n` different verified tasks over a SQLite file; the same for the same seed and settings (those of `Synthesizer`)."""
    if backend is None:
        with open_backend("sqlite") as own:
            return synthesize(database, n, seed=seed, backend=own, **settings)
    source = Synthesizer(backend, database, **settings)
    try:
        return distinct_tasks(source, n, seed=seed)
    finally:
        source.close()


def synth_command(
    database: str | Path, n: int, out: str | Path, *, seed: int = 0, task: Literal["debugging", "generation", "both"] = "debugging",
    forms: Sequence[str] | None = None, kinds: Sequence[str] | None = None, rename_share: float = 0.3, wording: Wording = "plain",
    max_tables: int = 50, max_columns: int = 400, force: bool = False, store: str | Path | None = None, each: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:  # fmt: skip
    """Write `n` tasks over `database` (a file, or the name of an embedded one, which is then put beside `out`) to the file `out`, and say what was made.

    forms, kinds: None for all. UserError for bad input, and for an `out` that is there already unless `force`; then nothing is written.
    """
    out = Path(out)
    forms, kinds = (tuple(FORMS) if forms is None else forms), (KINDS if kinds is None else kinds)
    check_names(forms, kinds)
    if n <= 0:
        raise UserError(f"n must be at least 1, not {n}")
    if out.exists() and not force:
        raise UserError(f"{out}: exists already (--force replaces it)")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder")
    path = databases.place(str(database), out.parent) if str(database) in databases.names() else Path(database)
    with open_backend("sqlite", store=store) as backend:
        source = Synthesizer(
            backend, path, forms=forms, kinds=kinds, rename_share=rename_share, max_tables=max_tables, max_columns=max_columns, wording=wording, task=task
        )
        try:
            tasks = distinct_tasks(source, n, seed=seed, each=each)
        finally:
            source.close()
    write_tasks(out, tasks)
    return {
        "command": "synth", "database": str(path), "out": str(out), "written": len(tasks), "seed": seed,
        "kinds": _counts(t.category for t in tasks), "forms": _counts(t.synth["form"] for t in tasks), "tasks": _counts(t.task for t in tasks),
        "rejected": dict(source.rejected.most_common()), "part": source.part.describe(), "source": source.describe(),
    }  # fmt: skip


def _counts(items: Any) -> dict[str, int]:
    return dict(sorted(Counter(items).items(), key=lambda item: (-item[1], str(item[0]))))
