"""`savepoint shell`: SQL on a leased session of any database, with its states at hand. The file itself is never written."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from savepoint.errors import UserError
from savepoint.shell_tree import diff_data, diff_text, tree_data, tree_text
from savepoint.state import BaseImage, ExecResult, Quota, Session, Snapshot, SqliteBackend, StateError, open_backend
from savepoint.state.sqlite.build import cache_dir
from savepoint.state.sqlite.split import ends_statement

_SHOWN_ROWS, _KEPT_ROWS, _KEPT_BYTES = 100, 10_000, 16 << 20
_DEADLINE_S = 86_400.0  # Ctrl-C ends a statement that takes too long
# A person's own session, not an agent's: room for whatever fits on the machine.
_QUOTA = Quota(delta_bytes=64 << 30, temp_bytes=64 << 30, length=1_000_000_000, sql_length=64 << 20, columns=2000)
_HISTORY_LINES = 2000
_FILE = "file"  # what .diff calls the database as it was opened
Answer = str | tuple[str, dict[str, Any]]
_HELP = """\
.checkpoint [NAME]   keep the state of this moment (default name: 1, 2, ...)
.restore NAME        go back to a checkpoint; TEMP objects and open transactions are gone
.fork NAME           another session with the same contents, called NAME
.tree                checkpoints and sessions, and what they came from
.checkout NAME       work in that session, or at that checkpoint (refused where changes would be lost; .restore drops them)
.prune NAME          free a checkpoint and those made from it, or close a session
.diff [A [B]]        rows that differ from A (default: file) to B (default: now); checkpoints, sessions, or file
.use NAME            work in that session            .sessions       list them
.reset               drop everything and print the proof
.digest [logical]    digest of the contents          .delta          what differs from the file
.export FILE         write the contents as a database file
.tables              .schema [TABLE]                 .help           .quit
SQL may span lines and ends with a semicolon. Ctrl-C stops a statement, Ctrl-D the shell."""


class Shell:
    """Named sessions over one image, and the checkpoints they share. A command is a method `do_NAME(argument)` that answers with a text, or with
    a text and what JSON mode gives besides."""

    def __init__(self, backend: SqliteBackend, image: BaseImage, out: TextIO, *, json_mode: bool, title: str = "") -> None:
        self.backend, self.image, self.out, self.json_mode, self.title = backend, image, out, json_mode, title or str(image.path)
        self.sessions: dict[str, Session] = {"main": backend.lease(image, owner="main", quota=_QUOTA, ttl_s=None)}
        self.checkpoints: dict[str, Snapshot] = {}
        self.current = "main"
        self.failed = False
        self._worker = ThreadPoolExecutor(1, "savepoint-shell")

    @property
    def session(self) -> Session:
        return self.sessions[self.current]

    def run(self, text: str) -> bool:
        """Run a dot command, or SQL statement by statement up to the first that fails; False when the shell should end."""
        if not text.startswith("."):
            for statement in self.session.statements(text):
                started = time.perf_counter()
                result = self._execute(statement)
                self._show(result, time.perf_counter() - started)
                if result.status != "ok":
                    break
            return True
        started = time.perf_counter()
        name, _, argument = text[1:].strip().partition(" ")
        if name in ("quit", "exit"):
            return False
        command: Callable[[str], Answer] | None = getattr(self, f"do_{name}", None)
        if command is None:
            self._fail(f"no command .{name}: see .help")
            return True
        try:
            self._say(command(argument.strip()), started)
        except (StateError, UserError) as error:
            self._fail(str(error))
        return True

    def close(self) -> None:
        self._worker.shutdown()

    # ------------------------------------------------------------------ commands

    def do_help(self, _: str) -> str:
        return _HELP

    def do_checkpoint(self, name: str) -> str:
        name = name or str(next(i for i in range(1, len(self.checkpoints) + 2) if str(i) not in self.checkpoints))
        if name in self.sessions or name == _FILE:
            raise UserError(f"checkpoint {name!r}: a session has that name" if name in self.sessions else f"checkpoint {name!r}: that is the file itself")
        snapshot = self.checkpoints[name] = self.session.checkpoint(name)
        return f"checkpoint {name}: {snapshot.pages} pages differ from the file"

    def do_restore(self, name: str) -> str:
        self.session.restore(_named(self.checkpoints, name, "checkpoint"))
        return f"back at checkpoint {name}"

    def do_fork(self, name: str) -> str:
        if not name or name in self.sessions or name in self.checkpoints or name == _FILE:
            raise UserError(f"{'checkpoint' if name in self.checkpoints else 'session'} {name!r} exists already" if name else ".fork needs a name")
        (self.sessions[name],) = self.session.fork(label=name)
        return f"session {name} has the contents of {self.current}; .use {name} to work in it"

    def do_use(self, name: str) -> str:
        _named(self.sessions, name, "session")
        self.current = name
        return f"in session {name}"

    def do_tree(self, _: str) -> Answer:
        nodes = self.backend.tree(self.image).nodes()
        current = next((node for node in nodes if node.kind == "session" and node.record.handle() is self.session), None)
        return tree_text(nodes, f"{self.title}  {self.image.size:,} bytes", current, self.image.page_size), {"nodes": tree_data(nodes)}

    def do_checkout(self, name: str) -> str:
        if name in self.sessions:
            return self.do_use(name)
        snapshot = _named(self.checkpoints, name, "checkpoint or session")
        if self.session.in_transaction or self.session.changed:
            raise UserError(f"session {self.current} has changes since its last checkpoint: .checkpoint keeps them, .restore {name} drops them")
        self.session.restore(snapshot)
        return f"session {self.current} at checkpoint {name}"

    def do_prune(self, name: str) -> str:
        if name in self.sessions:
            if name == self.current:
                raise UserError(f"session {name} is the one at hand: .use another one first")
            self.sessions.pop(name).close()
            return f"session {name} is closed"
        pruned = self.backend.tree(self.image).prune(_named(self.checkpoints, name, "checkpoint or session"))
        self.checkpoints = {label: snapshot for label, snapshot in self.checkpoints.items() if not snapshot.pruned}
        return f"{pruned.snapshots} checkpoint{'s' * (pruned.snapshots > 1)} pruned, {pruned.bytes:,} bytes"

    def do_diff(self, names: str) -> Answer:
        first, _, second = names.partition(" ")
        before, after = self._state(first or _FILE), self._state(second.strip()) if second.strip() else None
        diffs = self.session.diff(before, after)
        return diff_text(diffs, first or _FILE, second.strip() or "now"), {"tables": diff_data(diffs)}

    def do_sessions(self, _: str) -> str:
        mark = {True: "*", False: " "}
        return "\n".join(f"{mark[name == self.current]} {name}: {session.stats().delta_pages} pages differ" for name, session in self.sessions.items())

    def do_reset(self, _: str) -> str:
        return str(self.session.reset())

    def do_digest(self, level: str) -> str:
        if level not in ("", "page", "logical"):
            raise UserError(f".digest {level}: page or logical")
        return self.session.digest("logical" if level == "logical" else "page")

    def do_delta(self, _: str) -> str:
        stats = self.session.stats()
        return f"{stats.delta_pages} pages ({stats.delta_bytes:,} bytes) differ from the file; {stats.held_bytes:,} bytes held with checkpoints"

    def do_export(self, file: str) -> str:
        if not file:
            raise UserError(".export needs a file")
        self.session.export(file)
        return f"written to {file}"

    def do_tables(self, _: str) -> str:
        return self._column("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name")

    def do_schema(self, table: str) -> str:
        name = table.replace("'", "''")
        only = f" AND lower(tbl_name) = lower('{name}')" if table else ""
        text = self._column(f"SELECT sql || ';' FROM sqlite_master WHERE sql IS NOT NULL{only} ORDER BY rowid")
        if table and not text:
            raise UserError(f"no table {table!r}: see .tables")
        return text

    # ------------------------------------------------------------------ running and showing

    def _execute(self, sql: str) -> ExecResult:
        """Run SQL in a thread of its own: this one stays free to notice Ctrl-C, whatever SQLite is doing."""
        call = self._worker.submit(self.session.execute, sql, deadline_s=_DEADLINE_S, max_rows=_KEPT_ROWS, max_bytes=_KEPT_BYTES)
        while True:
            try:
                return call.result()
            except KeyboardInterrupt:
                self.session.interrupt()

    def _state(self, name: str) -> Snapshot:
        """A state by its name: a checkpoint, what a session shows now, or the file."""
        if name == _FILE:
            return self.session.origin()
        if name in self.sessions:
            return self.sessions[name].freeze(name)
        snapshot: Snapshot = _named(self.checkpoints, name, "checkpoint or session")
        return snapshot

    def _column(self, sql: str) -> str:
        return "\n".join(_printable(row[0]) for row in self._execute(sql).rows)

    def _show(self, result: ExecResult, seconds: float) -> None:
        self.failed |= result.status != "ok"
        if self.json_mode:
            rows = [[_json_value(value) for value in row] for row in result.rows]
            record: dict[str, Any] = {
                "status": result.status,
                "columns": result.columns,
                "rows": rows,
                "truncated": result.truncated,
                "rowcount": result.rowcount,
            }
            record |= {"error": result.error, "in_transaction": result.in_transaction, "ms": round(seconds * 1000, 3)}
            print(json.dumps(record), file=self.out, flush=True)
            return
        if result.status != "ok":
            self._fail(f"{result.status}: {result.error}" + (" (the transaction was rolled back)" if result.transaction_lost else ""))
            return
        if result.columns:
            _print_rows(result, self.out)
        changed = f"{result.rowcount} rows changed, " if result.rowcount and not result.columns else ""
        print(f"({changed}{seconds * 1000:.2f} ms{', in a transaction' if result.in_transaction else ''})", file=self.out, flush=True)

    def _say(self, answer: Answer, started: float) -> None:
        milliseconds = (time.perf_counter() - started) * 1000
        text, data = (answer, {}) if isinstance(answer, str) else answer
        if self.json_mode:
            print(json.dumps({"text": text, **data, "ms": round(milliseconds, 3)}), file=self.out, flush=True)
        else:
            print(text if text == _HELP else f"{text}\n({milliseconds:.2f} ms)", file=self.out, flush=True)

    def _fail(self, text: str) -> None:
        self.failed = True
        print(json.dumps({"error": text}) if self.json_mode else text, file=self.out, flush=True)


def _named(things: dict[str, Any], name: str, what: str) -> Any:
    if name not in things:
        raise UserError(f"no {what} {name!r}: there is {', '.join(things)}" if things else f"no {what} {name!r}: none was made")
    return things[name]


def _print_rows(result: ExecResult, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in result.columns:
        table.add_column(_printable(name), overflow="fold")
    for row in result.rows[:_SHOWN_ROWS]:
        table.add_row(*(_printable(value) for value in row))
    Console(file=out, markup=False, highlight=False).print(table)
    hidden = len(result.rows) - _SHOWN_ROWS
    if hidden > 0 or result.truncated:
        print(f"... {max(0, hidden)}{' or more' if result.truncated else ''} rows not shown", file=out)


def _printable(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value[:32].hex()}'" + ("..." if len(value) > 32 else "")
    return str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _json_value(value: object) -> object:
    """JSON has no blobs and no infinities: hexadecimal digits and the words inf, -inf stand for them."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run_shell(database: str, *, store: str | Path | None = None, json_mode: bool = False, lines: TextIO | None = None, out: TextIO | None = None) -> int:
    """Run the shell until its input ends. Status 1 when input that was no terminal held something that failed, else 0.

    lines, out: standard input and output unless given. In JSON mode each statement or command answers with one JSON object on a line.
    """
    lines, out = lines or sys.stdin, out or sys.stdout
    interactive = lines.isatty() and not json_mode
    with open_backend("sqlite", store=store) as backend, contextlib.ExitStack() as stack:
        started = time.perf_counter()
        image = backend.import_base(database, progress=_Importing(database).tell)
        shell = Shell(backend, image, out, json_mode=json_mode, title=Path(database).name)
        stack.callback(shell.close)
        if interactive:
            stack.callback(_history())
            seconds = time.perf_counter() - started
            print(f"{database}: {image.size:,} bytes, ready after {seconds:.1f} s. The file is not written. .help lists commands.", file=out)
        for text in _statements(lines, shell, interactive=interactive):
            try:
                if not shell.run(text):
                    break
            except KeyboardInterrupt:
                print("interrupted", file=out)
    return int(shell.failed and not interactive)


