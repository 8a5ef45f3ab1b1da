"""The store of imported bases: each content once, named by its digest, read-only, complete or not there at all.

    STORE/bases/<digest>.sqlite      the databases
    STORE/sources/<hash of path>     which digest a source had when it was last read, and its time stamps then
    STORE/work/<pid>-xxxx/           copies being made; those of dead processes are swept

A source is never opened by SQLite, which would make or change files beside it: it is copied byte by byte, and its `-wal` or
`-journal` with it, and SQLite then recovers the copy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from savepoint.errors import UserError
from savepoint.state.sqlite.build import cache_dir
from savepoint.state.sqlite.digest import DIGEST_BYTES
from savepoint.state.sqlite.locks import SourceFile

Progress = Callable[[str, float], None]  # what is being done, and the share of it that is done (0 to 1)
Signature = list[list[int] | None]

_MAGIC = b"SQLite format 3\0"
_BLOCK = 4 << 20
_TRIES = 3  # to copy a source that somebody writes to
_SIDECARS = ("", "-wal", "-journal")
# A change within the clock's granularity after a reading would leave no trace in the time stamps; so long a margin is safe everywhere.
_SETTLED_NS = 2_000_000_000
# What integrity_check says about the rows of a sound file that break their own table's declarations.
_CONTENT_FINDINGS = ("NULL value in ", "CHECK constraint failed in ", "NUMERIC value in ", "TEXT value in ", "non-")


def default_store() -> Path:
    """`$SAVEPOINT_STORE`, else a folder of the user's cache."""
    return Path(os.environ["SAVEPOINT_STORE"]) if os.environ.get("SAVEPOINT_STORE") else cache_dir() / "store"


