"""`savepoint shell`: SQL on a leased session of any database, with the states of it at hand. The file itself is never written."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import apsw

from savepoint.errors import UserError
from savepoint.state import BaseImage, ExecResult, Session, Snapshot, SqliteBackend, StateError, open_backend

_SHOWN_ROWS = 100
_DEADLINE_S = 300.0
_HELP = """\
.checkpoint [NAME]   keep the state of this moment (default name: 1, 2, ...)
.restore NAME        go back to a checkpoint; TEMP objects and open transactions are gone
.fork NAME           another session with the same contents, called NAME
.use NAME            work in that session            .sessions       list them
.reset               drop everything and print the proof
.digest [logical]    digest of the contents          .delta          what differs from the file
.export FILE         write the contents as a database file
.tables              .schema [TABLE]                 .help           .quit
SQL may span lines and ends with a semicolon."""


class Shell:
    """One shell: named sessions over one image, each with its checkpoints."""

    def __init__(self, backend: SqliteBackend, image: BaseImage, out: TextIO, *, json_mode: bool) -> None:
        self.backend, self.image, self.out, self.json_mode = backend, image, out, json_mode
        self.sessions: dict[str, Session] = {"main": backend.lease(image, owner="shell", ttl_s=None)}
        self.checkpoints: dict[str, Snapshot] = {}
        self.current = "main"
        self.failed = False

    @property
    def session(self) -> Session:
        return self.sessions[self.current]

    def run(self, text: str) -> bool:
        """Run a dot command or SQL; False when the shell should end."""
        started = time.perf_counter()
        if not text.startswith("."):
            self._show(self.session.execute(text, deadline_s=_DEADLINE_S, max_rows=10_000, max_bytes=16 << 20), started)
            return True
        name, _, argument = text[1:].strip().partition(" ")
        if name in ("quit", "exit"):
            return False
        command: Callable[[str], Any] | None = getattr(self, f"do_{name}", None)
        if command is None:
            self._fail(f"no command .{name}: see .help")
            return True
        try:
            self._say(command(argument.strip()), started)
        except (StateError, UserError, OSError) as error:
            self._fail(str(error))
        return True

    def do_help(self, _: str) -> str:
        return _HELP

    def do_checkpoint(self, name: str) -> str:
        name = name or str(next(i for i in range(1, len(self.checkpoints) + 2) if str(i) not in self.checkpoints))
        snapshot = self.checkpoints[name] = self.session.checkpoint(name)
        return f"checkpoint {name}: {snapshot.pages} pages differ from the file"

    def do_restore(self, name: str) -> str:
        if name not in self.checkpoints:
            raise UserError(f"no checkpoint {name!r}: {', '.join(self.checkpoints) or 'none was made'}")
        self.session.restore(self.checkpoints[name])
        return f"back at checkpoint {name}"

    def do_fork(self, name: str) -> str:
        if not name or name in self.sessions:
            raise UserError(f"session {name!r} exists already" if name else ".fork needs a name")
        (self.sessions[name],) = self.session.fork()
        return f"session {name} has the contents of {self.current}; .use {name} to work in it"

    def do_use(self, name: str) -> str:
        if name not in self.sessions:
            raise UserError(f"no session {name!r}: {', '.join(self.sessions)}")
        self.current = name
        return f"in session {name}"

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
        return self._column("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name")

    def do_schema(self, table: str) -> str:
        name = table.replace("'", "''")
        only = f" AND tbl_name = '{name}'" if table else ""
        return self._column(f"SELECT sql || ';' FROM sqlite_master WHERE sql IS NOT NULL{only} ORDER BY rowid")

    def _column(self, sql: str) -> str:
        return "\n".join(str(row[0]) for row in self.session.execute(sql, max_rows=100_000).rows)

    def _show(self, result: ExecResult, started: float) -> None:
        took = (time.perf_counter() - started) * 1000
        self.failed |= result.status != "ok"
        if self.json_mode:
            record = {"status": result.status, "columns": result.columns, "rows": result.rows, "truncated": result.truncated, "error": result.error}
            print(json.dumps(record, default=lambda value: value.hex()), file=self.out)
            return
        if result.status != "ok":
            self._fail(f"{result.status}: {result.error}" + (" (the transaction was rolled back)" if result.transaction_lost else ""))
            return
        if result.columns:
            _print_rows(result, self.out)
        changed = f"{result.rowcount} rows changed, " if result.rowcount and not result.columns else ""
        print(f"({changed}{took:.2f} ms{', in a transaction' if result.in_transaction else ''})", file=self.out)

    def _say(self, text: str, started: float) -> None:
        if self.json_mode:
            print(json.dumps({"text": text}), file=self.out)
        else:
            print(f"{text}\n({(time.perf_counter() - started) * 1000:.2f} ms)" if text != _HELP else text, file=self.out)

    def _fail(self, text: str) -> None:
        self.failed = True
        if self.json_mode:
            print(json.dumps({"error": text}), file=self.out)
        else:
            print(text, file=self.out)


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


def run_shell(database: str, *, store: str | Path | None = None, json_mode: bool = False, lines: TextIO | None = None, out: TextIO | None = None) -> int:
    """Run the shell until its input ends. Status 1 when input that was no terminal held something that failed, else 0.

    lines, out: standard input and output unless given. In JSON mode each statement or command answers with one JSON object on a line.
    """
    lines, out = lines or sys.stdin, out or sys.stdout
    interactive = lines.isatty() and not json_mode
    with open_backend("sqlite", store=store) as backend:
        started = time.perf_counter()
        if interactive:
            print(f"importing {database} ...", file=sys.stderr)
        image = backend.import_base(database)
        shell = Shell(backend, image, out, json_mode=json_mode)
        if interactive:
            _history()
            seconds = time.perf_counter() - started
            print(f"{database}: {image.size:,} bytes, ready after {seconds:.1f} s. The file is not written. .help lists commands.", file=out)
        for text in _statements(lines, shell, interactive=interactive):
            try:
                if not shell.run(text):
                    break
            except KeyboardInterrupt:
                print("interrupted", file=out)
    return int(shell.failed and not interactive)


def _history() -> None:
    """Line editing and history, where Python has readline."""
    with contextlib.suppress(ImportError, OSError):
        import readline

        readline.set_history_length(1000)


def _statements(lines: TextIO, shell: Shell, *, interactive: bool) -> Iterator[str]:
    """Dot commands and complete statements, read line by line; what is left at the end of input is run as it is."""
    pending = ""
    while True:
        try:
            line = input("   ...> " if pending else f"{shell.current}> ") if interactive else lines.readline()
        except EOFError:
            line = ""
        except KeyboardInterrupt:
            pending = ""
            print(file=shell.out)
            continue
        else:
            line = line if not interactive else line + "\n"
        if not line:
            break
        if not pending and (not line.strip() or line.startswith(".")):
            if line.strip():
                yield line.strip()
            continue
        pending += line
        if apsw.complete(pending):
            yield pending.strip()
            pending = ""
    if pending.strip():
        yield pending.strip()
