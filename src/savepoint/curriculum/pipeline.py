"""A whole run: every stage of a recipe in order, evaluation between stages, and everything needed to stop anywhere and go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from savepoint.attention.hf import backend_of
from savepoint.curriculum.demonstrations import demonstrate, demonstrations
from savepoint.curriculum.memory import run_memory
from savepoint.curriculum.plan import GrpoStage, Mode, Recipe, SftStage
from savepoint.curriculum.source import open_source
from savepoint.curriculum.summary import Ledger, environment_of_run, summary_of
from savepoint.envs.sql.env import SqlEnv
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.tasks import Task, write_tasks
from savepoint.errors import Interrupted, UserError
from savepoint.evals.evaluate import evaluate, summarise
from savepoint.files import write_atomically
from savepoint.progress import Progress
from savepoint.rollout.driver import SamplingLimits
from savepoint.rollout.engines.embedded import EmbeddedEngine
from savepoint.rollout.render import Chat, CompactChat, train_tokenizer
from savepoint.state import Backend, open_backend
from savepoint.train.bundle import load_bundle, save_bundle
from savepoint.train.grpo import Grpo
from savepoint.train.learner import check_attention, prepare
from savepoint.train.policy import Policy
from savepoint.train.run import Run
from savepoint.train.sft import Example, Sft

MODES: tuple[Mode, ...] = ("single_turn", "agentic")


def run_recipe(recipe: Recipe, profile: str | None, folder: Path, *, resume: bool, progress: Progress, store: str | Path | None = None) -> dict[str, Any]:
    """Run a recipe into `folder`, or go on where a stopped run of it stands. Returns the summary that it also writes.

    Raises Interrupted when a person stops it (what was done is saved), UserError for input that cannot be used.
    """
    torch.set_num_threads(recipe.threads)
    _check_folder(folder, resume)
    made = not folder.exists()
    if not resume:
        _begin(folder, recipe, profile)
    run = Run(folder, recipe.seed, progress, tensorboard=recipe.tensorboard)
    try:
        with open_backend("sqlite", store=store, **recipe.state.options()) as backend, run.stoppable():
            return Pipeline(recipe, profile, run, backend, resume).run()
    except UserError:
        if not resume and not (folder / "tasks").exists():
            _clear(folder, made)
        raise
    except Interrupted as stop:
        raise Interrupted(f"Stopped {stop}. To go on: savepoint run --out {folder} --resume") from None
    finally:
        run.close()


def _check_folder(folder: Path, resume: bool) -> None:
    begun = (folder / "recipe.json").exists()
    if resume and not begun:
        raise UserError(f"{folder}: holds no run to go on with")
    if not resume and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already holds {'a run: pass --resume to go on with it' if begun else 'something else'}, or --out another folder")


def _begin(folder: Path, recipe: Recipe, profile: str | None) -> None:
    """Make the folder and write what will be run there: from now on a run that is stopped, however early, can be gone on with."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "manifest.json", json.dumps({"profile": profile}))
        write_atomically(folder / "recipe.json", json.dumps(recipe.model_dump(mode="json"), indent=1))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def _clear(folder: Path, made: bool) -> None:
    """Take back what a run wrote that was refused before anything was made: the next try finds the folder as it was."""
    for path in folder.iterdir():
        path.unlink()
    if made:
        folder.rmdir()


