"""`savepoint doctor`: what works on this machine, and why not."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import Any

from savepoint import state


def examine(store: str | Path | None = None) -> list[dict[str, Any]]:
    """One finding a line: `{"what", "works", "needed", "detail"}`. `needed`: nothing trains without it."""
    findings = [
        _finding("python", True, f"{platform.python_version()} on {platform.platform()}"),
        _finding("cores", True, f"{os.cpu_count()}"),
        _memory(),
    ]
    findings += [_finding(what, works, detail, needed=what in ("apsw", "vfs", "store")) for what, works, detail in state.doctor(store)]
    findings += [_package(name) for name in ("torch", "transformers", "tokenizers", "gymnasium", "tensorboard", "openai")]
    findings.append(_gpu())
    return findings + _attention()


def _finding(what: str, works: bool, detail: str, *, needed: bool = True) -> dict[str, Any]:
    return {"what": what, "works": works, "needed": needed, "detail": detail}


def _memory() -> dict[str, Any]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return _finding("memory", True, "unknown", needed=False)
    return _finding("memory", total >= 2 << 30, f"{total / 2**30:.1f} GiB (the quickstart needs 2)", needed=False)


def _package(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return _finding(name, False, f"cannot be imported: {error}")
    return _finding(name, True, str(module.__version__))


def _gpu() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return _finding("gpu", True, torch.cuda.get_device_name(0), needed=False)
    return _finding("gpu", False, "no CUDA device: everything runs on the CPU", needed=False)


def _attention() -> list[dict[str, Any]]:
    """Each device's self-check, what `auto` would take, and why a backend cannot be used."""
    import torch

    from savepoint import attention

    findings = []
    for device, dtype in (("cpu", torch.float32), *([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])):
        for name, reason in attention.backends(device).items():
            findings.append(_finding(f"attention {name}, {device}", reason is None, reason or "usable", needed=False))
        try:
            checked = attention.self_check(device, dtype)
            detail = f"{checked.backend}, {checked.dtype}: largest error {max(checked.errors.values()):.1e} against f64"
            findings.append(_finding(f"attention self-check, {device}", True, detail, needed=device == "cpu"))
        except attention.SelfCheckFailed as error:
            findings.append(_finding(f"attention self-check, {device}", False, str(error), needed=device == "cpu"))
    table = "; ".join(f"{where}: {name}" for name, where in attention.AUTO)
    return [*findings, _finding("attention auto", True, table, needed=False)]
