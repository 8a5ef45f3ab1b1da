"""What an agent's SQL may do: the authorizer, the allow-list of pragmas, and SQLite's own limits and defences.

The decision is made on what SQLite parsed, never on words of the text, and each refusal is recorded: "denied" is not "sql_error".
"""

from __future__ import annotations

import math
import time

import apsw

from savepoint.state.session import Quota

# Pragmas that only look something up; the argument, if any, names what to look up.
LOOKUPS = frozenset(
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list foreign_key_check integrity_check quick_check "
    "database_list collation_list function_list module_list pragma_list compile_options".split()
)
# Values to read and not to set: they belong to the file, the cache or the process.
READABLE = frozenset("schema_version page_size page_count cache_size encoding auto_vacuum freelist_count data_version".split())
# Settings of the connection: a fork takes them along.
CONNECTION_SETTINGS = frozenset("foreign_keys recursive_triggers case_sensitive_like reverse_unordered_selects analysis_limit ignore_check_constraints".split())
# What may be set: the connection's settings, what ends with the transaction, and values in the session's own database.
SETTABLE = CONNECTION_SETTINGS | frozenset("defer_foreign_keys user_version application_id".split())
# Commands that write, with and without an argument.
WRITING = frozenset("optimize incremental_vacuum".split())

DENIED_FUNCTIONS = frozenset("load_extension fts3_tokenizer readfile writefile edit zipfile".split())
MAX_SAVEPOINTS = 4096  # each costs memory that no quota sees; more in one transaction is no honest use
CACHE_KIB = 64  # per connection; measured: smaller than SQLite's 2 MB is faster here, since a page read is a memcpy

_TEMPORARY = (
    apsw.SQLITE_CREATE_TEMP_TABLE, apsw.SQLITE_CREATE_TEMP_INDEX, apsw.SQLITE_CREATE_TEMP_TRIGGER, apsw.SQLITE_CREATE_TEMP_VIEW,
)  # fmt: skip
_OK, _DENY = apsw.SQLITE_OK, apsw.SQLITE_DENY


class Policy:
    """The authorizer of one connection.

    denied: what it refused since `begin`. late: it stopped a statement that was still being prepared at the deadline; nested views take
    seconds of that, and neither an interrupt nor the progress handler reaches it. transaction: the BEGIN, COMMIT or ROLLBACK being prepared.
    """

    def __init__(self) -> None:
        self.deadline, self.late = math.inf, False
        self.readonly = False
        self.denied: str | None = None
        self.transaction: str | None = None
        self.savepoints = 0  # opened since the transaction began; whoever ends a call outside of one sets it back
        self.creates_tables = False
        self.made_temporary = False  # a TEMP object or an attached database may exist
        self.settings: dict[str, str] = {}
        self._checks = {
            apsw.SQLITE_PRAGMA: self._pragma,
            apsw.SQLITE_ATTACH: self._attach,
            apsw.SQLITE_FUNCTION: self._function,
            apsw.SQLITE_TRANSACTION: self._transaction,
            apsw.SQLITE_SAVEPOINT: self._savepoint,
            apsw.SQLITE_CREATE_TABLE: self._create_table,
            **dict.fromkeys(_TEMPORARY, self._create_temporary),
        }

    def begin(self, deadline: float, readonly: bool) -> None:
        self.deadline, self.readonly = deadline, readonly
        self.late, self.denied, self.transaction = False, None, None

    def authorize(self, operation: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
        """apsw's authorizer: called while SQLite prepares a statement, also the ones that run inside another."""
        if time.monotonic() >= self.deadline:
            self.late = True
            return _DENY
        check = self._checks.get(operation)
        reason = check(first, second) if check else None
        if reason is None:
            return _OK
        self.denied = reason
        return _DENY

    def _pragma(self, name: str | None, argument: str | None) -> str | None:
        pragma = (name or "").lower()
        if pragma in LOOKUPS or (pragma in READABLE and argument is None):
            return None
        if pragma in SETTABLE and not (self.readonly and argument is not None):
            if argument is not None and pragma in CONNECTION_SETTINGS:
                self.settings[pragma] = argument
            return None
        if pragma in WRITING and not self.readonly:
            return None
        return f"PRAGMA {pragma}" + ("" if argument is None else f" = {argument[:60]}")

    def _attach(self, file: str | None, _: str | None) -> str | None:
        self.made_temporary = True
        # '' is a private temporary database, which VACUUM needs. An expression arrives as None and could become anything.
        return None if file == "" and not self.readonly else "ATTACH " + ("of an expression" if file is None else repr(file[:60]))

    def _function(self, _: str | None, name: str | None) -> str | None:
        return name if (name or "").lower() in DENIED_FUNCTIONS else None

    def _transaction(self, operation: str | None, _: str | None) -> str | None:
        self.transaction = operation
        return None

    def _savepoint(self, operation: str | None, _: str | None) -> str | None:
        self.savepoints += operation == "BEGIN"
        return f"more than {MAX_SAVEPOINTS} savepoints in a transaction" if self.savepoints > MAX_SAVEPOINTS else None

    def _create_temporary(self, _: str | None, __: str | None) -> str | None:
        self.made_temporary = True
        return None

    def _create_table(self, _: str | None, __: str | None) -> str | None:
        self.creates_tables = True
        return None


def harden(connection: apsw.Connection, quota: Quota, policy: Policy, columns: int) -> None:
    """Limits, defences and pragmas of a connection that will run an agent's SQL. `columns`: the widest table that must stay readable."""
    # A real journal (not journal_mode=memory): its bytes are then on the session's account, and reading it tells the VFS of a rollback.
    connection.execute(
        f"PRAGMA locking_mode=exclusive; PRAGMA journal_mode=truncate; PRAGMA synchronous=off; PRAGMA temp_store=file; PRAGMA cache_size=-{CACHE_KIB}"
    ).fetchall()
    for limit, value in (
        (apsw.SQLITE_LIMIT_LENGTH, quota.length),
        (apsw.SQLITE_LIMIT_SQL_LENGTH, quota.sql_length),
        (apsw.SQLITE_LIMIT_COLUMN, max(quota.columns, columns)),
        (apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 256),  # LIKE and GLOB cost length of text times length of pattern, in one opcode
        (apsw.SQLITE_LIMIT_ATTACHED, 2),
        (apsw.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.limit(limit, value)
    for option, value in (
        (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
        (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
        (apsw.SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0),
    ):
        connection.config(option, value)
    connection.authorizer = policy.authorize