class Store:
    """Imports databases into `folder`. Several processes may share one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, source: Path, progress: Progress | None = None) -> tuple[Path, str]:
        """Import a database and return (its file in the store, its digest); at once if it has not changed since it was imported.

        UserError, one line that names the file, when the source is missing, empty, truncated, encrypted, no database, corrupt or being
        written to, and when the store cannot be written or is full.
        """
        try:
            signature = _signature(source)
            known = self._remembered(source, signature)
            if known is not None:
                return self._file(known), known
            if not source.is_file():
                raise UserError(f"{source}: not a file")
            with SourceFile(source) as file:
                _check_header(source, file)
                return self._add(source, file, progress or (lambda stage, share: None))
        except OSError as error:
            raise UserError(f"{source}: {_reason(error)}") from None

    # ------------------------------------------------------------------ importing

    def _add(self, source: Path, file: SourceFile, progress: Progress) -> tuple[Path, str]:
        try:
            with self._workplace() as folder:
                started = time.time_ns()
                digest, signature = self._import(source, file, folder / "copy.sqlite", progress)
            self._remember(source, signature, digest, started)
        except OSError as error:
            raise UserError(f"{source}: cannot be imported into {self.folder}: {_reason(error)}") from None
        return self._file(digest), digest

    def _import(self, source: Path, file: SourceFile, copy: Path, progress: Progress) -> tuple[str, Signature]:
        digest, signature = self._copy(source, file, copy, progress)
        with copy.open("rb") as copied:
            header = copied.read(20)
        if signature[1] or signature[2] or 2 in header[18:20]:  # a -wal, a -journal, or WAL mode: the copy has to be settled
            progress("folding the write-ahead log in", 0.0)
            _settle(source, copy)
            digest = _digest(copy)
        target = self._file(digest)
        if not (target.exists() and target.stat().st_size == copy.stat().st_size):
            progress("checking", 0.0)
            _check_content(source, copy)
            with copy.open("rb") as copied:
                os.fsync(copied.fileno())
            copy.chmod(0o444)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy.replace(target)
            _sync_folder(target.parent)
        return digest, signature

    def _copy(self, source: Path, file: SourceFile, copy: Path, progress: Progress) -> tuple[str, Signature]:
        """A copy that nobody wrote to while it was made, the digest of its main file, and the state of the source."""
        for _ in range(_TRIES):
            if file.write_locked():
                raise UserError(f"{source}: locked: another connection is writing to it; close it and try again")
            before = _signature(source)
            total, done = sum(part[2] for part in before if part), 0
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for suffix, part in zip(_SIDECARS, before, strict=True):
                Path(f"{copy}{suffix}").unlink(missing_ok=True)
                if part is None:
                    continue
                with Path(f"{source}{suffix}").open("rb") if suffix else file.reader() as reader, Path(f"{copy}{suffix}").open("wb") as writer:
                    while block := reader.read(_BLOCK):
                        writer.write(block)
                        if not suffix:
                            digest.update(block)
                        done += len(block)
                        progress("copying", done / max(done, total))
            if _signature(source) == before:
                return digest.hexdigest(), before
        raise UserError(f"{source}: changes while it is copied; close what is writing to it and try again")

    @contextlib.contextmanager
    def _workplace(self) -> Iterator[Path]:
        """A folder of our own in the store, on the disk of the bases so that a finished copy is only renamed."""
        work = self.folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        for left in work.iterdir():
            if not _alive(left.name.partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{os.getpid()}-", dir=work) as folder:
            yield Path(folder)

    def _file(self, digest: str) -> Path:
        return self.folder / "bases" / f"{digest}.sqlite"

    # ------------------------------------------------------------------ remembering

    def _note(self, source: Path) -> Path:
        return self.folder / "sources" / hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:32]

    def _remembered(self, source: Path, signature: Signature) -> str | None:
        """The digest of a source that is as it was when it was read, if its base is still there."""
        try:
            note = json.loads(self._note(source).read_text())
            digest, size = str(note["digest"]), int(note["size"])
            settled = all(part is None or max(part[3:]) < note["read_at"] - _SETTLED_NS for part in signature)
            known = note["signature"] == signature and settled and self._file(digest).stat().st_size == size
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return digest if known else None

    def _remember(self, source: Path, signature: Signature, digest: str, read_at: int) -> None:
        note = self._note(source)
        note.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"digest": digest, "size": self._file(digest).stat().st_size, "signature": signature, "read_at": read_at})
        with tempfile.NamedTemporaryFile("w", dir=note.parent, prefix=".", delete=False) as file:
            file.write(text)
        Path(file.name).replace(note)


# ---------------------------------------------------------------------- the source


def _signature(source: Path) -> Signature:
    """(device, inode, size, mtime, ctime) of the file, its -wal and its -journal; None for one that is absent or (a neighbour) empty."""
    parts: Signature = []
    for suffix in _SIDECARS:
        try:
            status = Path(f"{source}{suffix}").stat()
        except FileNotFoundError:
            if not suffix:
                raise
            parts.append(None)
            continue
        whole = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        parts.append(whole if status.st_size or not suffix else None)
    return parts


def _check_header(source: Path, file: SourceFile) -> None:
    with file.reader() as reader:
        header = reader.read(100)
    if not header:
        raise UserError(f"{source}: an empty file, not a database")
    page_size = _page_size(header)
    if len(header) < 100 or header[:16] != _MAGIC or page_size is None:
        raise UserError(f"{source}: not a SQLite database (or an encrypted one)")
    wal = Path(f"{source}-wal")
    if not (wal.exists() and wal.stat().st_size):  # else the missing pages may be in there
        _check_size(source, header, page_size, os.fstat(file.descriptor).st_size)


def _page_size(header: bytes) -> int | None:
    size = int.from_bytes(header[16:18], "big")
    size = 65536 if size == 1 else size
    return size if size >= 512 and size & (size - 1) == 0 else None


def _check_size(source: Path, header: bytes, page_size: int, size: int) -> None:
    """The header counts the pages, if whoever wrote last kept the count (both change counters are equal then)."""
    expected = int.from_bytes(header[28:32], "big") * page_size
    if (header[24:28] == header[92:96] and size < expected) or size < page_size:
        raise UserError(f"{source}: truncated: it has {size:,} bytes and should have {max(expected, page_size):,}")


# ---------------------------------------------------------------------- the copy


def _settle(source: Path, copy: Path) -> None:
    """Recover what a crash left, fold a WAL in, and leave WAL mode: one file that is the whole database."""
    try:
        with contextlib.closing(apsw.Connection(str(copy))) as db:
            db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            db.execute("PRAGMA journal_mode=delete").fetchall()
    except apsw.Error as error:
        raise _refusal(source, copy, error) from None
    with copy.open("rb") as file:
        header = file.read(100)
    _check_size(source, header, _page_size(header) or 512, copy.stat().st_size)


def _check_content(source: Path, copy: Path) -> None:
    try:
        with contextlib.closing(apsw.Connection(str(copy), flags=apsw.SQLITE_OPEN_READONLY)) as db:
            db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            try:
                findings = [str(row[0]) for row in db.execute("PRAGMA integrity_check(1000)")]
            except apsw.SQLError:  # a collation, function or module that only the owner's program has: the rest can be used
                findings = []
    except apsw.Error as error:
        raise _refusal(source, copy, error) from None
    broken = [finding for finding in findings if finding != "ok" and not finding.startswith(_CONTENT_FINDINGS)]
    if broken:
        raise UserError(f"{source}: corrupt: {' '.join(broken[0].split())}")


def _refusal(source: Path, copy: Path, error: apsw.Error) -> UserError:
    if isinstance(error, apsw.FullError | apsw.IOError):
        free = shutil.disk_usage(copy.parent).free
        return UserError(f"{source}: cannot be imported into {copy.parent.parent.parent}: {error} ({free >> 20} MiB free)")
    return UserError(f"{source}: corrupt, or not a database: {error}")


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------- the system


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Make a rename last. Some systems cannot open a folder; there, the file system's own order has to do."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "no such file"
    if error.errno == errno.ENOSPC:
        return "no space left on the disk"
    return error.strerror or str(error)
