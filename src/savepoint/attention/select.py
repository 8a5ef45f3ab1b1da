"""Which backend can do a call, and which one `auto` takes: pure functions of device, dtype, shapes and whether a gradient is needed."""

from __future__ import annotations

from types import ModuleType

import torch

from savepoint.attention.backends import block, cpu_flash, eager
from savepoint.attention.call import Call, Device
from savepoint.attention.errors import BackendUnavailable

BACKENDS: dict[str, ModuleType] = {"eager": eager, "block": block, "cpu_flash": cpu_flash}

AUTO = (
    ("cpu_flash", "CPU, any dtype"),
    ("block", "any other device"),
)
"""What `auto` takes: the first of these that can do the call. `savepoint doctor` prints it."""


def choose(name: str, call: Call) -> ModuleType:
    """The backend's module. A name other than `auto` gives that backend or an error, never another one."""
    if name == "auto":
        return BACKENDS[automatic(call)]
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(['auto', *BACKENDS])}, not {name!r}")
    reason = BACKENDS[name].refusal(call)
    if reason is not None:
        raise BackendUnavailable(name, reason)
    return BACKENDS[name]


def automatic(call: Call) -> str:
    """The first line of `AUTO` that can do the call; `block` does every call on every device, so that only a device that torch cannot use is an error."""
    for name, _ in AUTO:
        if BACKENDS[name].refusal(call) is None:
            return name
    raise BackendUnavailable("auto", str(call.device.absent))


def backends(device: str | torch.device = "cpu") -> dict[str, str | None]:
    """Each backend: None where it can be used on `device` (for some calls at least), else one line that says why not."""
    here = Device.of(device)
    return {name: module.missing(here) for name, module in BACKENDS.items()}
