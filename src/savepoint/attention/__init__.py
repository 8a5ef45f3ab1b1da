"""Attention with learned sinks: exact values and gradients, causal, windowed and packed, at flash cost. `docs/attention.md` has the proof."""

from savepoint.attention.check import SelfCheck, SelfCheckFailed, self_check
from savepoint.attention.errors import BackendUnavailable
from savepoint.attention.select import AUTO, backends
from savepoint.attention.sink import resolve_backend, sink_attention

__all__ = ["AUTO", "BackendUnavailable", "SelfCheck", "SelfCheckFailed", "backends", "resolve_backend", "self_check", "sink_attention"]