class _Importing:
    """A progress line on standard error: one that is rewritten on a terminal, one for each stage elsewhere, none for what takes no time."""

    def __init__(self, database: str) -> None:
        self.database, self.started, self.stage = database, time.monotonic(), ""

    def tell(self, stage: str, share: float) -> None:
        if time.monotonic() - self.started < 0.5:
            return
        percent = f" {share:.0%}" if share else ""
        if sys.stderr.isatty():
            print(f"\r{self.database}: {stage}{percent}\x1b[K", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)
        elif stage != self.stage:
            print(f"{self.database}: {stage}", file=sys.stderr)
        self.stage = stage


def _history() -> Callable[[], None]:
    """Line editing, and the history of earlier shells, where Python has readline. Returns what saves it."""
    try:
        import readline
    except ImportError:
        return lambda: None
    file = cache_dir() / "shell_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LINES)

    def save() -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    return save


def _statements(lines: TextIO, shell: Shell, *, interactive: bool) -> Iterator[str]:
    """Dot commands and complete statements, read line by line; what is left at the end of input is run as it is."""
    pending = ""
    while True:
        try:
            line = input("   ...> " if pending else f"{shell.current}> ") + "\n" if interactive else lines.readline()
        except EOFError:
            line = ""
            print(file=shell.out)
        except KeyboardInterrupt:
            pending = ""
            print(file=shell.out)
            continue
        if not line:
            break
        if not pending and (not line.strip() or line.startswith(".")):
            if line.strip():
                yield line.strip()
            continue
        pending += line
        if ends_statement(pending):
            yield pending.strip()
            pending = ""
    if pending.strip():
        yield pending.strip()
