"""Tasks about SQL, and task files: JSON lines (or one JSON array) in the format of BIRD-CRITIC, BIRD, Spider and our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from savepoint.errors import UserError

TaskKind = Literal["debugging", "generation"]

_ALIASES: dict[str, tuple[str, ...]] = {
    "instance_id": ("question_id", "id"),
    "db_id": ("selected_database", "db"),
    "issue_sql": ("error_sql",),
    "sol_sql": ("SQL", "gold_sql"),
}
_STATEMENTS = ("issue_sql", "sol_sql", "preprocess_sql", "clean_up_sql")
_TEXTS = ("evidence", "category", "difficulty", "dialect")


@dataclass(frozen=True, slots=True)
class Task:
    """One instance: what the user says, what they ran, what is right, and the set-up that the database needs first.

    query: the user's text, the issue of a debugging task or the question of a generation task. The fields of statements are tuples; each string may
    hold several statements. `conditions`: `order`, `distinct`, `decimal`, `now`, which win over the grader's defaults. `checks` and `test_cases`: how it is
    graded, in a declarative form and in Python (docs/evaluation.md). `synth` says how a made task was made (see docs/tasks.md), and is empty for
    others. `extra` keeps unknown fields of a file.
    """

    instance_id: str
    task: TaskKind
    db_id: str
    query: str
    sol_sql: tuple[str, ...]
    issue_sql: tuple[str, ...] = ()
    preprocess_sql: tuple[str, ...] = ()
    clean_up_sql: tuple[str, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[Mapping[str, Any], ...] = ()
    test_cases: tuple[str, ...] = ()
    evidence: str | None = None
    category: str | None = None
    difficulty: str | None = None
    dialect: str | None = None
    tags: tuple[str, ...] = ()
    synth: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*_STATEMENTS, "tags", "checks", "test_cases"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.task not in ("debugging", "generation"):
            raise ValueError(f"task must be 'debugging' or 'generation', not {self.task!r}")
        now(self)

    def demand_complete(self) -> None:
        """ValueError for a task that nobody could be trained or examined on: without gold, without the user's text, without the SQL to repair."""
        if not any(sql.strip() for sql in self.sol_sql):
            raise ValueError("sol_sql is empty: an instance needs at least one gold statement")
        if self.task == "debugging" and not any(sql.strip() for sql in self.issue_sql):
            raise ValueError("issue_sql is empty: a debugging task needs the user's SQL")
        if not self.query.strip():
            raise ValueError(f"{'query' if self.task == 'debugging' else 'question'} is missing: a task needs the user's text")

    def record(self) -> dict[str, Any]:
        """The task as it stands in a file: keys in a fixed order, what is empty left out, unknown fields last."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "extra" or (value in (None, (), {}) and f.name != "query"):
                continue
            name = "question" if f.name == "query" and self.task == "generation" else f.name
            out[name] = list(value) if isinstance(value, tuple) else value
        return {**out, **{key: value for key, value in self.extra.items() if key not in out}}


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Write tasks as JSON lines. The same tasks give the same bytes. UserError when the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8", newline="\n") as file:
            for task in tasks:
                file.write(json.dumps(task.record(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def now(task: Task) -> datetime | None:
    """What the task's SQL takes for the present (`conditions.now`), in UTC; None where it does not say. ValueError when it is no ISO time."""
    value = task.conditions.get("now")
    return None if value is None else parse_time(value, "conditions.now")


def parse_time(value: object, name: str) -> datetime:
    """An ISO date or time as a moment in UTC; a time without a zone is UTC. ValueError that names the field."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None:
        raise ValueError(f"{name} must be an ISO time such as 2025-01-01T00:00:00Z, not {value!r}")
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file, in its order, each complete; a repeated id becomes `id#2`, `id#3`. UserError that names file and line of the first fault."""
    return load_tasks(path).tasks


@dataclass(frozen=True, slots=True)
class TaskFile:
    """What a task file holds. warnings: a line for each thing that was put right, such as a repeated id."""

    tasks: list[Task]
    warnings: list[str]


