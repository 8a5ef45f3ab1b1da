"""Databases as immutable images and leased, private sessions."""

from savepoint.state.doctor import doctor
from savepoint.state.errors import SetupError, StateError
from savepoint.state.image import BaseImage
from savepoint.state.session import ExecResult, Quota, ResetProof, SessionStats, Snapshot, SqlValue
from savepoint.state.sqlite.backend import SqliteBackend, open_backend
from savepoint.state.sqlite.session import Session
from savepoint.state.sqlite.split import split_statements

__all__ = [
    "BaseImage", "ExecResult", "Quota", "ResetProof", "Session", "SessionStats", "SetupError", "Snapshot", "SqlValue", "SqliteBackend", "StateError",
    "doctor", "open_backend", "split_statements",
]  # fmt: skip
