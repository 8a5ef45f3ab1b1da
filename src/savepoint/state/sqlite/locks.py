"""Reading a database file that somebody else may have open, without asking SQLite (which would touch its neighbours to answer)."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

# SQLite's lock bytes (os.h): PENDING at 1 GiB, RESERVED after it, then the range of SHARED locks, which a writer takes as a whole.
_FIRST, _COUNT = 0x40000000, 512
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
_QUERY = getattr(fcntl, "F_OFD_GETLK", None)  # sees the locks of this process too; Linux has it

_kept: list[int] = []


class SourceFile:
    """A database file open for reading, as a context manager.

    POSIX locks of a process end when it closes any descriptor of the file. So while a connection of this very process has the file
    locked, the descriptor is kept open for good rather than pulling the lock away from under it.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def reader(self) -> BinaryIO:
        """The file from its beginning. Closing the reader leaves the descriptor open."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return os.fdopen(self.descriptor, "rb", closefd=False)

    def write_locked(self) -> bool:
        """Whether a connection, of this process or another, holds a write lock (in rollback mode). False where the system cannot tell."""
        return self._holder(fcntl.F_RDLCK) is not None

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._holder(fcntl.F_WRLCK) == os.getpid() or self._holder(fcntl.F_RDLCK) == os.getpid():
            _kept.append(self.descriptor)
        else:
            os.close(self.descriptor)

    def _holder(self, kind: int) -> int | None:
        """The process whose lock is in the way of one of `kind`; None if nobody's is, or the system cannot tell."""
        if _QUERY is None:
            return None
        try:
            answer = fcntl.fcntl(self.descriptor, _QUERY, struct.pack(_FLOCK, kind, os.SEEK_SET, _FIRST, _COUNT, 0))
        except OSError:  # a file system without locks
            return None
        found, _, _, _, pid = struct.unpack(_FLOCK, answer)
        return None if found == fcntl.F_UNLCK else int(pid)
