"""Python tests of an instance, run in a sandboxed process on a real file with a `sqlite3.Connection`.

The prediction has run once already. Each test gets a copy of the database as the prediction left it; statements of the prediction or the gold that it wants to
see again are run by the grader, in forks of the task image, with the same SQLite and the same limits as everything else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from savepoint.envs.sql.run import Run, Runner
from savepoint.envs.sql.talk import Hangup, receive, send
from savepoint.envs.sql.tasks import Task
from savepoint.envs.sql.verdict import Verdict
from savepoint.state import AnySession, BaseImage, StateError, split_statements

_START_S = 60.0
_KEPT_FILES, _KEPT_BYTES = 16, 256 << 20
_FILE_GROWTH = 256 << 20


class PythonTests:
    """Runs tests, one process each, forked from one that is started when it is first needed. One answer's tests run at a time."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: OrderedDict[str, Path] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def run(self, image: BaseImage, task: Task, run: Run, session: AnySession, now: str) -> Verdict | None:
        """The verdict of the first test that fails; None when all pass. session: shows the prediction's end state."""
        with self._lock:
            return self._run(image, task, run, session, now)

    def _run(self, image: BaseImage, task: Task, run: Run, session: AnySession, now: str) -> Verdict | None:
        database, temporary = self._file(image, session)
        try:
            for index, text in enumerate(task.test_cases):
                found = self._one(image, task, text, run, database, now)
                if found is not None:
                    return Verdict("timeout" if found == "timeout" else "test_failed", self._late_words() if found == "timeout" else found, index)
            return None
        finally:
            if temporary:
                database.unlink()

    def close(self) -> None:
        """End the process and drop its files."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._channel = self._folder = None
        self._files.clear()

    # ------------------------------------------------------------------ inside

    def _one(self, image: BaseImage, task: Task, text: str, run: Run, database: Path, now: str) -> str | None:
        """None when the test passes, "timeout", or why it failed. StateError when the process that runs tests is gone."""
        job = {
            "text": text, "pred_sqls": run.statements, "sol_sqls": tuple(p for sql in task.sol_sql for p in split_statements(sql)), "database": str(database),
            "rows": run.rows, "conditions": dict(task.conditions), "deadline_s": self.runner.limits.deadline_s,
            "memory_bytes": self.runner.limits.test_memory_bytes, "file_bytes": database.stat().st_size + _FILE_GROWTH,
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        with ours:
            try:
                channel = self._started()
                with theirs:
                    socket.send_fds(channel, [b"\0"], [theirs.fileno()])
                    send(channel, job)
                    receive(channel)
                try:
                    return self._converse(ours, image, task, now)
                finally:
                    send(channel, "end")
                    receive(channel)
            except (Hangup, OSError) as error:
                self.close()
                raise StateError(f"the process of the Python tests is gone: {error}") from None

    def _converse(self, test: socket.socket, image: BaseImage, task: Task, now: str) -> str | None:
        """Answer a test's wishes until it is done, or its time is over. What the grader runs for it does not count as its time."""
        left = self.runner.limits.deadline_s
        while True:
            test.settimeout(max(left, 1e-3))
            started = time.monotonic()
            try:
                kind, value = receive(test)
            except TimeoutError:
                return "timeout"
            except Hangup:
                return "the test ended its process"
            left -= time.monotonic() - started
            if kind == "done":
                return None if value is None else str(value)
            test.settimeout(None)
            send(test, self._rerun(image, task, value, now))

    def _rerun(self, image: BaseImage, task: Task, statements: Sequence[str], now: str) -> tuple[Any, bool, bool, int]:
        with self.runner.lease(image, f"test {task.instance_id}", now) as session:
            run = self.runner.run(session, statements, readonly=task.task == "generation")
        failed = run.failure is not None
        return run.rows, failed, failed and run.failure is not None and run.failure.outcome == "timeout", run.vm_steps

    def _late_words(self) -> str:
        return f"the test did not end within {self.runner.limits.deadline_s:g} s"

    def _file(self, image: BaseImage, session: AnySession) -> tuple[Path, bool]:
        """The session's contents as a file, and whether it is for this once: that of an image is kept for its next test."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="savepoint-tests-")
        digest = session.digest()
        if digest in self._files:
            self._files.move_to_end(digest)
            return self._files[digest], False
        self._count += 1
        path = Path(self._folder.name) / f"{self._count}.sqlite"
        session.export(path)
        if digest != image.digest:
            return path, True
        self._files[digest] = path
        while len(self._files) > _KEPT_FILES or (len(self._files) > 1 and sum(file.stat().st_size for file in self._files.values()) > _KEPT_BYTES):
            self._files.popitem(last=False)[1].unlink()
        return path, False

    def _started(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
            command = [sys.executable, "-m", "savepoint.envs.sql.testing", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self._channel = ours
        return ours
