"""Deep tasks: every kind of bug in all four categories, graded by difficulty, each tried on several images of the database before it is kept."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random
from typing import Any

from sqlglot import exp

from savepoint.envs.sql import reports
from savepoint.envs.sql.bugs import BUGS, CATEGORIES, KINDS, Category, Draft, Ground, Kind, break_query
from savepoint.envs.sql.bugs.draft import parse
from savepoint.envs.sql.compare import orders_rows
from savepoint.envs.sql.part import Part
from savepoint.envs.sql.perturb import other_images
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.schema import Schema
from savepoint.envs.sql.shapes import normal_form, shape_of
from savepoint.envs.sql.tasks import Task, TaskKind
from savepoint.envs.sql.trials import Judge, Trial, Trials
from savepoint.envs.sql.verify import Images, doubt
from savepoint.envs.sql.wording import Wording, question

SHARES: dict[Category, int] = {"Query": 57, "Management": 20, "Personalization": 10, "Efficiency": 13}
"""How readily each category is drawn, about as often as it is met in BIRD-CRITIC."""

_DRAWS_TO_SEE = 40
_TYPED_SUBTLETY = {"misspelled_column": 0, "wrong_table": 0, "lost_condition": 1, "wrong_join_key": 1}


@dataclass(frozen=True, slots=True)
class Made:
    """A task, and what it is told apart by: its SQL in normal form, and a digest of what its gold and its issue gave (with the kind of bug)."""

    task: Task
    normal: str
    results: str


class DeepMaker:
    """Makes deep tasks over one database. `kinds`: those that its tables have a place for; others are in `impossible`."""

    def __init__(
        self, name: str, images: Images, part: Part, schema: Schema, judge: Judge, kinds: Sequence[str], forms: Sequence[str],
        paraphrase: reports.Paraphrase | None = None, *, wording: Wording = "plain",
    ) -> None:  # fmt: skip
        self.name, self.part, self.images = name, part, images
        self.forms, self.paraphrase, self.wording = tuple(forms), paraphrase, wording
        self.ground = Ground(part, schema, images.rows)
        self.trials = Trials(images, other_images(images, schema), judge)
        self.names = tuple(dict.fromkeys([*(t.name for t in schema.tables), *(c.name for t in schema.tables for c in t.columns)]))
        self.kinds = tuple(kind for kind in kinds if kind in BUGS or self._has_place(kind))
        self.impossible = tuple(kind for kind in kinds if kind not in self.kinds)

    def choose(self, rng: Random, more: Sequence[str] = (), avoid: Container[str] = ()) -> str | None:
        """A kind of bug, its category drawn first; `more` are kinds of the Query category that others make. None where all are to be avoided."""
        by_category: dict[Category, list[str]] = {category: [] for category in CATEGORIES}
        for kind in (*self.kinds, *more):
            if kind not in avoid:
                by_category[category_of(kind)].append(kind)
        open_ = [category for category in CATEGORIES if by_category[category]]
        if not open_:
            return None
        # A category of which hardly a kind is left would else repeat itself.
        weights = [SHARES[category] * min(1.0, len(by_category[category]) / 4) for category in open_]
        category = rng.choices(open_, weights)[0]
        return rng.choice(by_category[category])

    def debugging(self, kind: str, rng: Random) -> Made | str:
        """A debugging task of a kind, or why there is none in a few words."""
        if kind in BUGS:
            return self._typed(kind, rng)
        draft = self._draft(KINDS[kind], rng)
        if draft is None:
            return "no form for this kind"
        script = draft.script()
        broken = KINDS[kind].fault(script, rng)
        if broken is None:
            return "the kind does not apply"
        gold, issue = draft.text(script), draft.text(broken)
        if gold == issue:
            return "the fault changes nothing"
        if KINDS[kind].category == "Management":
            return self._changing(kind, draft, gold, issue, rng)
        return self._reading(kind, draft, gold, issue, rng)

    def generation(self, rng: Random) -> Made | str:
        """A question with its answer, out of the right queries that the kinds of bug are made for; some with evidence."""
        able = [kind for kind in self.kinds if kind in KINDS and KINDS[kind].category in ("Query", "Personalization")]
        if not able:
            return "no form for a question"
        draft = self._draft(KINDS[rng.choice(able)], rng)
        if draft is None or draft.setup:
            return "no form for this kind"
        gold = draft.text(draft.script())
        trial = self.trials.queries((), gold[0], None)
        if trial.why is not None:
            return trial.why
        text, evidence = reports.request(draft.wanted, draft.terms, draft.tables[0] if len(draft.tables) == 1 else "", rng)
        return self._made("generation", "query", draft.form, draft.tables, text, gold, (), (), (), trial, rng, evidence=evidence)

    # ------------------------------------------------------------------ the sorts of tasks

    def _reading(self, kind: str, draft: Draft, gold: tuple[str, ...], issue: tuple[str, ...], rng: Random) -> Made | str:
        most_work = KINDS[kind].most_work
        trial = self.trials.queries(draft.setup, gold[-1], issue[-1], most_work)
        if trial.why is not None:
            return trial.why
        symptom = rng.choice(KINDS[kind].symptoms).format(**draft.words)
        text = reports.slowness(draft.wanted, symptom, most_work, rng) if most_work is not None else self._report(draft.wanted, symptom, trial, rng)
        return self._made("debugging", kind, draft.form, draft.tables, text, gold, issue, draft.setup, KINDS[kind].checks(), trial, rng)

    def _changing(self, kind: str, draft: Draft, gold: tuple[str, ...], issue: tuple[str, ...], rng: Random) -> Made | str:
        trial, checks = self.trials.states(draft, KINDS[kind], gold, issue)
        if trial.why is not None:
            return trial.why
        symptom = rng.choice(KINDS[kind].symptoms).format(**draft.words)
        text = self._report(draft.wanted, symptom, trial, rng, work=True)
        return self._made("debugging", kind, draft.form, draft.tables, text, gold, issue, draft.setup, checks, trial, rng)

    def _typed(self, kind: str, rng: Random) -> Made | str:
        """A task of the small forms, with the same trials."""
        query = FORMS[rng.choice(self.forms)](self.part, rng)
        made = break_query(query, self.part, (kind,), rng) if query is not None else None
        if query is None or made is None:
            return "the kind does not apply"
        gold, issue = query.sql(), made[1].sql()
        why = doubt(self.images, self.images.base, query, issue)
        trial = Trial(why) if why is not None else self.trials.queries((), gold, issue)
        if trial.why is not None:
            return trial.why
        brief = self.wording == "brief"
        text = question(query) if brief else self._report(question(query, "plain"), rng.choice(reports.SYMPTOMS[kind]), trial, rng)
        return self._made("debugging", kind, query.form, query.tables, text, (gold,), (issue,), (), (), trial, rng)

    def _report(self, wanted: str, symptom: str, trial: Trial, rng: Random, *, work: bool = False) -> str:
        failed = trial.issue is not None and trial.issue.status == "sql_error"
        if failed and trial.issue is not None:
            symptom = reports.error_symptom(trial.issue.error, rng)
        rows = len(trial.issue.rows) if trial.issue is not None and not failed and not work else None
        return reports.report(wanted, symptom, rng, work=work, rows=rows)

    def _made(
        self, task: TaskKind, kind: str, form: str, tables: Sequence[str], text: str, gold: tuple[str, ...], issue: tuple[str, ...], setup: tuple[str, ...],
        checks: tuple[dict[str, Any], ...], trial: Trial, rng: Random, *, evidence: str | None = None,
    ) -> Made | str:  # fmt: skip
        text = reports.reworded(text, self.paraphrase, self.names)
        content = "\0".join((task, text, *issue, "", *gold, *setup))
        category = category_of(kind) if task == "debugging" else "Query"
        made = Task(
            f"{self.name}-{blake2b(content.encode(), digest_size=6).hexdigest()}", task, self.name, text, gold, issue, setup,
            conditions={"order": True} if orders_rows(gold[-1]) else {}, checks=checks, evidence=evidence, category=category,
            difficulty=difficulty(gold, kind), tags=(kind, form), synth={"kind": kind, "form": form, "tables": list(tables)},
            extra={"efficiency": True} if category == "Efficiency" else {},
        )  # fmt: skip
        return self.finished(made, f"{kind} {trial.results}", judged=category == "Management")

    def finished(self, task: Task, results: str | None = None, *, judged: bool = False) -> Made | str:
        """The task with its shape, if the judge agrees (or has done so: `judged`); else why not."""
        task = replace(task, synth={**task.synth, "shape": shape_of(task)})
        image = self.images.derived(*task.preprocess_sql)
        why = "the set-up fails" if image is None else None if judged else self.trials.verdict(image, task)
        return why or Made(task, normal_form((*task.issue_sql, *task.sol_sql, *task.preprocess_sql)), results or task.instance_id)

    def _draft(self, kind: Kind, rng: Random) -> Draft | None:
        return kind.forms[rng.randrange(len(kind.forms))](self.ground, rng)

    def _has_place(self, kind: str) -> bool:
        """Whether some draw of the kind's forms gives a script that it applies to."""
        rng = Random(kind)
        for _ in range(_DRAWS_TO_SEE):
            draft = self._draft(KINDS[kind], rng)
            if draft is not None and KINDS[kind].fault(draft.script(), rng) is not None:
                return True
        return False


