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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BaseImage:
    """Immutable contents of a database. `digest` names the content; `setup` the statements that were run on the imported file, if any.

    size: bytes. path: the file in the store (of the base that it was derived from).
    """

    digest: str
    path: Path
    size: int
    page_size: int
    setup: tuple[str, ...] = ()
    contents: Any = field(default=None, repr=False)


def default_store() -> Path:
    """`$SAVEPOINT_STORE`, else a folder of the user's cache."""
    if os.environ.get("SAVEPOINT_STORE"):
        return Path(os.environ["SAVEPOINT_STORE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "savepoint" / "store"


def import_file(source: Path, store: Path) -> tuple[Path, str]:
    """Copy a database into the store and return (its file there, its digest). UserError, one line that names the file, when it is none.

    The source and its neighbours are only read. A `-wal` beside it is folded into the copy. The same content is kept once.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file")
    if not source.is_file():
        raise UserError(f"{source}: not a file")
    try:
        _check_header(source)
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=store) as folder:
            return _import(source, store, Path(folder))
    except OSError as error:
        place = source if error.filename and Path(str(error.filename)) == source else store
        raise UserError(f"{place}: {error.strerror or error}") from None


def _check_header(source: Path) -> None:
    with source.open("rb") as file:
        header = file.read(100)
    if not header:
        raise UserError(f"{source}: an empty file, not a database")
    if len(header) < 100 or header[:16] != _MAGIC:
        raise UserError(f"{source}: not a SQLite database (or an encrypted one)")
    page_size = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    page_size = 65536 if page_size == 1 else page_size
    if header[24:28] == header[92:96] and pages * page_size > source.stat().st_size and not Path(f"{source}-wal").exists():
        raise UserError(f"{source}: truncated: {source.stat().st_size:,} bytes of {pages * page_size:,}")


def _import(source: Path, store: Path, folder: Path) -> tuple[Path, str]:
    copy = folder / "copy.sqlite"
    shutil.copyfile(source, copy)
    wal = Path(f"{source}-wal")
    if wal.exists():
        shutil.copyfile(wal, f"{copy}-wal")
    _fold_and_check(source, copy)
    digest = _digest(copy)
    target = store / f"{digest}.sqlite"
    if not target.exists():
        with copy.open("rb+") as file:
            os.fsync(file.fileno())
        copy.chmod(0o444)
        copy.replace(target)
    return target, digest


def _fold_and_check(source: Path, copy: Path) -> None:
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
