"""`savepoint eval`: a model acts on tasks, through the same environment and rendering as in training."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from savepoint.config import Settings, build, parse_assignment, set_value
from savepoint.envs.sql.env import Mode
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.settings import LARGE, EnvironmentSettings, StateSettings
from savepoint.envs.sql.tasks import Task, read_tasks
from savepoint.envs.sql.world import World
from savepoint.errors import Interrupted, UserError
from savepoint.evals.evaluate import passes, summarise
from savepoint.evals.results import Key, Results, Sample
from savepoint.progress import Progress
from savepoint.rollout.converse import converse
from savepoint.rollout.driver import SamplingLimits, rollout
from savepoint.rollout.engines.base import Sampler
from savepoint.rollout.engines.embedded import EmbeddedEngine
from savepoint.rollout.engines.openai import EndpointSettings, OpenAIEngine, resolve
from savepoint.rollout.engines.vllm import VllmEngine
from savepoint.rollout.render import Chat
from savepoint.rollout.trajectory import Trajectory
from savepoint.state import SetupError, StateError, open_backend
from savepoint.train.bundle import load_bundle, load_chat

BATCH = 32
"""Tasks that are sampled together on the embedded engine and vLLM."""
CACHE_BYTES = 2 << 30
"""What keys and values of the embedded engine may take; fewer episodes are in flight where a model's are large."""