def category_of(kind: str) -> Category:
    """The category of a kind of bug; those on typed queries and migrations are faults of queries."""
    return KINDS[kind].category if kind in KINDS else "Query"


def difficulty(gold: Sequence[str], kind: str) -> str:
    """`simple`, `moderate` or `challenging`, by construction: what the gold is built of, and how well hidden the fault is (0 to 2).

    A point for each: several tables, a sub-query or CTE, a window, a set operation, grouping under a condition, a script of several statements, a CASE.
    """
    trees = [parse(sql) for sql in gold if not sql.startswith("CREATE TRIGGER")]
    points = len(gold) > 1 or len(trees) < len(gold)
    score = int(points) + (KINDS[kind].subtlety if kind in KINDS else _TYPED_SUBTLETY.get(kind, 1))
    for tree in trees:
        selects = len(list(tree.find_all(exp.Select)))
        score += len({table.name for table in tree.find_all(exp.Table)}) > 1
        score += selects > 1
        score += tree.find(exp.Window) is not None
        score += tree.find(exp.Union) is not None
        score += tree.find(exp.Group) is not None and tree.find(exp.Where, exp.Having) is not None
        score += tree.find(exp.Case) is not None
    return "simple" if score <= 1 else "moderate" if score <= 3 else "challenging"
