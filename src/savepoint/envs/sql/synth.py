"""`savepoint synth`: verified tasks from any SQLite database, as many as one asks for, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from savepoint.envs.sql import databases
from savepoint.envs.sql.bugs import BUGS
from savepoint.envs.sql.bugs import KINDS as SCRIPT_KINDS
from savepoint.envs.sql.deep import DeepMaker, Made
from savepoint.envs.sql.grade import Grader, Limits
from savepoint.envs.sql.part import Part, pick
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.quick import Asks, QuickMaker
from savepoint.envs.sql.renames import RENAMES
from savepoint.envs.sql.reports import Paraphrase
from savepoint.envs.sql.schema import read_schema
from savepoint.envs.sql.shapes import shape_of, split_by_shape
from savepoint.envs.sql.tasks import Task, write_tasks
from savepoint.envs.sql.verify import Images
from savepoint.envs.sql.wording import Wording
from savepoint.errors import UserError
from savepoint.state import Backend, open_backend

Level = Literal["quick", "deep"]

SMALL_FORMS: tuple[str, ...] = ("list", "aggregate", "group", "top")
SMALL_KINDS: tuple[str, ...] = (
    "misspelled_column", "wrong_table", "wrong_aggregate", "missing_group_by", "wrong_comparison", "wrong_direction", "renamed_column"
)  # fmt: skip
QUICK_KINDS: tuple[str, ...] = (*BUGS, *RENAMES)
KINDS: tuple[str, ...] = (*QUICK_KINDS, *SCRIPT_KINDS)
DEEP_ROWS = 5000
_JUDGE_DEADLINE_S = 10.0
_TRIES = 12
_ROUNDS = 60
_STALE = 400


@dataclass(slots=True)
class Tally:
    """How each kind has fared so far: one that gives nothing new several times in a row is left alone from then on."""

    patience: int = 12
    misses: Counter[str] = field(default_factory=Counter)
    exhausted: set[str] = field(default_factory=set)

    def miss(self, kind: str, weight: int = 1) -> None:
        """A round without a task, or a task that is there already."""
        self.misses[kind] += weight
        if self.misses[kind] >= self.patience:
            self.exhausted.add(kind)

    def hit(self, kind: str) -> None:
        """A new task."""
        self.misses[kind] = 0


class Synthesizer:
    """Makes verified tasks over one database, one after another, for as long as one asks.

    level: `quick` draws forms first and tries a task on the database itself; `deep` draws categories and kinds, and tries a task on other images too. forms,
    kinds: names of `FORMS` and `KINDS`; the defaults are what small policies learn. rename_share: the share of debugging tasks on a schema migrated since
    the query was written (by default one half of quick ones, and in deep ones as often as any other kind). task: `both` makes as many generation as
    debugging tasks. part: what questions use; by default picked within `max_tables` and `max_columns`, a simple part where the wording is brief.
    paraphrase: rewords the texts of deep tasks; a wording that loses a name, figure or value is not taken. grader: judges deep tasks, and stays open; one of
    its own by default.

    UserError: no such file, no database, unknown names, a kind or wording that the level does not have, nothing to ask about.
    """

    def __init__(
        self, backend: Backend, path: str | Path, *, level: Level = "quick", forms: Sequence[str] = SMALL_FORMS, kinds: Sequence[str] = SMALL_KINDS,
        rename_share: float | None = None, part: Part | None = None, max_tables: int = 5, max_columns: int = 25, wording: Wording = "brief",
        task: Asks = "debugging", paraphrase: Paraphrase | None = None, grader: Grader | None = None,
    ) -> None:  # fmt: skip
        check_names(forms, kinds, level, wording)
        if rename_share is not None and not 0 <= rename_share <= 1:
            raise UserError(f"rename_share must be between 0 and 1, not {rename_share}")
        path = Path(path)
        self.name = path.stem.removesuffix("_template")
        self.image = backend.import_base(path)
        self.level, self.asks, self.rename_share = level, task, rename_share
        self.images = Images(backend, self.image, owner=f"synth {self.name}", **({"max_rows": DEEP_ROWS} if level == "deep" else {}))
        self.rejected: Counter[str] = Counter()
        schema = read_schema(self.images.rows)
        try:
            self.part = part or pick(schema, max_tables, max_columns, simple=wording == "brief")
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        self.forms = tuple(form for form in forms if FORMS[form](self.part, Random(0)) is not None)
        if not self.forms:
            raise UserError(f"{path}: no query of the forms {', '.join(forms)} can be asked here: allow more forms, tables or columns")
        self._quick = QuickMaker(
            self.name, self.images, self.part, schema, kinds=kinds, forms=self.forms, rename_share=0.5 if rename_share is None else rename_share,
            wording=wording, asks=task,
        )  # fmt: skip
        self._renames = tuple(kind for kind in kinds if kind in RENAMES)
        self._grader = Grader(backend, Limits(deadline_s=_JUDGE_DEADLINE_S)) if level == "deep" and grader is None else None
        self._deep: DeepMaker | None = None
        judge = grader or self._grader
        if level == "deep" and judge is not None:
            others = [kind for kind in kinds if kind not in RENAMES]
            self._deep = DeepMaker(self.name, self.images, self.part, schema, judge.grade, others, self.forms, paraphrase, wording=wording)
            if not self._deep.kinds and not self._renames and task != "generation":
                raise UserError(f"{path}: no place for the kinds {', '.join(kinds)}: allow more kinds, tables or columns")

    def task(self, rng: Random) -> Task:
        """A fresh verified task; it depends on the random numbers alone. UserError when none can be made in many tries."""
        return self.make(rng).task

    def make(self, rng: Random, tally: Tally | None = None) -> Made:
        """As `task`, with what the task is told apart by. tally: hears of rounds without a task, and what it says is exhausted is not drawn."""
        for _ in range(_ROUNDS):
            kind, attempt = self._round(rng, tally)
            if attempt is None:
                break
            for _ in range(_TRIES):
                made = attempt(rng)
                if not isinstance(made, str):
                    return made if isinstance(made, Made) else Made(made, made.instance_id, made.instance_id)
                self.rejected[made] += 1
            if tally is not None:
                tally.miss(kind, 3)
        reasons = ", ".join(f"{reason} ({count})" for reason, count in self.rejected.most_common(3))
        raise UserError(f"{self.name}: no task holds: {reasons or 'no kind of bug applies'}; allow more forms, kinds, tables or columns")

    def _round(self, rng: Random, tally: Tally | None) -> tuple[str, Callable[[Random], Made | Task | str] | None]:
        """The kind of a round, and what it tries; None where every kind is exhausted."""
        deep = self._deep
        if deep is None:
            return "quick", self._quick.attempt(rng)
        if self.asks == "generation" or (self.asks == "both" and rng.random() < 0.5):
            return "query", deep.generation
        exhausted = tally.exhausted if tally is not None else frozenset()
        renames = [kind for kind in self._renames if kind not in exhausted]
        if self.rename_share is None:
            kind = deep.choose(rng, renames, exhausted)
        elif renames and rng.random() < self.rename_share:
            kind = rng.choice(renames)
        else:
            kind = deep.choose(rng, (), exhausted)
        if kind is None:
            return "", None
        return kind, partial(self._migrated, kind) if kind in RENAMES else partial(deep.debugging, kind)

    def _migrated(self, kind: str, rng: Random) -> Made | str:
        """A deep task on a schema that was migrated since."""
        assert self._deep is not None
        query = FORMS[rng.choice(self.forms)](self.part, rng)
        task = self._quick.renamed(query, rng, (kind,)) if query is not None else "no query of this form"
        if isinstance(task, str):
            return task
        if task.category != kind:
            return "the kind does not apply"
        return self._deep.finished(replace(task, category="Query", tags=(kind, *task.tags)))

    def describe(self) -> dict[str, Any]:
        """What tasks are made from, for summaries: name, digest and size (bytes) of the database, columns used by table, and what was left out and why."""
        tables = {table.name: [column.name for column in table.columns] for table in self.part.tables}
        return {"name": self.name, "digest": self.image.digest, "size": self.image.size, "tables": tables, "left_out": dict(self.part.left_out)}

    @property
    def impossible(self) -> tuple[str, ...]:
        """Kinds that were asked for and that this database has no place for."""
        return self._deep.impossible if self._deep is not None else ()

    def close(self) -> None:
        """Give back the leased sessions."""
        self.images.close()
        if self._grader is not None:
            self._grader.close()


def check_names(forms: Sequence[str], kinds: Sequence[str], level: Level = "quick", wording: Wording = "plain") -> None:
    """UserError for a form or kind that there is none of (with those that there are), for none at all, and for what a level does not have."""
    for what, given, known in (("form", forms, tuple(FORMS)), ("kind", kinds, KINDS)):
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None or not given:
            wrong = f"unknown {what} {unknown!r}" if unknown is not None else f"no {what} given"
            raise UserError(f"{wrong}: known are {', '.join(known)}")
    wordless = next((kind for kind in kinds if kind not in QUICK_KINDS), None)
    if level == "deep" and wording == "brief" and wordless is not None:
        raise UserError(f"brief wording has no words for kind {wordless!r}: choose among {', '.join(QUICK_KINDS)}, or plain wording")
    deep = next((kind for kind in kinds if kind not in QUICK_KINDS), None)
    if level == "quick" and deep is not None:
        raise UserError(f"kind {deep!r} needs level deep: quick are {', '.join(QUICK_KINDS)}")


def distinct_tasks(source: Synthesizer, n: int, *, seed: int, each: Callable[[int], None] = lambda done: None) -> list[Task]:
    """`n` different tasks: no two with the same SQL in normal form, nor of one kind with the same results. `each` hears how many are done, and may raise to
    stop. UserError when the database has not that many."""
    if n <= 0:
        raise UserError(f"n must be at least 1, not {n}")
    rng, tally, stale = Random(seed), Tally(), 0
    tasks: dict[str, Task] = {}
    seen: set[str] = set()
    while len(tasks) < n:
        each(len(tasks))
        try:
            made = source.make(rng, tally)
        except UserError:
            if not tasks:
                raise
            stale = _STALE
        else:
            kind, keys = str(made.task.synth["kind"]), {made.task.instance_id, made.normal, made.results}
            stale = stale + 1 if keys & seen else 0
            if stale:
                source.rejected["is there already"] += 1
                tally.miss(kind)
            else:
                tally.hit(kind)
                tasks[made.task.instance_id] = made.task
            seen |= keys
        if stale >= _STALE:
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
    database: str | Path, n: int, out: str | Path, *, seed: int = 0, task: Asks = "debugging", level: Level | None = None,
    forms: Sequence[str] | None = None, kinds: Sequence[str] | None = None, rename_share: float | None = None, wording: Wording = "plain",
    max_tables: int = 50, max_columns: int = 400, heldout: str | Path | None = None, heldout_share: float = 0.2, force: bool = False,
    store: str | Path | None = None, paraphrase: Paraphrase | None = None, each: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:  # fmt: skip
    """Write `n` tasks over `database` (a file, or the name of an embedded one, which is then put beside `out`) to the file `out`, and say what was made.

    level: by default deep, quick for brief wording. forms, kinds: None for all that the level has. heldout: a second file, which gets about `heldout_share` of
    the tasks, of other shapes than those in `out`. UserError for bad input, and for an `out` that is there already unless `force`; then nothing is written.
    """
    out, heldout = Path(out), None if heldout is None else Path(heldout)
    level = level or ("quick" if wording == "brief" else "deep")
    forms, kinds = (tuple(FORMS) if forms is None else forms), (QUICK_KINDS if level == "quick" else KINDS) if kinds is None else kinds
    check_names(forms, kinds, level, wording)
    _check_files(n, [out] if heldout is None else [out, heldout], heldout_share, force)
    rename_share = 0.3 if rename_share is None and level == "quick" else rename_share
    path = databases.place(str(database), out.parent) if str(database) in databases.names() else Path(database)
    with open_backend("sqlite", store=store) as backend:
        source = Synthesizer(
            backend, path, level=level, forms=forms, kinds=kinds, rename_share=rename_share, max_tables=max_tables, max_columns=max_columns, wording=wording,
            task=task, paraphrase=paraphrase,
        )
        try:
            tasks = distinct_tasks(source, n, seed=seed, each=each)
        finally:
            source.close()
    train, held = (tasks, []) if heldout is None else split_by_shape(tasks, heldout_share, seed=seed)
    write_tasks(out, train)
    if heldout is not None:
        write_tasks(heldout, held)
    return {
        "command": "synth", "database": str(path), "out": str(out), "written": len(train), "heldout": None if heldout is None else str(heldout),
        "heldout_written": len(held), "shapes": len({shape_of(t) for t in tasks}), "seed": seed, "level": level,
        "categories": _counts(t.category for t in tasks), "difficulties": _counts(t.difficulty for t in tasks),
        "kinds": _counts(t.synth["kind"] for t in tasks), "forms": _counts(t.synth["form"] for t in tasks), "tasks": _counts(t.task for t in tasks),
        "impossible": list(source.impossible), "rejected": dict(source.rejected.most_common()), "part": source.part.describe(), "source": source.describe(),
    }  # fmt: skip


def _check_files(n: int, files: Sequence[Path], heldout_share: float, force: bool) -> None:
    """UserError for a number or files that cannot be written."""
    if n <= 0:
        raise UserError(f"n must be at least 1, not {n}")
    if not 0 < heldout_share < 1:
        raise UserError(f"heldout_share must be between 0 and 1, not {heldout_share}")
    if len(set(files)) < len(files):
        raise UserError(f"{files[0]}: the held-out tasks need a file of their own")
    for file in files:
        if file.exists() and not force:
            raise UserError(f"{file}: exists already (--force replaces it)")
        if not file.parent.is_dir():
            raise UserError(f"{file.parent}: no such folder")


def _counts(items: Any) -> dict[str, int]:
    return dict(sorted(Counter(items).items(), key=lambda item: (-item[1], str(item[0]))))