# A model at an endpoint may think before it speaks, and every turn's prompt counts anew.
_AT_AN_ENDPOINT = {"max_message_tokens": 4096, "max_tokens": 65536}


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the command's options say. `settings` are assignments, `environment.KEY=VALUE`, `endpoint.KEY=VALUE` or `state.KEY=VALUE`."""

    engine: Literal["embedded", "openai", "vllm"] = "embedded"
    samples: int = 1
    mode: Mode = "agentic"
    temperature: float = 1.0
    seed: int = 0
    max_tokens: int | None = None
    base_url: str | None = None
    out: Path | None = None
    resume: bool = False
    traces: Path | None = None
    settings: Sequence[str] = ()

    def check(self) -> None:
        """UserError for options that do not go together."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature must be 0 or more, not {self.temperature}")
        if self.base_url is not None and self.engine != "openai":
            raise UserError(f"--base-url goes with --engine openai, not with {self.engine}")
        if self.out is not None and self.traces is not None:
            raise UserError("--traces: the traces lie in --out; give one of the two")
        if self.resume and self.out is None:
            raise UserError("--resume goes with --out DIR: results are kept nowhere else")


class EvalSettings(Settings):
    """What `--set` can change."""

    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    endpoint: EndpointSettings = Field(default_factory=EndpointSettings)
    state: StateSettings = Field(default_factory=StateSettings)


def evaluate_command(model: str, tasks: Path, databases: Sequence[Path], options: EvalOptions, *, store: Path | None, progress: Progress) -> dict[str, Any]:
    """Evaluate a model on a task file: success with interval, by category, pass@k and pass^k, outcomes, tokens and cost.

    model: folder of a policy or of a local transformers model; with the engine "openai", the endpoint's name of the model. UserError for
    input that cannot be used; Interrupted where a person stopped an evaluation that can go on.
    """
    options.check()
    chosen = read_tasks(tasks)
    player = _player(model, options)
    with open_backend("sqlite", store=store, **player.settings.state.options()) as backend:
        world = World(databases, backend=backend)
        for task in chosen:
            world.base(task.db_id)
        results = Results(options.out, _identity(model, chosen, player, options), resume=options.resume, traces=options.traces)
        started = time.monotonic()
        try:
            engine = _play(player, chosen, world, results, options, progress)
        except StateError as error:
            raise UserError(f"the evaluation cannot go on: {error}") from error
        except KeyboardInterrupt:
            if options.out is None:
                raise
            done, total = len(results.samples), len(chosen) * options.samples
            raise Interrupted(f"stopped; {done} of {total} episodes are in {options.out}: go on by the same command with --resume") from None
    summary = {
        "command": "eval", "model": model, "engine": options.engine, "tasks": len(chosen), "samples": options.samples, "mode": options.mode,
        "temperature": options.temperature, "seed": options.seed, **_summary(chosen, results, options),
        "settings": player.settings.model_dump(mode="json"), "calls": engine, "seconds": time.monotonic() - started,
        "out": str(options.out) if options.out is not None else None,
    }  # fmt: skip
    results.finish(summary)
    return summary


@dataclass(frozen=True, slots=True)
class _Player:
    """What speaks for the policy. chat, sampler: None at an endpoint, which has its own rendering. weights: their checksum where they are here."""

    settings: EvalSettings
    chat: Chat | None = None
    sampler: Sampler | None = None
    weights: str | None = None
    batch: int = BATCH


def _player(model: str, options: EvalOptions) -> _Player:
    if options.engine == "openai":
        settings = _settings(options, LARGE | _AT_AN_ENDPOINT)
        resolve(settings.endpoint)  # a key that is missing is said before anything is written
        return _Player(settings)
    folder = Path(model)
    if options.engine == "vllm":
        chat, known = load_chat(folder)
        settings = _settings(options, known or LARGE, positions=_positions(folder))
        return _Player(settings, chat, VllmEngine(folder, max_tokens=settings.environment.max_tokens, seed=options.seed))
    bundle = load_bundle(folder)
    settings = _settings(options, bundle.environment or LARGE, positions=_positions(folder))
    longest = settings.environment.max_tokens
    slots = _slots(bundle.policy.model, longest)
    engine = EmbeddedEngine(bundle.policy.model, slots=slots, max_tokens=longest, pad_id=bundle.chat.pad_id)
    return _Player(settings, bundle.chat, engine, engine.checksum, batch=max(1, min(BATCH, slots // options.samples)))


def _settings(options: EvalOptions, environment: dict[str, Any], *, positions: int | None = None) -> EvalSettings:
    """The settings: those that the policy was trained with, or those for a large model, then what the command line says."""
    endpoint = {"base_url": options.base_url} if options.base_url is not None else {}
    table: dict[str, Any] = {"environment": dict(environment), "endpoint": endpoint}
    for text in options.settings:
        key, value = parse_assignment(text)
        set_value(table, key, value, source="--set")
    if options.max_tokens is not None:
        table["environment"]["max_tokens"] = options.max_tokens
    settings = build(EvalSettings, table, source="--set")
    longest = settings.environment.max_tokens
    if positions is not None and longest > positions:
        if table["environment"].get("max_tokens") != environment.get("max_tokens"):
            raise UserError(f"max_tokens = {longest}: the model reads no more than {positions} tokens")
        settings = settings.model_copy(update={"environment": settings.environment.model_copy(update={"max_tokens": positions})})
    return settings


def _positions(folder: Path) -> int | None:
    """How many tokens the model in a folder reads, where its configuration says so."""
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # what is wrong with the folder is said where the model is loaded
    return known if isinstance(known, int) else None


def _slots(model: Any, max_tokens: int) -> int:
    """How many of the longest trajectories' keys and values fit into CACHE_BYTES, 256 at most."""
    config, parameter = model.config, next(model.parameters())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * parameter.element_size()
    return max(1, min(256, CACHE_BYTES // (token * max_tokens)))


def _identity(model: str, tasks: Sequence[Task], player: _Player, options: EvalOptions) -> dict[str, Any]:
    """What an evaluation must share with one that it goes on with. The endpoint's address, patience and prices may have changed since."""
    digest = hashlib.blake2b(json.dumps([task.record() for task in tasks], sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    return {
        "model": model, "weights": player.weights, "engine": options.engine, "extra": player.settings.endpoint.extra, "tasks": digest,
        "samples": options.samples, "mode": options.mode, "temperature": options.temperature, "seed": options.seed,
        "environment": player.settings.environment.model_dump(mode="json"), "batch": player.batch,
    }  # fmt: skip


def _play(player: _Player, tasks: Sequence[Task], world: World, results: Results, options: EvalOptions, progress: Progress) -> dict[str, Any]:
    """Every episode that is not there yet; what the engine counted."""
    playable = [task for task in tasks if _prepared(task, world, results, options.samples)]
    environment, grader = player.settings.environment, Grader(world.backend)
    limits = SamplingLimits(environment.max_message_tokens, environment.max_tokens, options.temperature)
    make_env = partial(environment.environment, options.mode, world, grader)
    total = len(tasks) * options.samples

    def add(trajectory: Trajectory) -> None:
        if (trajectory.task, trajectory.member) not in results:
            results.add(trajectory)
        progress.activity("episodes", len(results.samples), total)

    progress.activity("episodes", len(results.samples), total)
    if player.sampler is None or player.chat is None:
        jobs = [(task, sample) for task in playable for sample in range(options.samples) if (task.instance_id, sample) not in results]
        make_engine = partial(OpenAIEngine, results.identity["model"], player.settings.endpoint, temperature=options.temperature)
        return converse(jobs, make_engine, make_env, limits, seed=options.seed, each=add).counts if jobs else {}
    for at in range(0, len(playable), player.batch):
        part = playable[at : at + player.batch]
        # A batch that lacks any episode is sampled as a whole: its composition decides which random numbers each one gets.
        if any((task.instance_id, sample) not in results for task in part for sample in range(options.samples)):
            for group in rollout(part, options.samples, player.sampler, player.chat, make_env, limits, seed=options.seed + at):
                for trajectory in group.trajectories:
                    add(trajectory)
    return dict(player.sampler.tokens)


def _prepared(task: Task, world: World, results: Results, samples: int) -> bool:
    """Whether a task's set-up runs. Where it does not, the instance is invalid: that is nobody's answer, and the rest goes on."""
    try:
        world.image(task)
    except SetupError as error:
        for sample in range(samples):
            if (task.instance_id, sample) not in results:
                results.put(Sample(task.instance_id, sample, "invalid_instance", "failed", str(error), None, task.category))
        return False
    return True


def _summary(tasks: Sequence[Task], results: Results, options: EvalOptions) -> dict[str, Any]:
    keys: list[Key] = [(task.instance_id, sample) for task in tasks for sample in range(options.samples)]
    episodes = results.ordered(keys)
    usage: Counter[str] = Counter()
    for episode in episodes:
        usage.update(episode.cost)
    faults = {f"{e.task}#{e.sample}": e.reason for e in episodes if not e.valid}
    reasons = Counter(e.reason or "none" for e in episodes if e.valid)
    return {
        **summarise(episodes), **passes(episodes, options.samples), "reasons": dict(reasons.most_common()), "faults": faults,
        "usage": {name: round(value, 6) for name, value in sorted(usage.items())},
    }  # fmt: skip
