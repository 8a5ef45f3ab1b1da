"""Where the compiled VFS comes from: the installed package, else the user's cache, else a compiler run now.

The library's name carries the hash of its source, so an old build is never taken for a new one.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cowvfs.c")
FLAGS = ("-O2", "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 120


class BuildError(Exception):
    """The VFS could not be compiled here. `str()` is one line that says why."""


def source_hash() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def cache_dir() -> Path:
    """The user's cache folder of Savepoint: `$XDG_CACHE_HOME/savepoint`, else `~/.cache/savepoint`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "savepoint"


def compiler() -> list[str] | None:
    """The command of a C compiler: `$CC`, the one Python was built with, or the first found on PATH."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command) if command else []
        if words and shutil.which(words[0]):
            return words[:1]
    return None


def has_header() -> bool | None:
    """Whether the compiler finds `sqlite3ext.h`; None without a compiler."""
    command = compiler()
    if command is None:
        return None
    try:
        done = subprocess.run([*command, "-E", "-x", "c", "-"], input=b"#include <sqlite3ext.h>\n", capture_output=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def installed_library() -> Path | None:
    """The library that setuptools built next to the source, if it built one."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = SOURCE.with_name("_cowvfs" + suffix)
        if path.exists():
            return path
    return None


def cached_library() -> Path:
    return cache_dir() / "vfs" / f"cowvfs-{source_hash()}.so"


def build_library() -> Path:
    """Compile the VFS into the user's cache and return its path. Raises `BuildError`."""
    target = cached_library()
    command = compiler()
    if command is None:
        raise BuildError("no C compiler (cc, gcc, clang or $CC) on PATH")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            define = f'-DCOW_SOURCE="{source_hash()}"'
            done = subprocess.run([*command, *FLAGS, define, str(SOURCE), "-o", str(made)], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
            if done.returncode:
                raise BuildError(_first_error(done.stderr))
            made.replace(target)  # atomic: of two processes that build at once, either's library will do
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{target}: {error}") from error
    return target


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if "error" in line]
    return lines[0] if lines else "the compiler failed without a message"
