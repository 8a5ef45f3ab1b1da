"""Files of predictions: ours and BIRD-CRITIC's JSON lines, and BIRD's one object. Answers belong to ids, never to positions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from savepoint.envs.sql.tasks import Task, read_records, read_text
from savepoint.errors import UserError

_FIELDS = ("pred_sqls", "pred_sql", "sql")
_ID_FIELDS = ("instance_id", "question_id", "id")
_BIRD_MARK = "\t----- bird -----\t"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was handed in for one instance, as it stands. where: file and line, for messages."""

    instance_id: str
    statements: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Paired:
    """Predictions by the id of their task. missing: tasks without a line; unknown: ids without a task, in the file's order."""

    by_id: dict[str, Prediction]
    missing: list[str]
    unknown: list[str]


def read_predictions(path: str | Path) -> list[Prediction]:
    """The predictions of a file, in its order. UserError for a fault, with file and line; for an id that is there twice, with both lines."""
    path = Path(path)
    found: dict[str, Prediction] = {}
    for where, key, value in _entries(path):
        try:
            prediction = Prediction(key, _statements(value), where)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if key in found:
            raise UserError(f"{where}: instance_id {key!r} is predicted twice: also at {found[key].where}")
        found[key] = prediction
    return list(found.values())


def pair(predictions: Sequence[Prediction], tasks: Sequence[Task], *, ignore_unknown: bool = False) -> Paired:
    """Each task's prediction. UserError for an id that no task has, unless it is to be ignored."""
    known = {task.instance_id for task in tasks}
    by_id = {p.instance_id: p for p in predictions if p.instance_id in known}
    unknown = [p for p in predictions if p.instance_id not in known]
    if unknown and not ignore_unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise UserError(f"{unknown[0].where}: no task has the id {unknown[0].instance_id!r}{more}; --ignore-unknown leaves such lines out")
    return Paired(by_id, [task.instance_id for task in tasks if task.instance_id not in by_id], [p.instance_id for p in unknown])


def _statements(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"a prediction must be a string or a list of strings, not {str(value)[:80]!r}")
    return tuple(items)


def _entries(path: Path) -> Iterator[tuple[str, str, Any]]:
    """(place, id, statements as they stand) of each prediction."""
    text = read_text(path)
    if _is_one_object(text):
        for line, key, value in _members(path, text):
            yield f"{path}:{line}", key, value.rpartition(_BIRD_MARK)[0] if isinstance(value, str) and _BIRD_MARK in value else value
        return
    for where, _, record in read_records(path):
        if not isinstance(record, dict):
            raise UserError(f"{where}: a prediction must be a JSON object, not {type(record).__name__}")
        name = next((record[field] for field in _ID_FIELDS if record.get(field) is not None), None)
        if name is None or isinstance(name, dict | list):
            raise UserError(f"{where}: instance_id is missing: predictions are paired with tasks by it")
        yield where, str(name), next((record[field] for field in _FIELDS if record.get(field) is not None), None)


def _is_one_object(text: str) -> bool:
    """Whether the file is BIRD's `{"<id>": "SQL", ...}`: one object, none of whose keys is a field of a prediction."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        whole = json.loads(text)
    except ValueError:  # several objects, a line each; or broken, which the reader of lines will say better
        return False
    return not any(field in whole for field in (*_ID_FIELDS, *_FIELDS))


def _members(path: Path, text: str) -> Iterator[tuple[int, str, Any]]:
    """(line, key, value) of each member of the object that `text` is, repeated keys too."""
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "}":
            return
        line = text.count("\n", 0, at) + 1
        key, at = scanstring(text, at + 1, True)
        at = text.index(":", at) + 1
        while text[at] in " \t\r\n":
            at += 1
        value, at = decoder.raw_decode(text, at)
        yield line, key, value
