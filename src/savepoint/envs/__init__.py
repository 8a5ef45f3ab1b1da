"""Gymnasium environments over live state. `register_envs` is the plug-in that `gymnasium.make("savepoint/…")` finds by itself."""

from __future__ import annotations


def register_envs() -> None:
    """Make the environments known to `gymnasium.make`. Installed as an entry point of the group `gymnasium.envs`."""
    import gymnasium

    for name, kind in (("SqlDebug", "debugging"), ("SqlGenerate", "generation")):
        gymnasium.register(f"savepoint/{name}-v0", entry_point="savepoint.envs.sql.env:SqlEnv", kwargs={"kind": kind}, disable_env_checker=True)
