"""The process that runs Python tests: `python -m savepoint.envs.sql.testing DESCRIPTOR`, started by `python_tests.PythonTests`.

It imports what tests need once and forks for each of them. The fork gives up privileges, network, programs and every file but its own folder before it
compiles the test, answers on a socket of its own, and is killed by its parent when its time is over. Nothing that a test does reaches another one.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import os
import resource
import shutil
import signal
import socket
import sqlite3
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from savepoint.envs.sql.helpers import Answer, Helpers
from savepoint.envs.sql.talk import receive, send
from savepoint.state import sandbox

ALLOWED_IMPORTS = frozenset(
    "abc base64 bisect calendar cmath collections contextlib copy dataclasses datetime decimal difflib enum fractions functools hashlib heapq itertools json "
    "math numbers operator random re sqlite3 statistics string struct textwrap time traceback typing unicodedata uuid zoneinfo __future__".split()
)
"""What a test may import: what computes, nothing that reaches files, processes or the network."""
_MAX_WORDS = 2000


def main(descriptor: int) -> None:
    """Serve until the grader goes away: start a test, end it, one at a time."""
    for name in sorted(ALLOWED_IMPORTS):
        importlib.import_module(name)
    grader = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(grader, 1, 1)
        if not message:
            return
        job = receive(grader)
        (channel,) = descriptors
        folder = tempfile.mkdtemp(prefix="savepoint-test-")
        try:
            pid = os.fork()
            if pid == 0:
                grader.close()
                _test(socket.socket(fileno=channel), folder, job)
            os.close(channel)
            send(grader, pid)
            receive(grader)  # its end, by itself or by its deadline: what is left of it is killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        send(grader, "gone")


def _test(grader: socket.socket, folder: str, job: dict[str, Any]) -> NoReturn:
    """Run one test in this forked process, which ends here."""
    try:
        words = _sandboxed(grader, folder, job)
        send(grader, ("done", words))
    except BaseException as error:  # noqa: BLE001 - whatever ends a test is its answer
        with contextlib.suppress(BaseException):
            send(grader, ("done", f"{type(error).__name__}: {error}"[:_MAX_WORDS]))
    finally:
        os._exit(0)


def _sandboxed(grader: socket.socket, folder: str, job: dict[str, Any]) -> str | None:
    path = str(Path(folder) / "database.sqlite")
    shutil.copyfile(job["database"], path)
    if os.getuid() == 0:  # the sandbox gives root up; the folder goes along
        for place in (folder, path):
            os.chown(place, 65534, 65534)
    os.chdir(folder)
    _silence()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    cpu = int(job["deadline_s"]) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    readable = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]]
    sandbox.enter(memory_bytes=job["memory_bytes"], file_bytes=job["file_bytes"], readable=readable, writable=[folder])
    return run_test(job, path, folder, lambda statements: _asked(grader, statements))


def _silence() -> None:
    """Nothing that a test prints goes anywhere, and there is nothing for it to read."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdin, sys.stdout, sys.stderr = (open(i, mode, closefd=False) for i, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115, PTH123


def _asked(grader: socket.socket, statements: Sequence[str]) -> tuple[Answer, int]:
    send(grader, ("run", list(statements)))
    rows, failed, late, steps = receive(grader)
    return (None if rows is None else [tuple(row) for row in rows], failed, late), steps


def run_test(job: dict[str, Any], path: str, folder: str, rerun: Callable[[Sequence[str]], tuple[Answer, int]]) -> str | None:
    """Run `test_case` of a text; None when it passes, else the exception in words, SystemExit too."""
    namespace = Helpers([job["pred_sqls"], job["sol_sqls"]], rerun).namespace()
    namespace["__builtins__"] = _builtins(folder)
    namespace["__name__"] = "test_case"
    namespace["pred_query_result"] = None if job["rows"] is None else [tuple(row) for row in job["rows"]]
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        connection.execute("PRAGMA journal_mode = memory")
        connection.execute("PRAGMA temp_store = memory")
        exec(compile(job["text"], "<test>", "exec"), namespace)  # noqa: S102 - in a sandboxed process
        function = namespace.get("test_case")
        if not callable(function):
            return "the text defines no test_case"
        arguments: list[Any] = [list(job["pred_sqls"]), list(job["sol_sqls"]), path, connection]
        function(*arguments, **_conditions(function, job["conditions"]))
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures of a test as well
        return _words(error)
    finally:
        connection.close()
    return None


def _conditions(function: Callable[..., Any], conditions: Any) -> dict[str, Any]:
    """`conditions=`, for a signature that has it."""
    parameters = inspect.signature(function).parameters.values()
    wanted = any(p.name == "conditions" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {"conditions": conditions} if wanted else {}


def _builtins(folder: str) -> dict[str, Any]:
    """Python's own functions, but for imports off the list and files outside of the test's folder."""

    def restricted_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
        if level or name.partition(".")[0] not in ALLOWED_IMPORTS:
            raise ImportError(f"a test may not import {name}")
        return __import__(name, globals, locals, fromlist, level)

    def restricted_open(file: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(file, str) or not Path(file).resolve().is_relative_to(Path(folder).resolve()):
            raise PermissionError(f"a test may not open {file!r}")
        return open(file, *arguments, **options)  # noqa: PTH123, SIM115

    return {**vars(builtins), "__import__": restricted_import, "open": restricted_open}


def _words(error: BaseException) -> str:
    """The exception, and the line of the test that it comes from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<test>"]
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    short = words[:_MAX_WORDS] if len(words) > _MAX_WORDS else words
    return f"line {lines[-1]}: {short}" if lines else short


if __name__ == "__main__":
    main(int(sys.argv[1]))
