"""Settings of environments and of the state under them: imitation, reinforcement learning and evaluation all make theirs here, and show the same text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from savepoint.config import Settings
from savepoint.envs.sql.env import Budget, Mode, SqlEnv
from savepoint.envs.sql.grade import Grader
from savepoint.envs.sql.observation import ObservationFormat
from savepoint.envs.sql.schema_text import SMALLEST, SchemaFormat
from savepoint.envs.sql.world import World


class StateSettings(Settings):
    """Where the SQL of environments and graders runs."""

    workers: int = Field(0, ge=0, description="processes that run it, sandboxed; 0: this one runs it")
    threads: int = Field(4, ge=1, description="calls at a time in each worker")
    ship: Literal["call", "never"] = Field("call", description="ship a session's changes after every call, so that the death of its worker costs nothing")
    require_sandbox: Literal["none", "limits", "partial", "full"] = Field("none", description="refuse to run when a worker's sandbox reaches less")

    @model_validator(mode="after")
    def _consistent(self) -> StateSettings:
        if self.workers == 0 and self.require_sandbox != "none":
            raise ValueError("require_sandbox needs workers: with workers = 0 the SQL runs in this process, in no sandbox")
        return self

    def options(self) -> dict[str, Any]:
        """The options of `open_backend`."""
        return {"workers": self.workers, **({"threads": self.threads, "ship": self.ship, "require_sandbox": self.require_sandbox} if self.workers else {})}


class EnvironmentSettings(Settings):
    """Budgets of an episode, what its prompt says, and how much of a result the agent sees."""

    prompt: Literal["brief", "full"] = Field("brief", description="brief: what a tiny model reads; full: instructions and schema, for large models")
    schema_tokens: int = Field(2000, ge=SMALLEST, description="budget of the schema in a full prompt, four bytes of text a token; what is cut is said")
    sample_rows: int = Field(3, ge=0, le=20, description="rows of each table in a full prompt")
    max_turns: int = Field(4, ge=1, description="messages of the agent in an agentic episode; the last must submit")
    max_message_tokens: int = Field(64, ge=1, description="tokens of one message")
    max_tokens: int = Field(400, ge=16, description="tokens of a whole trajectory, prompt and observations included")
    max_seconds: float | None = Field(None, gt=0, description="wall-clock budget of an episode")
    statement_seconds: float = Field(2.0, gt=0, description="deadline of one statement")
    rows_shown: int = Field(1, ge=1, description="rows of a result that the agent reads")
    cell_shown: int = Field(40, ge=1, description="characters of a value that the agent reads")
    digits_shown: int = Field(6, ge=1, le=17, description="significant digits of a REAL that the agent reads")

    def environment(self, mode: Mode, world: World, grader: Grader) -> SqlEnv:
        """A fresh environment with these budgets, this prompt and this form of observation."""
        return SqlEnv(
            mode=mode, budget=Budget(self.max_turns, max_seconds=self.max_seconds, statement_s=self.statement_seconds),
            observation=ObservationFormat(max_rows=self.rows_shown, max_cell=self.cell_shown, digits=self.digits_shown),
            prompt=self.prompt, schema=SchemaFormat(self.schema_tokens, self.sample_rows), world=world, grader=grader,
        )  # fmt: skip


LARGE: dict[str, Any] = {
    "prompt": "full", "max_turns": 10, "max_message_tokens": 1024, "max_tokens": 8192, "statement_seconds": 5.0,
    "rows_shown": 20, "cell_shown": 200, "digits_shown": 15,
}  # fmt: skip
"""What evaluation uses for a model that was not trained here: the settings of a recipe are by default those of a tiny one."""
