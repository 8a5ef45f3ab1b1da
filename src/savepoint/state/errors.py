"""Misuse of the state layer, told apart from bad input (`UserError`) and from an agent's mistakes (an `ExecResult`)."""

from __future__ import annotations

from savepoint.errors import UserError


class StateError(Exception):
    """The caller asked for what the state layer cannot give: a closed session, a fork inside a transaction, a snapshot of another base."""


class SetupError(StateError, UserError):
    """A set-up statement of `derive` failed. `str()` is one line that gives the statement and SQLite's words."""
