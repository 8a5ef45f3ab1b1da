"""Misuse of the state layer, told apart from bad input (`UserError`) and from an agent's mistakes (an `ExecResult`)."""

from __future__ import annotations

from savepoint.errors import UserError


class StateError(Exception):
    """The caller asked for what the state layer cannot give: a closed session, a fork inside a transaction, a snapshot of another base."""


class StaleLease(StateError):
    """The lease that this handle stands for has ended, or another holder has taken it over."""


class NoRoom(StateError):
    """A lease was refused: the memory budget has no room for it, and got none in the time it might wait. Or a limit of a subtree has none."""


class InUse(StateError):
    """A subtree was not pruned because sessions live in it."""


class Lost(StateError):
    """A state that only a worker process held, which has died: infrastructure's fault, never the agent's."""


class SetupError(StateError, UserError):
    """A set-up statement of `derive` failed. `str()` is one line that gives the statement and SQLite's words."""
