"""Kinds of bug. `BUGS` work on small typed queries, `KINDS` on scripts as sqlglot parses them; both are pure: a right one goes in, a broken one comes out."""

from __future__ import annotations

from savepoint.envs.sql.bugs import efficiency, grouping, joins, management, objects, personalization, values, windows
from savepoint.envs.sql.bugs.draft import CATEGORIES, Category, Draft, Kind, Probe
from savepoint.envs.sql.bugs.ground import Ground
from savepoint.envs.sql.bugs.typed import BUGS, Bug, break_query, misspell

__all__ = ["BUGS", "CATEGORIES", "KINDS", "Bug", "Category", "Draft", "Ground", "Kind", "Probe", "break_query", "misspell"]

KINDS: dict[str, Kind] = {
    name: kind
    for module in (grouping, joins, windows, values, personalization, management, objects, efficiency)
    for name, kind in module.KINDS.items()
}
