"""`savepoint/SqlDebug-v0` and `savepoint/SqlGenerate-v0`: an agent repairs or writes SQL on a live database that is its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gymnasium import spaces

from savepoint.envs.base import StatefulEnv, UnicodeText
from savepoint.envs.messages import Message, ToolCall, bytes_over_four
from savepoint.envs.sql.grade import Grader, Verdict
from savepoint.envs.sql.observation import ObservationFormat, observe
from savepoint.envs.sql.prompt import PromptStyle, answer_in_text, system_prompt, user_prompt
from savepoint.envs.sql.schema_text import SchemaFormat
from savepoint.envs.sql.tasks import Task, read_tasks
from savepoint.envs.sql.world import World
from savepoint.envs.tools import Tool
from savepoint.errors import UserError
from savepoint.state import AnySession, Quota, Snapshot

Mode = Literal["agentic", "single_turn"]

EXECUTE = Tool("execute_sql", "Run SQL on the live database and see what it gives. What it changes stays until the end.", {"sql": {"type": "string"}})
SUBMIT = Tool(
    "submit_solution",
    "Hand in the solution and end. Each string holds one or more statements; they run in order on a fresh copy of the database.",
    {"sql_list": {"type": "array", "items": {"type": "string"}}},
)


@dataclass(frozen=True, slots=True)
class Budget:
    """What an episode may use. `max_turns`: messages of the agent, the last of which must submit; tokens and seconds: None for no limit."""

    max_turns: int = 10
    max_tokens: int | None = None
    max_seconds: float | None = None
    statement_s: float = 5.0
    max_rows: int = 1000
    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")


@dataclass(frozen=True, slots=True)
class EnvSnapshot:
    """A moment of an episode: the database's snapshot and how far the conversation and the budgets had come."""

    database: Snapshot
    messages: tuple[Message, ...]
    turns: int
    tokens: int
    elapsed_s: float


