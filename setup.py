"""Compiles the copy-on-write VFS where a compiler and `sqlite3ext.h` are at hand. Where they are not, installing still succeeds."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "src/savepoint/state/sqlite/cowvfs.c"
# The loader compares it with the source that it is installed beside: an old build is never taken for a new one.
DIGEST = hashlib.sha256((Path(__file__).parent / SOURCE).read_bytes()).hexdigest()[:16]

setup(
    ext_modules=[
        Extension(
            "savepoint.state.sqlite._cowvfs", [SOURCE], optional=True,
            define_macros=[("COW_SOURCE", f'"{DIGEST}"'), ("_GNU_SOURCE", "1")], extra_compile_args=["-O2", "-std=c11", "-pthread", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
        )
    ]
)  # fmt: skip