def load_tasks(path: str | Path, *, complete: bool = True) -> TaskFile:
    """As `read_tasks`, with the warnings. complete: whether a task without gold, text or issue SQL is a fault; public test sets withhold the gold."""
    path = Path(path)
    tasks: list[Task] = []
    warnings: list[str] = []
    seen: set[str] = set()
    for where, number, record in read_records(path):
        try:
            task = _task(record, number)
            if complete:
                task.demand_complete()
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: {error}") from None
        unique = _unique(task.instance_id, seen)
        seen.add(unique)
        if unique != task.instance_id:
            warnings.append(f"{where}: instance_id {task.instance_id!r} is there already: this one is {unique!r}")
            task = replace(task, instance_id=unique)
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: holds no task")
    return TaskFile(tasks, warnings)


def _unique(instance_id: str, seen: set[str]) -> str:
    """The id itself, or with the first `#2`, `#3` … that no earlier task has."""
    unique, count = instance_id, 1
    while unique in seen:
        count += 1
        unique = f"{instance_id}#{count}"
    return unique


def read_records(path: Path) -> Iterator[tuple[str, int, Any]]:
    """(place for messages, number from 1, decoded JSON) of each record of a JSON-lines or JSON-array file. UserError as for `read_text`."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON: {error}") from None
        yield from ((f"{path}: item {number}", number, item) for number, item in enumerate(items, 1))
        return
    # Not splitlines(): U+2028 and its like are ordinary characters inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", number, json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error}") from None


def read_text(path: Path) -> str:
    """A file's text. UserError for one that is not there, cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _task(record: Any, number: int) -> Task:
    if not isinstance(record, dict):
        raise ValueError(f"an instance must be a JSON object, not {type(record).__name__}")
    given = {key: value for key, value in record.items() if value is not None}
    values: dict[str, Any] = {}
    for name, aliases in _ALIASES.items():
        found = next((key for key in (name, *aliases) if key in given), None)
        if found is not None:
            values[name] = given.pop(found)
    text = given.pop("question", None)
    if text is not None and "sol_sql" not in values and "query" in given:
        values["sol_sql"] = given.pop("query")  # Spider: `query` is the gold where `question` stands beside it
    query = given.pop("query", None)
    for name in _STATEMENTS:
        values[name] = _statements(name, values.pop(name, given.pop(name, None)))
    kind = given.pop("task", None) or ("debugging" if values["issue_sql"] else "generation")
    values["query"] = next((str(t) for t in ((query, text) if kind == "debugging" else (text, query)) if t is not None), "")
    db_id = str(values.get("db_id", ""))
    if not db_id or db_id in (".", "..") or any(part in db_id for part in "/\\\0"):
        raise ValueError(f"db_id must be a plain name, not {db_id!r}" if db_id else "db_id is missing")
    instance_id = str(values.get("instance_id", f"{db_id}:{number}"))
    for name in _TEXTS:
        value = given.pop(name, None)
        values[name] = None if value is None else str(value)
    values["tags"] = _texts("tags", given.pop("tags", ()))
    values["test_cases"] = _statements("test_cases", given.pop("test_cases", None))
    values["checks"] = _checks(given.pop("checks", None))
    for name in ("conditions", "synth"):
        values[name] = given.pop(name, {})
        if not isinstance(values[name], dict):
            raise ValueError(f"{name} must be an object, not {values[name]!r}")
    return Task(**{**values, "instance_id": instance_id, "db_id": db_id, "task": kind, "extra": given})


def _checks(value: Any) -> tuple[Mapping[str, Any], ...]:
    items = [value] if isinstance(value, dict) else [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) and isinstance(item.get("type"), str) for item in items):
        raise ValueError(f"checks must be a list of objects with a type, not {value!r}")
    return tuple(items)


def _statements(name: str, value: Any) -> tuple[str, ...]:
    return tuple(sql for sql in _texts(name, value) if sql.strip())


def _texts(name: str, value: Any) -> tuple[str, ...]:
    items: Sequence[Any] = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{name} must be a string or a list of strings, not {value!r}")
    return tuple(items)
