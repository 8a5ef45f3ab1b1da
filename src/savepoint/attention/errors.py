"""The one error of this package that is not a plain `ValueError` or `TypeError`."""


class BackendUnavailable(RuntimeError):
    """The named backend cannot do what was asked here. `str()` is one line that names the backend and the reason; nothing was computed."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"attention backend {backend!r}: {reason}")
        self.backend, self.reason = backend, reason
