"""Base images: databases copied once into a store, checked, named by their content, and never written again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from savepoint.errors import UserError

_MAGIC = b"SQLite format 3\0"
_WIDEST = "SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM sqlite_master AS m, pragma_table_xinfo(m.name) GROUP BY m.name)"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BaseImage:
    """Immutable contents of a database. `digest` names the content; `setup` the statements that were run on the imported file, if any.

    size: bytes. path: the file in the store, of the base that it was derived from. page_size: bytes. columns: of its widest table.
    """

    digest: str
    path: Path
    size: int
    page_size: int
    setup: tuple[str, ...] = ()
    columns: int = 0
    contents: Any = field(default=None, repr=False)


def default_store() -> Path:
    """`$SAVEPOINT_STORE`, else a folder of the user's cache."""
    if os.environ.get("SAVEPOINT_STORE"):
        return Path(os.environ["SAVEPOINT_STORE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "savepoint" / "store"


def import_file(source: Path, store: Path) -> tuple[Path, str]:
    """Copy a database into the store: (its file there, its digest). UserError, one line that names the file, when it is none.

    The source and its neighbours are only read: a `-wal` or a hot `-journal` beside it is folded into the copy. The same content is kept
    once, and a file that is as it was at the last import (path, inode, size, times) is not read again.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file")
    if not source.is_file():
        raise UserError(f"{source}: not a file")
    try:
        _check_header(source)
        known = _known(source, store)
        if known is not None:
            return known
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=store) as folder:
            return _import(source, store, Path(folder) / "copy.sqlite")
    except OSError as error:
        place = source if error.filename is not None and Path(str(error.filename)) == source else store
        raise UserError(f"{place}: {error.strerror or error} (while importing {source})") from None


def page_size_of(header: bytes) -> int:
    size = int.from_bytes(header[16:18], "big")
    return 65536 if size == 1 else size


def _check_header(source: Path) -> None:
    with source.open("rb") as file:
        header = file.read(100)
    if not header:
        raise UserError(f"{source}: an empty file, not a database")
    if len(header) < 100 or header[:16] != _MAGIC:
        raise UserError(f"{source}: not a SQLite database (or an encrypted one)")
    size = int.from_bytes(header[28:32], "big") * page_size_of(header)
    # The header's size counts only if it was written by the last change, and then only without a log that holds the rest.
    if header[24:28] == header[92:96] and size > source.stat().st_size and not _neighbours(source):
        raise UserError(f"{source}: truncated: {source.stat().st_size:,} bytes of {size:,}")


def _neighbours(source: Path) -> list[str]:
    """Suffixes of the logs beside a database: parts of its content live there."""
    logs = [(suffix, Path(f"{source}{suffix}")) for suffix in ("-wal", "-journal")]
    return [suffix for suffix, path in logs if path.is_file() and path.stat().st_size]


def _note(source: Path, store: Path) -> Path:
    """The store's note about a file as it is now: named by what changes with every write."""
    stat = source.stat()
    text = repr((str(source.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return store / "seen" / hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _known(source: Path, store: Path) -> tuple[Path, str] | None:
    if _neighbours(source):
        return None
    with contextlib.suppress(FileNotFoundError):
        digest = _note(source, store).read_text(encoding="ascii")
        target = store / f"{digest}.sqlite"
        if target.exists():
            return target, digest
    return None


def _import(source: Path, store: Path, copy: Path) -> tuple[Path, str]:
    note = _note(source, store)
    logs = _neighbours(source)
    shutil.copyfile(source, copy)
    for suffix in logs:
        shutil.copyfile(f"{source}{suffix}", f"{copy}{suffix}")
    if _note(source, store) != note:
        raise UserError(f"{source}: was written to while it was read; import it again when it is at rest")
    _fold_and_check(source, copy)
    digest = _digest(copy)
    target = store / f"{digest}.sqlite"
    if not target.exists():
        with copy.open("rb+") as file:
            os.fsync(file.fileno())
        copy.chmod(0o444)
        copy.replace(target)
    if not logs:
        note.parent.mkdir(exist_ok=True)
        note.write_text(digest, encoding="ascii")
    return target, digest


def _fold_and_check(source: Path, copy: Path) -> None:
    """Fold logs into the copy and check it whole: a damaged page would otherwise come up in the middle of a run."""
    try:
        with contextlib.closing(apsw.Connection(str(copy))) as db:
            db.pragma("journal_mode", "delete")
            problem = db.execute("PRAGMA integrity_check(1)").fetchone()
    except apsw.Error as error:
        raise UserError(f"{source}: corrupt, or not a database: {error}") from None
    if problem != ("ok",):
        raise UserError(f"{source}: corrupt: {str(problem and problem[0]).splitlines()[-1]}")


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def widest_table(path: Path) -> int:
    """Columns of the widest table of a database."""
    with contextlib.closing(apsw.Connection(f"{path.absolute().as_uri()}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)) as db:
        (columns,) = db.execute(_WIDEST).fetchone()
    return int(columns)
