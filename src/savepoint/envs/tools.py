"""Tool schemas, and the check of a call against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TYPES: dict[str, type[Any]] = {"string": str, "object": dict, "boolean": bool}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call. `parameters` maps an argument to its JSON schema; all are required."""

    name: str
    description: str
    parameters: dict[str, dict[str, Any]]

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI-compatible endpoints take it."""
        body = {"type": "object", "properties": self.parameters, "required": list(self.parameters), "additionalProperties": False}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": body}}

    def problem(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with a call's arguments, in the words that the policy reads; None when nothing is."""
        for name, schema in self.parameters.items():
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}"
            if not _matches(arguments[name], schema):
                return f"{self.name}: {name!r} must be {_article(schema)}"
        unknown = sorted(set(arguments) - set(self.parameters))
        return f"{self.name} has no argument {unknown[0]!r}" if unknown else None


def _matches(value: Any, schema: dict[str, Any]) -> bool:
    if schema["type"] == "array":
        return isinstance(value, list) and all(_matches(item, schema["items"]) for item in value)
    return isinstance(value, _TYPES[schema["type"]])


def _article(schema: dict[str, Any]) -> str:
    if schema["type"] == "array":
        return f"an array of {schema['items']['type']}s"
    return f"{'an' if schema['type'][0] in 'aeiou' else 'a'} {schema['type']}"
