"""Savepoint trains language models as agents over stateful, data-centric environments."""

__version__ = "0.1.0"
