"""Settings: pydantic models read from TOML, changed by `--set key=value`, and refused with one line that names file and key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from savepoint.errors import UserError


class Settings(BaseModel):
    """A group of settings: unknown keys and wrong types are errors, and a value does not change once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


S = TypeVar("S", bound=Settings)


def read_toml(path: Path) -> dict[str, Any]:
    """The table that a TOML file holds. UserError when it is missing, unreadable or not TOML (with the line)."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def set_value(table: dict[str, Any], key: str, value: Any, *, source: str) -> None:
    """Set a dotted `key` in nested tables; a number in it picks an item of a list, counted from 1 (`stages.4.steps`)."""
    *parents, last = key.split(".")
    here: Any = table
    for part in parents:
        here = _item(here, part, key, source) if isinstance(here, list) else here.setdefault(part, {})
        if not isinstance(here, dict | list):
            raise UserError(f"{source}: {key}: {part!r} is a value, not a table of settings")
    if isinstance(here, list):
        here[here.index(_item(here, last, key, source))] = value
    else:
        here[last] = value


def _item(items: list[Any], part: str, key: str, source: str) -> Any:
    if not part.isdecimal() or not 1 <= int(part) <= len(items):
        raise UserError(f"{source}: {key}: {part!r} must be a number from 1 to {len(items)}")
    return items[int(part) - 1]


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value` as given to `--set`. The value is read as TOML, and taken as text where it is none (`name=shop`)."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: must be key=value, for example tasks.heldout=100")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def build(model: type[S], table: dict[str, Any], *, source: str) -> S:
    """The checked settings, or a UserError that names the source, the first wrong key and what is wrong with it."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        # Discriminators and list positions are counted from 1, as `--set` counts them.
        key = ".".join(str(part + 1) if isinstance(part, int) else part for part in first["loc"] if part not in ("sft", "grpo"))
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(_siblings(model, first["loc"])))
            raise UserError(f"{source}: unknown key {key!r}" + (f" (known: {known})" if known else "")) from None
        message = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("missing", "value_error") else f", not {first['input']!r}"
        raise UserError(f"{source}: {key or 'recipe'}: {message[:1].lower() + message[1:]}{given}") from None


def _siblings(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    here: Any = model
    for part in location[:-1]:
        candidates = [here] if isinstance(here, type) and issubclass(here, BaseModel) else list(_models(here))
        if isinstance(part, str) and any(part in m.model_fields for m in candidates):
            here = next(m.model_fields[part].annotation for m in candidates if part in m.model_fields)
        elif isinstance(part, str):
            here = next((m for m in candidates if m.model_fields.get("kind") and part in get_args(m.model_fields["kind"].annotation)), here)
    found = [here] if isinstance(here, type) and issubclass(here, BaseModel) else list(_models(here))
    return {name for m in found for name in m.model_fields}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings models inside an annotation such as `tuple[A | B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, what it means) of every setting, from the models themselves: `--help` prints it."""
    for name, field in model.model_fields.items():
        nested = list(_models(field.annotation))
        if nested:
            for one in nested:
                kind = one.model_fields.get("kind")
                suffix = f"<{get_args(kind.annotation)[0]}>." if kind and len(nested) > 1 else ""
                yield from describe(one, f"{prefix}{name}.{suffix}")
        else:
            default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", default, field.description or ""
