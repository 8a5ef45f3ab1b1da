"""Messages between a grader and the process of its Python tests: a length, then the body as the state layer encodes it."""

from __future__ import annotations

import socket
import struct
from typing import Any

from savepoint.state import wire

_LENGTH = struct.Struct("<I")


class Hangup(Exception):
    """The other side is gone."""


def send(channel: socket.socket, value: Any) -> None:
    body = wire.encode(value)
    try:
        channel.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise Hangup(str(error)) from None


def receive(channel: socket.socket) -> Any:
    """The next message. Hangup when there will be none; TimeoutError when the channel has a time-out and it passes."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return wire.decode(_exactly(channel, length))


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(count - len(parts))
        except TimeoutError:
            raise
        except OSError as error:
            raise Hangup(str(error)) from None
        if not part:
            raise Hangup("the connection was closed")
        parts += part
    return bytes(parts)
