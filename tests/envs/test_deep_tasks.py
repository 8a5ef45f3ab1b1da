"""Deep tasks: what is kept is right on more than one image of the database, is told apart, and can be held out by shape."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from savepoint.envs.sql import databases, reports
from savepoint.envs.sql.bugs import CATEGORIES, KINDS, Draft, Probe
from savepoint.envs.sql.perturb import other_images
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.schema import read_schema
from savepoint.envs.sql.shapes import normal_form, shape, shape_of, split_by_shape
from savepoint.envs.sql.synth import KINDS as ALL_KINDS
from savepoint.envs.sql.synth import Synthesizer, Tally, distinct_tasks, synth_command, synthesize
from savepoint.envs.sql.tasks import Task, read_tasks, write_tasks
from savepoint.envs.sql.trials import Trials
from savepoint.envs.sql.verdict import Verdict
from savepoint.envs.sql.verify import Images
from savepoint.errors import UserError
from savepoint.evals.bench import GradingOptions
from savepoint.evals.validate import validate
from savepoint.state import SqliteBackend, open_backend

DEEP = {"level": "deep", "forms": tuple(FORMS), "kinds": ALL_KINDS, "wording": "plain", "max_tables": 50, "max_columns": 400}


@pytest.fixture(scope="module")
def backend(tmp_path_factory) -> Iterator[SqliteBackend]:
    with open_backend("sqlite", store=tmp_path_factory.mktemp("store")) as backend:
        yield backend


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    return databases.build("shop", tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(scope="module")
def source(backend, shop) -> Iterator[Synthesizer]:
    source = Synthesizer(backend, shop, **DEEP)
    yield source
    source.close()


@pytest.fixture(scope="module")
def deep(source) -> list[Task]:
    return distinct_tasks(source, 180, seed=3)


def test_every_deep_task_passes_validation_with_all_its_probes(deep, shop, tmp_path):
    write_tasks(tmp_path / "tasks.jsonl", deep[:80])
    found = validate(tmp_path / "tasks.jsonl", GradingOptions((shop.parent,), store=tmp_path / "store"))
    assert [i["problems"] for i in found["instances"] if i["problems"]] == []
    assert found["totals"]["valid"] == 80


def test_all_categories_and_most_kinds_are_made(deep, source):
    categories = Counter(task.category for task in deep)
    assert set(categories) == set(CATEGORIES) and categories["Query"] > len(deep) / 3
    assert len({task.synth["kind"] for task in deep}) >= 45 and not source.impossible
    assert {task.difficulty for task in deep} == {"simple", "moderate", "challenging"}


def test_a_management_task_is_checked_by_the_state_that_it_leaves(deep):
    assert {task.category for task in deep} == set(CATEGORIES)
    for task in deep:
        kinds = {check["type"] for check in task.checks}
        if task.category == "Management":
            assert kinds & {"state", "raises"}
        else:
            assert kinds == ({"result", "vm_steps"} if task.category == "Efficiency" else set())


def test_a_slow_form_gives_the_same_rows_with_more_work(deep, backend, source):
    slow = [task for task in deep if task.category == "Efficiency"]
    assert len({task.synth["kind"] for task in slow}) >= 4
    for task in slow[:8]:
        image = backend.derive(source.image, list(task.preprocess_sql)) if task.preprocess_sql else source.image
        with backend.lease(image, owner="test") as session:
            right, wrong = (session.execute(sql, max_rows=10_000) for sql in (task.sol_sql[0], task.issue_sql[0]))
        assert len(right.rows) == len(wrong.rows) and right.vm_steps * 4 <= wrong.vm_steps
        assert "50 %" in task.query


def test_a_text_names_what_its_gold_uses_and_never_shows_a_template(deep):
    for task in deep:
        assert "{" not in task.query and ".." not in task.query.replace("...", "") and len(task.query) > 40
        if task.synth["kind"] in KINDS and KINDS[task.synth["kind"]].category in ("Query", "Personalization"):
            assert any(name in task.query for name in task.synth["tables"]), task.query
    assert len({task.query for task in deep}) > 0.97 * len(deep)


def test_the_same_seed_gives_the_same_deep_file(shop, tmp_path):
    for name in ("a", "b"):
        with open_backend("sqlite", store=tmp_path / f"store {name}") as own:
            write_tasks(tmp_path / name, synthesize(shop, 40, seed=9, backend=own, **DEEP))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert len(read_tasks(tmp_path / "a")) == 40


def test_a_deep_task_depends_on_the_random_numbers_alone(backend, shop, source):
    fresh = Synthesizer(backend, shop, **DEEP)
    assert [fresh.task(random.Random(seed)) for seed in range(8)] == [source.task(random.Random(seed)) for seed in range(8)]
    fresh.close()


def test_no_two_deep_tasks_have_the_same_sql_or_the_same_results_for_one_kind(deep, source):
    assert len({normal_form((*t.issue_sql, *t.sol_sql, *t.preprocess_sql)) for t in deep}) == len(deep)
    twice = distinct_tasks(source, 30, seed=3)
    assert twice == deep[:30] and source.rejected["is there already"] >= 0
    rng, tally = random.Random(3), Tally()
    results = [source.make(rng, tally).results for _ in range(25)]
    assert len({task.synth["kind"] for task in twice[:25]}) <= len(set(results))


def test_what_cannot_be_told_apart_any_more_is_refused_with_the_number_that_can(backend, shop):
    with pytest.raises(UserError, match=r"shop: only \d+ different tasks of 2000 can be made"):
        synthesize(shop, 2000, backend=backend, **{**DEEP, "kinds": ("lost_distinct", "count_of_nullable")})


def test_an_exhausted_kind_is_left_alone():
    tally = Tally(patience=3)
    tally.miss("a", 2)
    tally.hit("a")
    tally.miss("a", 2)
    assert not tally.exhausted
    tally.miss("a")
    assert tally.exhausted == {"a"}


def test_what_is_exhausted_is_not_drawn_again(source):
    tally = Tally()
    tally.exhausted.update(kind for kind in ALL_KINDS if kind not in ("lost_wildcard", "narrow_key"))
    rng = random.Random(1)
    assert {source.make(rng, tally).task.synth["kind"] for _ in range(8)} == {"lost_wildcard", "narrow_key"}


def test_questions_can_name_a_condition_and_explain_it_as_evidence(backend, shop):
    tasks = synthesize(shop, 60, seed=2, backend=backend, task="generation", **DEEP)
    with_evidence = [task for task in tasks if task.evidence]
    assert 5 < len(with_evidence) < 40 and all(task.task == "generation" and not task.issue_sql for task in tasks)
    for task in with_evidence:
        name, condition = task.evidence.partition("rows are ")[2].split(" when ", 1)
        assert f"that are {name}" in task.query and condition.split()[0].strip('"') in task.sol_sql[0]


def test_both_levels_say_what_they_do_not_have(backend, shop, source):
    with pytest.raises(UserError, match="'integer_division' needs level deep"):
        Synthesizer(backend, shop, kinds=("integer_division",))
    with pytest.raises(UserError, match="brief wording has no words for kind 'integer_division'"):
        Synthesizer(backend, shop, level="deep", kinds=("integer_division",))
    with pytest.raises(UserError, match="unknown kind 'nonsense'"):
        Synthesizer(backend, shop, **{**DEEP, "kinds": ("nonsense",)})


def test_kinds_that_a_database_has_no_place_for_are_named(backend, tmp_path):
    with sqlite3.connect(tmp_path / "plain.sqlite") as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, w TEXT NOT NULL, n INTEGER NOT NULL)")
        db.executemany("INSERT INTO t VALUES (?, ?, ?)", [(i, "abc"[i % 3], i * 7 % 50) for i in range(60)])
    db.close()
    source = Synthesizer(backend, tmp_path / "plain.sqlite", **DEEP)
    assert {"not_in_null", "lost_partition", "update_without_where"}.isdisjoint(source.impossible)
    assert {"double_counting", "minute_for_month", "equals_null", "children_left"} <= set(source.impossible)
    assert len(distinct_tasks(source, 20, seed=0)) == 20
    source.close()
    with pytest.raises(UserError, match="no place for the kinds double_counting"):
        Synthesizer(backend, tmp_path / "plain.sqlite", **{**DEEP, "kinds": ("double_counting",)})


# ---------------------------------------------------------------------- trials


@pytest.fixture
def tiny(backend, tmp_path) -> Iterator[Images]:
    with sqlite3.connect(tmp_path / "tiny.sqlite") as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER, w TEXT)")
        db.executemany("INSERT INTO t VALUES (?, ?, ?)", [(i, i, "x" if i >= 20 else "y") for i in range(40)])
    db.close()
    images = Images(backend, backend.import_base(tmp_path / "tiny.sqlite"), owner="test")
    yield images
    images.close()


def agree(image: object, task: Task, submission: object) -> Verdict:
    """A judge without a mind of its own."""
    return Verdict("correct" if tuple(submission) == task.sol_sql else "wrong_result")  # type: ignore[arg-type]


def trials_on(images: Images, *changes: str) -> Trials:
    return Trials(images, [image for image in (images.derived(sql) for sql in changes) if image is not None], agree)


ALL_X = "UPDATE t SET w = 'x'"


@pytest.mark.parametrize(
    ("gold", "issue", "change", "why"),
    [
        ("SELECT a FROM t WHERE a > 30", "SELECT a FROM t WHERE a < 30", ALL_X, None),
        ("SELECT a FROM t WHERE a > 30", "SELECT b FROM t", ALL_X, None),
        ("SELECT a FROM t WHERE a > 30", "SELECT a FROM t WHERE a >= 31", ALL_X, "issue does not fail"),
        ("SELECT a FROM t WHERE a > 99", "SELECT b FROM t", ALL_X, "gold empty"),
        ("SELECT COUNT(*) FROM t WHERE a = 3", "SELECT b FROM t", ALL_X, "gold says too little"),
        ("SELECT b FROM t", "SELECT a FROM t", ALL_X, "gold fails"),
        ("SELECT a FROM t WHERE w = 'x'", "SELECT a FROM t", ALL_X, "issue fails on one image only"),
        ("SELECT a FROM t WHERE a > 20 AND w = 'x'", "SELECT a FROM t WHERE a < 20 AND w = 'x'", "UPDATE t SET w = 'y' WHERE id = 30",
         "another query is right by chance"),
        ("SELECT a FROM t WHERE a > 30", "SELECT w FROM t", "ALTER TABLE t RENAME COLUMN a TO b", "gold fails on another image"),
    ],
)  # fmt: skip
def test_what_only_chance_tells_apart_is_dropped(tiny, gold, issue, change, why):
    assert trials_on(tiny, change).queries((), gold, issue).why == why


@pytest.mark.parametrize(
    ("issue", "why"),
    [
        ("SELECT o.a FROM t AS o WHERE (SELECT COUNT(*) FROM t AS i WHERE i.a = o.a) = 1 AND o.a > 30", None),
        ("SELECT a FROM t WHERE a + 0 > 30", "issue not slow enough"),
        ("SELECT o.a FROM t AS o, t AS i WHERE o.a > 20", "slow form gives other rows"),
        ("SELECT o.a FROM t AS o WHERE (SELECT COUNT(*) FROM t AS i WHERE i.w <> 'z' OR i.a < o.a) = 40 AND o.a > 30", "issue differs on another image"),
        ("SELECT nothing FROM t", "issue too big"),
    ],
)
def test_a_slow_form_must_be_slow_and_right_everywhere(tiny, issue, why):
    trials = trials_on(tiny, "UPDATE t SET w = 'z' WHERE a < 39 AND a > 35")
    assert trials.queries((), "SELECT a FROM t WHERE a > 30", issue, most_work=0.5).why == why


def test_the_judge_has_the_last_word_and_its_failure_is_nobodys_fault(tiny):
    task = Task("t", "debugging", "tiny", "x", ("SELECT 1",), ("SELECT 2",))
    for outcome, why in (("wrong_result", "gold is wrong_result"), ("gold_timeout", "gold is gold_timeout")):
        assert Trials(tiny, (), lambda image, task, sql, o=outcome: Verdict(o)).verdict(tiny.base, task) == why
    assert Trials(tiny, (), lambda image, task, sql: Verdict("correct")).verdict(tiny.base, task) == "issue does not fail"
    with pytest.raises(RuntimeError, match="grading t: the disk is full"):
        Trials(tiny, (), lambda image, task, sql: Verdict("infra", "the disk is full")).verdict(tiny.base, task)


def test_a_state_is_looked_at_after_the_gold_and_the_issue_must_fail_there(backend, tiny):
    from savepoint.envs.sql.grade import Grader

    grader = Grader(backend)
    trials = replace_judge(trials_on(tiny, ALL_X), grader.grade)
    draft = Draft("set", ("UPDATE t SET a = 0 WHERE id < 5",), "set", probes=(Probe("SELECT COUNT(*) FROM t WHERE a = 0", ("DELETE FROM t WHERE id = 1",)),))
    trial, checks = trials.states(draft, KINDS["update_without_where"], draft.gold, ("UPDATE t SET a = 0",))
    assert trial.why is None and checks[0]["expect"] == [[4]] and checks[0]["before"] == ["DELETE FROM t WHERE id = 1"]
    same, _ = trials.states(draft, KINDS["update_without_where"], draft.gold, ("UPDATE t SET a = 0 WHERE id <= 4",))
    assert same.why == "issue does not fail"
    lost, _ = trials.states(replace(draft, setup=("DROP TABLE nothing",)), KINDS["update_without_where"], draft.gold, ("UPDATE t SET a = 0",))
    assert lost.why == "the set-up fails"
    grader.close()


def replace_judge(trials: Trials, judge: object) -> Trials:
    return Trials(trials.images, trials.others, judge)  # type: ignore[arg-type]


def test_other_images_have_the_same_schema_and_other_rows(backend, shop):
    images = Images(backend, backend.import_base(shop), owner="test")
    schema = read_schema(images.rows)
    others = other_images(images, schema)
    assert len(others) == 2 and len({image.digest for image in (images.base, *others)}) == 3
    count = "SELECT COUNT(*) FROM customers"
    total = "SELECT SUM(age), COUNT(DISTINCT city) FROM customers"
    base, thinned, moved = (images.answer(image, count).rows[0][0] for image in (images.base, *others))
    assert 0.8 * base < thinned < base == moved
    assert images.answer(others[1], total).rows != images.answer(images.base, total).rows
    schemas = {images.answer(image, "SELECT group_concat(sql) FROM sqlite_master").rows for image in (images.base, *others)}
    assert len(schemas) == 1
    images.close()


def test_a_database_that_refuses_changes_has_fewer_images(backend, tmp_path):
    with sqlite3.connect(tmp_path / "fixed.sqlite") as db:
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER)")
        db.executemany("INSERT INTO t VALUES (?, ?)", [(i, i) for i in range(50)])
        for event in ("DELETE", "UPDATE"):
            db.execute(f"CREATE TRIGGER no_{event} BEFORE {event} ON t BEGIN SELECT RAISE(ABORT, 'fixed'); END")
    db.close()
    images = Images(backend, backend.import_base(tmp_path / "fixed.sqlite"), owner="test")
    assert other_images(images, read_schema(images.rows)) == ()
    images.close()


# ---------------------------------------------------------------------- shapes


def test_writing_does_not_matter_to_the_normal_form():
    assert normal_form(["select  a from T -- all\nwhere b=1"]) == normal_form(["SELECT a FROM t WHERE b = 1"]) != normal_form(["SELECT a FROM t WHERE b = 2"])
    assert normal_form(["SELECT 'a'"]) != normal_form(["SELECT 'A'"])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("SELECT a FROM t WHERE b > 5", "SELECT c FROM u WHERE d > 7.5", True),
        ("SELECT a FROM t WHERE b = 'x'", 'SELECT "a b" FROM u WHERE d = 1', True),
        ("SELECT a FROM t WHERE a > 5", "SELECT a FROM t WHERE b > 5", False),
        ("SELECT SUM(a) FROM t", "SELECT AVG(a) FROM t", False),
        ("SELECT a FROM t WHERE b > 5", "SELECT a FROM t WHERE b < 5", False),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t", False),
    ],
)
def test_a_shape_is_sql_without_names_and_figures(one, other, same):
    assert (shape([one]) == shape([other])) is same


def test_held_out_tasks_have_no_shape_in_common_with_training(deep):
    train, held = split_by_shape(deep, 0.2, seed=1)
    assert len(train) + len(held) == len(deep) and 0.12 < len(held) / len(deep) <= 0.2
    assert {shape_of(t) for t in train}.isdisjoint(shape_of(t) for t in held)
    assert {t.synth["kind"] for t in train} == {t.synth["kind"] for t in deep}, "every kind is trained"
    assert split_by_shape(deep, 0.2, seed=1) == (train, held) != split_by_shape(deep, 0.2, seed=2)


def test_a_held_out_file_is_written_beside_the_tasks(shop, tmp_path):
    out, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    made = synth_command(shop, 60, out, heldout=held, store=tmp_path / "store", seed=1)
    assert (made["written"], made["heldout_written"]) == (len(read_tasks(out)), len(read_tasks(held))) and made["written"] + made["heldout_written"] == 60
    assert made["level"] == "deep" and set(made["categories"]) == set(CATEGORIES)
    with pytest.raises(UserError, match=r"held.jsonl: exists already"):
        synth_command(shop, 5, tmp_path / "new.jsonl", heldout=held)
    with pytest.raises(UserError, match="need a file of their own"):
        synth_command(shop, 5, tmp_path / "new.jsonl", heldout=tmp_path / "new.jsonl")
    with pytest.raises(UserError, match="between 0 and 1"):
        synth_command(shop, 5, tmp_path / "new.jsonl", heldout=tmp_path / "other.jsonl", heldout_share=1.5)


# ---------------------------------------------------------------------- texts


def test_a_paraphrase_is_taken_only_if_it_keeps_every_fact(backend, shop):
    def shout(text: str) -> str:
        return f"Hi! {text}"

    def forget(text: str) -> str:
        return "It is broken, somehow."

    settings = {**DEEP, "kinds": ("lost_partition",)}
    plain, loud, lost = (synthesize(shop, 4, seed=5, backend=backend, paraphrase=how, **settings) for how in (None, shout, forget))
    assert [t.query for t in loud] == [f"Hi! {t.query}" for t in plain]
    assert [t.query for t in lost] == [t.query for t in plain]


@pytest.mark.parametrize(
    ("made", "kept"),
    [("Over 5 in city 'Rome'?", True), ("Over 6 in city 'Rome'?", False), ("Over 5 in town 'Rome'?", False), ("Over 5 in city Rome?", False), ("", False)],
)
def test_facts_are_figures_quoted_values_and_names(made, kept):
    text = "Where city is 'Rome' and it is over 5."
    assert reports.reworded(text, lambda _: made, ["city"]) == (made if kept else text)


@pytest.mark.parametrize("wanted", ["the total", "by city, the total", "for each row, the total"])
def test_what_is_wanted_fits_every_opening(wanted):
    texts = {reports.report(wanted, "It fails.", random.Random(seed)) for seed in range(300)}
    assert len(texts) > 50 and all(wanted in text and "It fails." in text and "  " not in text and " ," not in text for text in texts)
    assert not any(f"need {wanted}" in text for text in texts) or not wanted.startswith(("by", "for"))


def test_deep_tasks_of_the_small_kinds_have_brief_words_and_the_same_trials(backend, shop):
    source = Synthesizer(backend, shop, level="deep", wording="brief", kinds=("wrong_comparison", "renamed_column"))
    tasks = [source.task(random.Random(i)) for i in range(12)]
    assert {task.synth["kind"] for task in tasks} == {"wrong_comparison", "renamed_column"}
    for task in tasks:
        assert len(task.query) < 100 and "." not in task.query and task.synth["shape"] and task.category == "Query"
    source.close()
