"""What a worker process gives up before it runs an agent's SQL: privileges, files, sockets, programs, memory.

Each measure is taken where the system has it, and the report says which were: a run can demand a level and refuse less. Nothing here is needed
for isolation between sessions, which the page store and the authorizer give; it bounds what a fault in SQLite itself could reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = ("none", "limits", "partial", "full")

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# Landlock's three calls have one number on every architecture that has Landlock.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ = 4 | 8  # READ_FILE, READ_DIR
# Rights of the file system by ABI: 13 at first, then REFER, TRUNCATE, IOCTL_DEV.
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}

# Audit architecture and system call numbers (asm/unistd.h). What a worker never does after it is set up.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {
    "x86_64": {
        "socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288, "socketpair": 53, "execve": 59, "execveat": 322, "fork": 57,
        "vfork": 58, "kill": 62, "tkill": 200, "ptrace": 101, "mount": 165, "umount2": 166, "chroot": 161, "pivot_root": 155, "unshare": 272, "setns": 308,
        "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "process_vm_readv": 310, "process_vm_writev": 311, "keyctl": 250, "add_key": 248,
        "init_module": 175, "finit_module": 313, "kexec_load": 246, "reboot": 169, "swapon": 167, "open_by_handle_at": 304, "userfaultfd": 323,
        "pidfd_open": 434, "pidfd_getfd": 438, "unlink": 87, "unlinkat": 263, "rename": 82, "renameat": 264, "renameat2": 316, "link": 86, "linkat": 265,
        "symlink": 88, "symlinkat": 266, "mknod": 133, "mknodat": 259, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "fchownat": 260,
        "mkdir": 83, "mkdirat": 258, "rmdir": 84, "setuid": 105, "setgid": 106, "setresuid": 117, "setresgid": 119, "personality": 135,
    },
    "aarch64": {
        "socket": 198, "connect": 203, "bind": 200, "listen": 201, "accept": 202, "accept4": 242, "socketpair": 199, "execve": 221, "execveat": 281,
        "kill": 129, "tkill": 130, "ptrace": 117, "mount": 40, "umount2": 39, "chroot": 51, "pivot_root": 41, "unshare": 97, "setns": 268, "bpf": 280,
        "perf_event_open": 241, "io_uring_setup": 425, "process_vm_readv": 270, "process_vm_writev": 271, "keyctl": 219, "add_key": 217, "init_module": 105,
        "finit_module": 273, "kexec_load": 104, "reboot": 142, "swapon": 224, "open_by_handle_at": 265, "userfaultfd": 282, "pidfd_open": 434,
        "pidfd_getfd": 438, "unlinkat": 35, "renameat": 38, "renameat2": 276, "linkat": 37, "symlinkat": 36, "mknodat": 33, "fchmod": 52, "fchmodat": 53,
        "fchown": 55, "fchownat": 54, "mkdirat": 34, "setuid": 146, "setgid": 144, "setresuid": 147, "setresgid": 149, "personality": 92,
    },
}  # fmt: skip
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What a process gave up. level: "full" every measure; "partial" some; "limits" resource limits alone; "none".

    measures: of each ("no_new_privs", "landlock", "seccomp", "unprivileged", "memory", "files"), whether it holds. missing: why not, by name.
    """

    level: str
    measures: dict[str, bool]
    missing: dict[str, str]

    def __str__(self) -> str:
        held = ", ".join(name for name, holds in self.measures.items() if holds) or "nothing"
        lacking = "; ".join(f"no {name}: {why}" for name, why in self.missing.items())
        return f"{self.level} ({held}{'; ' + lacking if lacking else ''})"


def reaches(level: str, required: str) -> bool:
    """Whether `level` is at least `required`. ValueError for a name that is none of LEVELS."""
    for name in (level, required):
        if name not in LEVELS:
            raise ValueError(f"sandbox level {name!r}: one of {', '.join(LEVELS)}")
    return LEVELS.index(level) >= LEVELS.index(required)


