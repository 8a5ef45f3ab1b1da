"""Databases as immutable images and leased, private sessions."""

from savepoint.state.backend import AnySession, Backend, open_backend
from savepoint.state.doctor import doctor
from savepoint.state.errors import InUse, Lost, NoRoom, SetupError, StaleLease, StateError
from savepoint.state.image import BaseImage
from savepoint.state.pool import WorkerBackend
from savepoint.state.remote import RemoteSession
from savepoint.state.session import ExecResult, Quota, ResetProof, SessionStats, Snapshot, SqlValue
from savepoint.state.sqlite.backend import SqliteBackend
from savepoint.state.sqlite.session import Session
from savepoint.state.sqlite.split import split_statements
from savepoint.state.tree import Pruned, StateTree, TreeNode

__all__ = [
    "AnySession", "Backend", "BaseImage", "ExecResult", "InUse", "Lost", "NoRoom", "Pruned", "Quota", "RemoteSession", "ResetProof", "Session",
    "SessionStats", "SetupError", "Snapshot", "SqlValue", "SqliteBackend", "StaleLease", "StateError", "StateTree", "TreeNode", "WorkerBackend", "doctor",
    "open_backend", "split_statements",
]  # fmt: skip
