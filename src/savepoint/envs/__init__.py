"""Gymnasium environments over live state. Importing this makes them known to `gymnasium.make`, as Gymnasium's convention is."""

from __future__ import annotations

import gymnasium

for _name, _kind in (("SqlDebug", "debugging"), ("SqlGenerate", "generation")):
    gymnasium.register(f"savepoint/{_name}-v0", entry_point="savepoint.envs.sql.env:SqlEnv", kwargs={"kind": _kind}, disable_env_checker=True)
