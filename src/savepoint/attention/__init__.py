"""Attention with learned sinks: exact values and gradients, causal, windowed and packed, at flash cost. `docs/attention.md` has the proof."""

from savepoint.attention.errors import BackendUnavailable
from savepoint.attention.select import backends
from savepoint.attention.sink import resolve_backend, sink_attention

__all__ = ["BackendUnavailable", "backends", "resolve_backend", "sink_attention"]