def enter(*, memory_bytes: int | None, file_bytes: int, descriptors: int = 512, readable: Sequence[str] = ()) -> SandboxReport:
    """Give up, for good and for all threads that start later, what this process does not need. Call it before threads start.

    memory_bytes: of private writable memory (RLIMIT_DATA; mapped bases do not count), None for no bound. file_bytes: of one file.
    readable: folders that stay readable where Landlock is in force. Never raises for a measure that cannot be had: it reports.
    """
    steps: list[tuple[str, str | None]] = [
        ("memory", _limit(resource.RLIMIT_DATA, memory_bytes) if memory_bytes is not None else "not asked for"),
        ("files", _first(_limit(resource.RLIMIT_FSIZE, file_bytes), _limit(resource.RLIMIT_NOFILE, descriptors), _limit(resource.RLIMIT_CORE, 0))),
    ]
    linux = sys.platform.startswith("linux")
    steps.append(("unprivileged", _drop_user()))
    steps.append(("no_new_privs", _no_new_privileges() if linux else "needs Linux"))
    steps.append(("landlock", _landlock(readable) if linux else "needs Linux"))
    steps.append(("seccomp", _seccomp() if linux else "needs Linux"))
    measures = {name: why is None for name, why in steps}
    missing = {name: why for name, why in steps if why is not None}
    kernel = [measures[name] for name in ("no_new_privs", "landlock", "seccomp", "unprivileged")]
    level = "full" if all(measures.values()) else "partial" if any(kernel) else "limits" if measures["files"] else "none"
    return SandboxReport(level, measures, missing)


# ---------------------------------------------------------------------- measures: each gives None, or why it does not hold


def _first(*reasons: str | None) -> str | None:
    return next((reason for reason in reasons if reason), None)


def _limit(which: int, value: int) -> str | None:
    try:
        _, hard = resource.getrlimit(which)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _drop_user() -> str | None:
    if os.getuid() != 0:
        return None
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _no_new_privileges() -> str | None:
    libc = _libc()
    return None if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 else os.strerror(ctypes.get_errno())


def _landlock(readable: Sequence[str]) -> str | None:
    libc = _libc()

    def call(number: int, *arguments: object) -> int:
        value = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))
        return value if value >= 0 else -ctypes.get_errno()

    abi = call(_LANDLOCK_CREATE, 0, 0, 1)
    if abi < 1:
        return "the kernel has no Landlock" if abi in (-errno.ENOSYS, 0) else os.strerror(-abi)
    rights = (1 << _LANDLOCK_RIGHTS.get(min(abi, 5), 16)) - 1
    network, scope = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", rights, network, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = call(_LANDLOCK_CREATE, ctypes.c_char_p(attributes), len(attributes), 0)
    if rules < 0:
        return os.strerror(-rules)
    try:
        for folder in readable:
            with contextlib.suppress(OSError):  # a folder that is not there, or not for this user, needs no rule
                place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
                try:
                    refused = call(_LANDLOCK_ADD, rules, 1, ctypes.c_char_p(struct.pack("=Qi", _LANDLOCK_READ, place)), 0)
                finally:
                    os.close(place)
                if refused < 0:
                    return os.strerror(-refused)
        closed = call(_LANDLOCK_RESTRICT, rules, 0)
        return None if closed == 0 else os.strerror(-closed)
    finally:
        os.close(rules)


def _seccomp() -> str | None:
    """A filter that answers EPERM to what is denied, and kills a process that calls in another architecture's numbers."""
    machine = platform.machine()
    if machine not in _DENIED:
        return f"no table of system calls for {machine}"
    numbers = sorted(_DENIED[machine].values())
    load, jump_if, answer = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 4), (jump_if, 1, 0, _ARCHITECTURES[machine]), (answer, 0, 0, 0x80000000), (load, 0, 0, 0)]
    program += [(jump_if, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = _libc()
    return None if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0 else os.strerror(ctypes.get_errno())