class SqlEnv(StatefulEnv):
    """One task, one leased session, one conversation. `agentic`: the agent may look before it submits; `single_turn`: its first message is graded.

    Example:
        env = gymnasium.make("savepoint/SqlDebug-v0", tasks="tasks.jsonl", databases="db/")
        prompt, info = env.reset(seed=0, options={"task": "shop-17"})
        action: dict[str, spaces.Space[Any]] = {"content": "", "name": "submit_solution", "arguments": json.dumps({"sql_list": ["SELECT 1"]})}
        text, reward, terminated, truncated, info = env.step(action)

    `info` holds `task`, `category`, `messages` (the whole chat, at reset), `tools`, `turns`, and after the last step `reason` and `outcome`. Where our own
    infrastructure fails, `truncated` is True, `info["outcome"]` is "infra" and `info["reward"]` None: such an episode must not be learned from.
    """

    def __init__(
        self,
        tasks: str | Path | Sequence[Task] | None = None,
        databases: str | Path | None = None,
        *,
        kind: Literal["debugging", "generation"] = "debugging",
        mode: Mode = "agentic",
        budget: Budget | None = None,
        observation: ObservationFormat | None = None,
        prompt: PromptStyle = "full",
        schema: SchemaFormat | None = None,
        quota: Quota | None = None,
        count_tokens: Callable[[str], int] = bytes_over_four,
        world: World | None = None,
        grader: Grader | None = None,
    ) -> None:
        if mode not in ("agentic", "single_turn"):
            raise UserError(f"mode must be 'agentic' or 'single_turn', not {mode!r}")
        self.kind, self.mode, self.prompt = kind, mode, prompt
        self.budget, self.form, self.quota = budget or Budget(), observation or ObservationFormat(), quota or Quota()
        self.schema, self.count_tokens = schema or SchemaFormat(), count_tokens
        loaded = read_tasks(Path(tasks)) if isinstance(tasks, str | Path) else list(tasks or ())
        self._tasks = {task.instance_id: task for task in loaded if task.task == kind}
        if loaded and not self._tasks:
            raise UserError(f"{tasks if isinstance(tasks, str | Path) else 'tasks'}: no {kind} task among {len(loaded)}")
        self._owns_world = world is None
        self.world = world or World(databases)
        self.grader = grader or Grader(self.world.backend)
        action: dict[str, spaces.Space[Any]] = {"content": UnicodeText(1 << 20), "name": UnicodeText(256), "arguments": UnicodeText(1 << 20)}
        self.action_space = spaces.Dict(action)  # type: ignore[assignment]
        self.observation_space = UnicodeText(1 << 24)
        self._session: AnySession | None = None
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._turns = self._tokens = 0
        self._started = 0.0
        self._over = True

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (EXECUTE, SUBMIT) if self.mode == "agentic" else (SUBMIT,)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The chat so far."""
        return tuple(self._messages)

    @property
    def session(self) -> AnySession:
        if self._session is None:
            raise RuntimeError("call reset() before anything else")
        return self._session

    @property
    def task(self) -> Task:
        if self._task is None:
            raise RuntimeError("call reset() before anything else")
        return self._task

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Lease the task's image and show its prompt. `options["task"]`: an id of `tasks`, or a `Task` itself; none: one is drawn by the seed."""
        super().reset(seed=seed)
        self._release()
        self._task = self._choose((options or {}).get("task"))
        image = self.world.image(self._task)
        self._session = self.world.backend.lease(image, owner=f"{self._task.instance_id}", quota=self.quota)
        issue_result = None
        if self._task.issue_sql:
            issue_result = self.world.observe_issue(self._task, self.form, self.budget.statement_s)
        schema = self.world.schema(self._task, self.schema) if self.prompt == "full" else None
        self._messages = [system_prompt(self.mode, self.prompt), user_prompt(self._task, issue_result, schema, self.prompt)]
        self._turns, self._tokens = 0, sum(self.count_tokens(m.content) for m in self._messages)
        self._started, self._over = time.monotonic(), False
        return self._messages[-1].content, {**self._info(), "messages": [asdict(m) for m in self._messages], "tools": [t.schema() for t in self.tools]}

    def step(self, action: dict[str, str]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Record the agent's message, run its call, and answer. Rewards come from the call recorded here, never from a search of text."""
        if self._over:
            raise RuntimeError("the episode is over: call reset()")
        message, problem = read_action(action)
        self._messages.append(message)
        self._turns += 1
        self._tokens += self.count_tokens(action["content"] + action["arguments"])
        spent = self._budget_spent()
        if spent is not None:
            return self.cut(spent)
        submission = self._submission(message, problem)
        if submission is not None:
            return self._end("submitted", self.grader.grade(self.session.image, self.task, submission))
        if message.tool_call is None or self.mode == "single_turn":
            return self._end("no_call", Verdict("no_answer", problem or "the message submits nothing"))
        if self._turns >= self.budget.max_turns:
            return self.cut("turn_budget")
        return self._observe(message.tool_call, problem)

    def cut(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode for a spent budget (of turns, tokens or time): truncated, reward 0."""
        return self._end(reason, Verdict("no_answer", f"{reason.replace('_', ' ')} spent"), truncated=True)

    def snapshot(self) -> EnvSnapshot:
        return EnvSnapshot(self.session.checkpoint("snapshot"), self.messages, self._turns, self._tokens, time.monotonic() - self._started)

    def restore(self, snapshot: EnvSnapshot) -> None:
        self.session.restore(snapshot.database)
        self._messages, self._turns, self._tokens = list(snapshot.messages), snapshot.turns, snapshot.tokens
        self._started, self._over = time.monotonic() - snapshot.elapsed_s, False

    def fork(self, n: int = 1) -> list[SqlEnv]:  # type: ignore[override]
        forks = []
        for session in self.session.fork(n):
            env = SqlEnv(
                list(self._tasks.values()), kind=self.kind, mode=self.mode, budget=self.budget, observation=self.form, prompt=self.prompt,
                schema=self.schema, quota=self.quota, count_tokens=self.count_tokens, world=self.world, grader=self.grader,
            )  # fmt: skip
            env._session, env._task, env._messages = session, self._task, list(self._messages)
            env._turns, env._tokens, env._started, env._over = self._turns, self._tokens, self._started, self._over
            forks.append(env)
        return forks

    def close(self) -> None:
        """Give the lease back; the database connection of an environment that opened its own world is closed too."""
        self._release()
        if self._owns_world:
            self.world.close()

    def _release(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _choose(self, chosen: str | Task | None) -> Task:
        if isinstance(chosen, Task):
            return chosen
        if chosen is None:
            if not self._tasks:
                raise UserError("the environment has no tasks: pass tasks=FILE, or options={'task': Task}")
            ids = list(self._tasks)
            return self._tasks[ids[int(self.np_random.integers(len(ids)))]]
        if chosen not in self._tasks:
            raise UserError(f"no task {chosen!r} among the {len(self._tasks)} of this environment")
        return self._tasks[chosen]

    def _budget_spent(self) -> str | None:
        if self.budget.max_seconds is not None and time.monotonic() - self._started > self.budget.max_seconds:
            return "time_budget"
        if self.budget.max_tokens is not None and self._tokens > self.budget.max_tokens:
            return "token_budget"
        return None

    def _submission(self, message: Message, problem: str | None) -> Sequence[str] | None:
        """The statements that the message hands in: of its call, or of its text where a single turn answers in text."""
        call = message.tool_call
        if call is None:
            return answer_in_text(message.content) if self.mode == "single_turn" and problem is None else None
        if call.name != SUBMIT.name or SUBMIT.problem(call.arguments) is not None:
            return None
        return list(call.arguments["sql_list"])

    def _observe(self, call: ToolCall, problem: str | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        tool = next((t for t in self.tools if t.name == call.name), None)
        if problem is None:
            problem = f"there is no tool {call.name!r}: call {' or '.join(t.name for t in self.tools)}" if tool is None else tool.problem(call.arguments)
        if problem is not None:
            text = f"error: {problem}"
        else:
            budget = self.budget
            readonly = self.kind == "generation"
            result = self.session.execute(
                call.arguments["sql"], deadline_s=budget.statement_s, max_rows=budget.max_rows, max_bytes=budget.max_bytes, readonly=readonly
            )
            if result.status == "infra":
                return self._end("infra", Verdict("infra", result.error or ""), truncated=True)
            text = observe(result, self.form)
        self._messages.append(Message("tool", text))
        self._tokens += self.count_tokens(text)
        return text, 0.0, False, False, self._info()

    def _end(self, reason: str, verdict: Verdict, *, truncated: bool = False) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._over = True
        infra = verdict.reward is None
        info = {**self._info(), "reason": verdict.outcome if infra else reason, "outcome": verdict.outcome, "detail": verdict.detail, "reward": verdict.reward}
        return verdict.outcome, verdict.reward or 0.0, not (truncated or infra), truncated or infra, info

    def _info(self) -> dict[str, Any]:
        return {"task": self.task.instance_id, "category": self.task.category or "", "turns": self._turns, "tokens": self._tokens}


def read_action(action: dict[str, str]) -> tuple[Message, str | None]:
    """The message that an action stands for, and what is wrong with its call (None: nothing). A call that cannot be read keeps its name."""
    if not action["name"]:
        return Message("assistant", action["content"]), None
    problem, arguments = None, {}
    try:
        arguments = json.loads(action["arguments"] or "{}")
    except (ValueError, RecursionError) as error:  # the latter for brackets nested a thousand deep
        problem = f"the arguments of {action['name']} are not JSON: {error}"
    if problem is None and not isinstance(arguments, dict):
        problem, arguments = f"the arguments of {action['name']} must be a JSON object", {}
    return Message("assistant", action["content"], ToolCall(action["name"], arguments)), problem


def make_action(message: Message) -> dict[str, str]:
    """The action of a message: what `step` takes."""
    call = message.tool_call
    return {"content": message.content, "name": call.name if call else "", "arguments": json.dumps(call.arguments) if call else ""}

