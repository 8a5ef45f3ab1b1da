"""The plan of a run: a recipe in TOML, read into typed settings. Nothing here runs anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from savepoint.config import Settings, build, parse_assignment, read_toml, set_value
from savepoint.curriculum.demonstrations import DemonstratorSettings
from savepoint.envs.sql.bugs import BUGS, KINDS
from savepoint.envs.sql.queries import FORMS
from savepoint.envs.sql.settings import EnvironmentSettings, StateSettings
from savepoint.errors import UserError
from savepoint.train.grpo import GrpoSettings
from savepoint.train.learner import LearnerSettings
from savepoint.train.policy import TinyConfig
from savepoint.train.sft import SftSettings

Mode = Literal["single_turn", "agentic"]


class TaskSettings(Settings):
    """Which tasks: made from a database, or read from files."""

    database: str = Field("shop", description="the embedded database shop or clinic, or any SQLite file: tasks are made from it")
    level: Literal["quick", "deep"] = Field(
        "quick", description="quick: small queries; deep: kinds of all four categories, tried on several images, held out by the shape of the query"
    )
    wording: Literal["brief", "plain"] | None = Field(
        None, description="brief: the question alone, for tiny policies and the small kinds of bug; plain: full sentences; none: brief for quick tasks"
    )
    max_tables: int = Field(5, ge=1, description="tables of a larger schema that tasks use")
    max_columns: int = Field(25, ge=2, description="columns, of all tables together, that tasks use")
    forms: tuple[str, ...] = Field(("list", "aggregate", "group", "top"), description='forms of query; ["all"] for all')
    bugs: tuple[str, ...] = Field(
        ("misspelled_column", "wrong_table", "wrong_aggregate", "missing_group_by", "wrong_comparison", "wrong_direction"),
        description='kinds of bug, beside renamed columns; ["all"] for all that the level has, and if deep renamed tables',
    )
    renamed_share: float = Field(0.5, ge=0, le=1, description="share of tasks whose schema was migrated since the query was written")
    heldout: int = Field(200, ge=1, description="tasks kept out of training, for evaluation")
    file: str | None = Field(None, description="task file (JSON lines) to train on, in place of made tasks")
    heldout_file: str | None = Field(None, description="task file to evaluate on, with `file`")
    databases: str | None = Field(None, description="folder of the databases that `file` names")

    @property
    def known_bugs(self) -> tuple[str, ...]:
        """The kinds of bug that the level has."""
        return tuple(BUGS) if self.level == "quick" else (*BUGS, *KINDS)

    @model_validator(mode="after")
    def _known(self) -> TaskSettings:
        for name, chosen, known in (("forms", self.forms, tuple(FORMS)), ("bugs", self.bugs, self.known_bugs)):
            if chosen == ("all",):
                continue
            unknown = [item for item in chosen if item not in known]
            if unknown or not chosen:
                raise ValueError(f"{name}: {f'unknown {unknown[0]!r}' if unknown else 'empty'} (known: {', '.join(known)})")
        if self.level == "deep" and self.wording == "brief" and not {*self.bugs} <= {*BUGS}:
            raise ValueError(f"wording: brief has words for these bugs alone: {', '.join(BUGS)}")
        if (self.file is None) != (self.heldout_file is None) or (self.file is not None and self.databases is None):
            raise ValueError("file, heldout_file and databases go together")
        return self


class PolicySettings(TinyConfig):
    """The policy: a tiny model made from scratch, or any local transformers model."""

    model: str | None = Field(None, description="folder of a transformers model to start from; the other settings of [policy] are then unused")


class EvaluationSettings(Settings):
    """Evaluation on held-out tasks, before the first stage and after each."""

    samples: int = Field(2, ge=1, description="episodes a held-out task, in each mode")
    temperature: float = Field(1.0, ge=0, description="0: greedy")


class SftStage(SftSettings):
    """A stage of imitation."""

    kind: Literal["sft"]
    name: str = Field(min_length=1, description="what the stage is called")
    mode: Mode = Field(description="whether the demonstrator may look at the database before it submits")
    demonstrations: int = Field(ge=1, description="demonstrations, each of a fresh task, in the stage's mode")
    single_turn_demonstrations: int = Field(0, ge=0, description="further demonstrations in a single turn, so that it is not forgotten")
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints")


class GrpoStage(GrpoSettings):
    """A stage of reinforcement learning."""

    kind: Literal["grpo"]
    name: str = Field(min_length=1, description="what the stage is called")
    mode: Mode = Field(description="whether the policy may look at the database before it submits")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    checkpoint_every: int = Field(5, ge=1, description="steps between checkpoints")


class Recipe(Settings):
    """A whole plan: tasks, policy, environment, and stages in order, each starting from the weights of the one before."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="names the default run folder")
    seed: int = Field(0, ge=0, description="every random draw follows from it")
    threads: int = Field(2, ge=1, description="threads of torch")
    tensorboard: bool = Field(True, description="write TensorBoard files beside metrics.jsonl")
    tasks: TaskSettings = Field(default_factory=TaskSettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    demonstrator: DemonstratorSettings = Field(default_factory=DemonstratorSettings)
    state: StateSettings = Field(default_factory=StateSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    stages: tuple[Annotated[SftStage | GrpoStage, Field(discriminator="kind")], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _runnable(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated:
            raise ValueError(f"stages: two are called {repeated!r}")
        if self.tasks.file and any(isinstance(stage, SftStage) for stage in self.stages) and self.policy.model is None:
            raise ValueError("policy.model: tasks from a file need a model that reads them; a tiny one knows only made tasks")
        return self


def load_recipe(path: str | Path, assignments: Sequence[str] = ()) -> tuple[Recipe, str | None]:
    """A recipe and the profile chosen with `--set profile=NAME`. UserError that names the file and the key.

    path: a TOML file, or the name of one in `recipes/`. Profiles are tables of dotted keys under `[profiles.NAME]`; `--set` comes after them.
    """
    found = find_recipe(path)
    table = read_toml(found)
    profiles = table.pop("profiles", {})
    sets = [parse_assignment(text) for text in assignments]
    profile = next((str(value) for key, value in reversed(sets) if key == "profile"), None)
    if profile is not None:
        if profile not in profiles:
            raise UserError(f"{found}: no profile {profile!r} (known: {', '.join(sorted(profiles)) or 'none'})")
        for key, value in _flat(profiles[profile]):
            set_value(table, key, value, source=f"{found}: profiles.{profile}")
    for key, value in sets:
        if key != "profile":
            set_value(table, key, value, source="--set")
    return build(Recipe, table, source=str(found)), profile


def find_recipe(path: str | Path) -> Path:
    path = Path(path)
    named = Path(__file__).parents[3] / "recipes" / f"{path}.toml"
    if path.is_file() or not named.is_file():
        return path
    return named


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in table.items():
        out += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return out