class Pipeline:
    """The stages of one run, over one database, policy and engine."""

    def __init__(self, recipe: Recipe, profile: str | None, run: Run, backend: Backend, resume: bool) -> None:
        self.recipe, self.profile, self.run_, self.backend = recipe, profile, run, backend
        self.ledger = Ledger()
        checkpoint = run.load() if resume else None
        self.grader = Grader(backend, reuse_runs=True)
        self.source = open_source(recipe.tasks, self.grader, run.folder, self._each("making held-out tasks", recipe.tasks.heldout))
        self._check_manifest(resume)
        self._demonstrated: list[Task] = []
        self.policy, self.chat = self._policy()
        prepare(self.policy, recipe.learner)
        self.attention_check = check_attention(self.policy)
        limits = recipe.environment
        episodes = max([s.prompts_per_step * s.group_size for s in recipe.stages if isinstance(s, GrpoStage)], default=64)
        self.engine = EmbeddedEngine(self.policy.model, slots=episodes, max_tokens=limits.max_tokens, pad_id=self.chat.pad_id)
        self.tensors: dict[str, Any] = {}
        if checkpoint is not None:
            state, self.tensors = checkpoint
            self.ledger = Ledger.from_json(state)
            self.policy.load_weights(self.tensors["policy"])
            run.cut_metrics(self.ledger.stage + 1, self.ledger.step)

    def run(self) -> dict[str, Any]:
        """Every stage that is not done yet, each followed by an evaluation; then the summary and the report."""
        try:
            if not self.ledger.demonstrator:
                self._measure_demonstrator()
            if not self.ledger.evaluations:
                self._evaluate(0)
            for index in range(self.ledger.stage, len(self.recipe.stages)):
                self._stage(index)
        except Interrupted:
            self.write_summary()
            raise
        return self.write_summary()

    def _stage(self, index: int) -> None:
        stage = self.recipe.stages[index]
        if len(self.ledger.stages) == index:
            self.ledger.begin(stage.name, stage.kind, stage.mode)
        steps, advance, state = self._imitation(stage, index) if isinstance(stage, SftStage) else self._reinforcement(stage, index)
        self.run_.progress.stage(index + 1, stage.name, steps, stage.kind, done=self.ledger.step)
        for k in range(self.ledger.step, steps):
            with self.ledger.clock(index):
                record = advance(k)
            self.ledger.step = k + 1
            self.ledger.add(index, record)
            self.run_.log({"stage": stage.name, "index": index + 1, "kind": stage.kind, "mode": stage.mode, "step": k + 1, "of": steps, **record})
            self.run_.progress.step(
                k + 1, success=record.get("success"), loss=record["loss"] if stage.kind == "sft" else None, tokens=record["tokens"], episodes=record["episodes"]
            )
            if self.run_.stop_asked or (k + 1) % stage.checkpoint_every == 0:
                self._save(state)
            if self.run_.stop_asked:
                raise Interrupted(f"after step {k + 1} of {steps} of {stage.name!r}; it is saved")
        self.ledger.stage, self.ledger.step = index + 1, 0
        self._save(dict)
        with self.run_.write_guard():
            save_bundle(self.run_.folder / "checkpoints" / f"stage{index + 1}", self.policy, self.chat, self.recipe.environment.model_dump())
        self._evaluate(index + 1)
        self._save(dict)
        if index + 1 < len(self.recipe.stages):  # the last table is the command's own
            self.run_.progress.table(summary_of(self.ledger)["stages"])

    def _imitation(self, stage: SftStage, index: int) -> tuple[int, Callable[[int], dict[str, Any]], Callable[[], dict[str, Any]]]:
        """An SFT stage: how many steps, what one does, and its optimisers' state."""
        started, graded = time.perf_counter(), self.grader.seconds
        with self.ledger.clock(index):
            rng = self.run_.rng("stage", index, "demonstrations")
            made = self._demonstrations(stage.demonstrations, stage.mode, rng)
            made += self._demonstrations(stage.single_turn_demonstrations, "single_turn", rng)
        grade = self.grader.seconds - graded
        self.ledger.spend(index, {"environment": time.perf_counter() - started - grade, "grade": grade})
        sft = Sft(self.policy, made, stage, self.run_.rng("stage", index, "order"))
        if self.ledger.step:
            sft.load_state(self.tensors["optimiser"])

        def advance(k: int) -> dict[str, Any]:
            torch.manual_seed(self.run_.seed_for("stage", index, "step", k))
            self.policy.model.train()
            record: dict[str, Any] = sft.step(k)
            return record | {"seconds": {"update": record.pop("update_s")}}

        return sft.steps, advance, sft.state

    def _demonstrations(self, n: int, mode: Mode, rng: Any) -> list[Example]:
        each = self._each(f"acting out {mode.replace('_', ' ')} demonstrations", n)
        made = demonstrations(self._shown(n), lambda: self.environment(mode), self.chat, self.recipe.demonstrator, rng, each)
        if n and self.ledger.step == 0:
            self.run_.trace(f"stage{self.ledger.stage + 1}-demonstrations-{mode}", [trajectory for trajectory, _ in made[:100]])
        return [example for _, example in made]

    def _shown(self, n: int) -> Iterator[Task]:
        """The first `n` tasks that are demonstrated, made when first asked for: the same ones in each mode and stage, so that tools are all that is new."""
        for i in range(n):
            if i == len(self._demonstrated):
                self._demonstrated.append(self.source.draw(self.run_.rng("demonstrated", i)))
            yield self._demonstrated[i]

    def _reinforcement(self, stage: GrpoStage, index: int) -> tuple[int, Callable[[int], dict[str, Any]], Callable[[], dict[str, Any]]]:
        """A GRPO stage: how many steps, what one does, and its optimiser's state."""
        name = f"stage{index + 1}"
        limits = SamplingLimits(self.recipe.environment.max_message_tokens, self.recipe.environment.max_tokens, stage.temperature)

        def draw(k: int) -> list[Task]:
            rng = self.run_.rng("stage", index, "tasks", k)
            tasks = [self.source.draw(rng) for _ in range(stage.prompts_per_step)]
            with self.run_.write_guard():
                write_tasks(self._folder("tasks", name) / f"step-{k + 1:04}.jsonl", tasks)
            return tasks

        grpo = Grpo.start(
            self.policy, self.engine, self.chat, stage, limits=limits, make_env=lambda: self.environment(stage.mode), draw=draw,
            seed_for=lambda k: self.run_.seed_for("stage", index, "rollout", k),
        )  # fmt: skip
        if self.ledger.step:
            grpo.optimiser.load_state_dict(self.tensors["optimiser"]["grpo"])
            if grpo.reference is not None:
                grpo.reference.load_weights(self.tensors["optimiser"]["reference"])

        def advance(k: int) -> dict[str, Any]:
            torch.manual_seed(self.run_.seed_for("stage", index, "step", k))
            graded = self.grader.seconds
            record, groups = grpo.step(k)
            self.run_.trace(f"{name}-step-{k + 1:04}", [t for group in groups for t in group.trajectories])
            grade = self.grader.seconds - graded
            parts = {"generate": record.pop("generate_s"), "environment": record.pop("environment_s") - grade, "grade": grade, "update": record.pop("update_s")}
            return record | {"seconds": parts}

        def state() -> dict[str, Any]:
            reference = {"reference": grpo.reference.weights()} if grpo.reference is not None else {}
            return {"grpo": grpo.optimiser.state_dict(), **reference}

        return stage.steps, advance, state

    def environment(self, mode: Mode) -> SqlEnv:
        """A fresh environment in a mode, with the recipe's budgets and observation format."""
        return self.recipe.environment.environment(mode, self.source.world, self.grader)

    def _policy(self) -> tuple[Policy, Chat]:
        """The policy to start from and its chat: a local model's, or a tiny one whose tokenizer is learned from demonstrations."""
        settings = self.recipe.policy
        if settings.model is not None:
            bundle = load_bundle(Path(settings.model))
            return bundle.policy, bundle.chat
        chat = CompactChat(self._tokenizer())
        size = chat.tokenizer.get_vocab_size()
        return Policy.tiny(settings, vocab_size=size, pad_id=chat.pad_id, end_id=chat.end_id, seed=self.run_.seed_for("policy")), chat

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        path = self.run_.folder / "tokenizer.json"
        if not path.exists():
            texts = self._texts(1000)
            tokenizer = train_tokenizer(texts, self.recipe.policy.vocab_size)
            with self.run_.write_guard():
                write_atomically(path, tokenizer.to_str())
        return Tokenizer.from_file(str(path))

    def _texts(self, n: int) -> list[str]:
        """What the tokenizer learns from: every message of `n` demonstrations in each mode."""
        rng, texts = self.run_.rng("tokenizer"), []
        plain = CompactChat(train_tokenizer([], 263))
        for mode in MODES:
            each = self._each("reading demonstrations for the tokenizer", n)
            for trajectory, _ in demonstrations(self._shown(n), lambda mode=mode: self.environment(mode), plain, self.recipe.demonstrator, rng, each):  # type: ignore[misc]
                for turn in trajectory.turns:
                    call = turn.tool_call
                    texts.append(turn.observation or turn.text)
                    if call is not None:
                        texts.append(f"{call['name']} {call['arguments'].get('sql') or '; '.join(call['arguments']['sql_list'])}")
        return texts

    def _measure_demonstrator(self) -> None:
        """The demonstrator's own success on the held-out tasks, in both modes, as often as the policy is evaluated."""
        rng = self.run_.rng("demonstrator")
        for mode in MODES:
            samples = self.source.heldout * self.recipe.evaluation.samples
            each = self._each("measuring the demonstrator", len(samples))
            made = []
            for done, task in enumerate(samples):
                each(done)
                made.append(demonstrate(task, self.environment(mode), self.chat, self.recipe.demonstrator, rng)[0])
            self.ledger.demonstrator[mode] = summarise(made)
            self.run_.trace(f"demonstrator-{mode}", made)

    def _evaluate(self, done: int) -> None:
        """Evaluate the policy in both modes on the held-out tasks, after `done` stages."""
        settings, limits = self.recipe.evaluation, self.recipe.environment
        sampling = SamplingLimits(limits.max_message_tokens, limits.max_tokens, settings.temperature)
        result: dict[str, Any] = {}
        for mode in MODES:
            result[mode], trajectories = evaluate(
                self.source.heldout, settings.samples, self.engine, self.chat, lambda mode=mode: self.environment(mode), sampling,  # type: ignore[misc]
                seed=self.run_.seed_for("evaluation", mode) >> 1, each=self._each(f"evaluating {mode.replace('_', ' ')}", len(self.source.heldout)),
            )  # fmt: skip
            self.run_.trace(f"eval-{done}-{mode}", trajectories)
        self.ledger.evaluations[done:] = [result]

    def _each(self, what: str, total: int) -> Callable[[int], None]:
        """A callback for long loops: shows how far they are, and stops where nothing is half done."""

        def each(done: int) -> None:
            self.run_.progress.activity(what, done, total)
            if self.run_.stop_asked:
                raise Interrupted(f"while {what}; what was done before is saved")

        return each

    def _save(self, optimiser: Callable[[], dict[str, Any]]) -> None:
        self.run_.save(self.ledger.to_json(), {"policy": self.policy.weights(), "optimiser": optimiser()})

    def _folder(self, *names: str) -> Path:
        folder = self.run_.folder.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_manifest(self, resume: bool) -> None:
        """Refuse to go on with another recipe or database than the run began with; write down which they are when it begins."""
        recipe_file, manifest_file = self.run_.folder / "recipe.json", self.run_.folder / "manifest.json"
        if resume:
            _refuse_changes(json.loads(recipe_file.read_text(encoding="utf-8")), self.recipe.model_dump(mode="json"), str(recipe_file))
        known = json.loads(manifest_file.read_text(encoding="utf-8")).get("database")
        if known is None:
            manifest: dict[str, Any] = {"profile": self.profile, "database": self.source.description}
            with self.run_.write_guard():
                write_tasks(self._folder("tasks") / "heldout.jsonl", self.source.heldout)
                write_atomically(manifest_file, json.dumps(manifest, indent=1))
        elif known["digest"] != self.source.description["digest"]:
            raise UserError(f"{self.recipe.tasks.database}: the database has changed since the run in {self.run_.folder} began; start a new run")

    def write_summary(self) -> dict[str, Any]:
        """`summary.json`: what happened, at what cost, and whether it reached what such a run is for."""
        summary = summary_of(self.ledger) | {
            "recipe": self.recipe.name, "seed": self.recipe.seed, "profile": self.profile, "database": self.source.description,
            "environment": environment_of_run(backend_of(self.policy.model), self.attention_check, self.backend.manifest()),
            "settings": self.recipe.model_dump(mode="json"), "planned_memory": run_memory(self.recipe),
        }  # fmt: skip
        with self.run_.write_guard():
            write_atomically(self.run_.folder / "summary.json", json.dumps(summary, indent=1))
        return summary


def _refuse_changes(before: Any, now: Any, source: str, key: str = "") -> None:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            _refuse_changes(before.get(name), now.get(name), source, f"{key}.{name}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (a, b) in enumerate(zip(before, now, strict=True), 1):
            _refuse_changes(a, b, source, f"{key}.{number}")
    elif before != now:
        raise UserError(f"{source}: {key} was {before!r} when the run began and is {now!r} now; go on with the recipe as it was, or start a new run")
