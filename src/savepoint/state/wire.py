"""How a trainer and its worker processes talk: messages in bounded frames over one local socket.

    frame    length of the body (u32), call number (u64), kind (u8), then the body; at most FRAME_BYTES of it
    message  the bodies of consecutive frames of one call and kind, up to the first without the MORE bit
    body     MessagePack; strings keep lone surrogates, which stand for bytes that are no UTF-8

Frames of several messages interleave, so a large one delays no small one. Nothing on the wire is executed when it is read: a worker that has
been taken over can send wrong answers and no code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import msgpack

from savepoint.errors import UserError
from savepoint.state.errors import SetupError, StaleLease, StateError
from savepoint.state.session import ExecResult, Quota, ResetProof, SessionStats
from savepoint.state.sqlite.diff import TableDiff

FRAME_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 1 << 30
CALL, ANSWER, FAILURE, ROWS, MORE = 1, 2, 3, 4, 0x80
_HEADER = struct.Struct("<IQB")

_PLAIN: tuple[type, ...] = (ExecResult, Quota, ResetProof, SessionStats, TableDiff)
_FIELDS = {kind: attrgetter(*(field.name for field in dataclasses.fields(kind))) for kind in _PLAIN}
_CODES = {kind: code for code, kind in enumerate(_PLAIN)}
_ERRORS: tuple[type[Exception], ...] = (StateError, StaleLease, SetupError, UserError, ValueError)


class WireError(Exception):
    """The other side sent what no sound one sends, or went away."""


def encode(value: Any) -> bytes:
    """Plain values, and the state layer's own records."""
    packer: msgpack.Packer | None = getattr(_packers, "outer", None)
    if packer is None:
        packer = _packers.outer = _packer(_pack)
    try:
        return bytes(packer.pack(value))
    except BaseException:
        packer.reset()  # else the next message would begin with half of this one
        raise


def decode(body: bytes | bytearray) -> Any:
    """What `encode` made; sequences come back as tuples. WireError for anything else."""
    try:
        return msgpack.unpackb(body, ext_hook=_unpack, unicode_errors="surrogatepass", use_list=False, strict_map_key=False)
    except WireError:
        raise
    except Exception as error:  # msgpack raises half a dozen kinds, and constructors theirs
        raise WireError(f"a message that cannot be read: {error}") from None


def encode_error(error: BaseException) -> bytes:
    """An error that the caller will see again, by kind and words; of a kind that is not known here, as a fault of ours."""
    for code, kind in enumerate(_ERRORS):
        if type(error) is kind:
            return encode((code, str(error)))
    return encode((-1, f"{type(error).__name__}: {error}"))


def decode_error(body: bytes | bytearray) -> Exception:
    code, words = decode(body)
    return _ERRORS[code](words) if 0 <= code < len(_ERRORS) else WireError(words)


_packers = threading.local()  # a packer has a buffer of its own, and making one costs more than most messages


def _packer(default: Callable[[Any], Any] | None) -> msgpack.Packer:
    return msgpack.Packer(default=default, unicode_errors="surrogatepass", buf_size=16 << 10)


def _pack(value: Any) -> Any:
    kind = type(value)
    if kind not in _CODES:
        raise TypeError(f"{kind.__name__} does not travel")
    packer: msgpack.Packer | None = getattr(_packers, "inner", None)
    if packer is None:
        packer = _packers.inner = _packer(None)
    try:
        return msgpack.ExtType(_CODES[kind], packer.pack(_FIELDS[kind](value)))
    except BaseException:
        packer.reset()
        raise


def _unpack(code: int, body: bytes) -> Any:
    if not 0 <= code < len(_PLAIN):
        raise WireError(f"a record of unknown kind {code}")
    return _PLAIN[code](*decode(body))


class Channel:
    """One end of a connected stream socket. Any thread may send; one at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.descriptors: deque[int] = deque()  # received, in order, and not yet asked for
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._parts: dict[tuple[int, int], bytearray] = {}

    def send(self, number: int, kind: int, body: bytes, descriptor: int | None = None) -> None:
        """A message, frame by frame; other threads' frames may come between. WireError when the other side is gone."""
        view = memoryview(body)
        try:
            for start in range(0, max(1, len(view)), FRAME_BYTES):
                part = view[start : start + FRAME_BYTES]
                more = MORE if start + FRAME_BYTES < len(view) else 0
                frame = _HEADER.pack(len(part), number, kind | more) + part
                with self._sending:
                    if descriptor is not None:
                        sent = socket.send_fds(self.socket, [frame], [descriptor])
                        descriptor, frame = None, frame[sent:]
                    self.socket.sendall(frame)
        except OSError as error:
            raise WireError(f"the connection is broken: {error.strerror or error}") from None

    def receive(self) -> tuple[int, int, bytearray]:
        """The next whole message: (call number, kind, body). WireError at the end of the connection."""
        while True:
            for message in self._whole():
                return message
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, FRAME_BYTES, 8)
            except OSError as error:
                raise WireError(f"the connection is broken: {error.strerror or error}") from None
            self.descriptors.extend(descriptors)
            if not data:
                raise WireError("the connection has ended")
            self._buffer += data

    def receive_some(self) -> Iterator[tuple[int, int, bytearray]]:
        """The whole messages in what one read gives; for a connection that is known to be readable."""
        try:
            data = self.socket.recv(FRAME_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(f"the connection is broken: {error.strerror or error}") from None
        if not data:
            raise WireError("the connection has ended")
        self._buffer += data
        yield from self._whole()

    def close(self) -> None:
        # A shutdown first: closing alone does not wake a thread that waits in recv.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _whole(self) -> Iterator[tuple[int, int, bytearray]]:
        while len(self._buffer) >= _HEADER.size:
            length, number, flags = _HEADER.unpack_from(self._buffer)
            if length > FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes; {FRAME_BYTES} is the most")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            kind = flags & ~MORE
            part = self._buffer[_HEADER.size : end]
            del self._buffer[:end]
            earlier = self._parts.get((number, kind))
            if earlier is not None:
                earlier += part
                part = earlier
            if len(part) > MAX_MESSAGE_BYTES:
                raise WireError("a message without end")
            if flags & MORE:
                self._parts[number, kind] = part
                continue
            self._parts.pop((number, kind), None)
            yield number, kind, part


def send_rows(send: Callable[[int, bytes], None], rows: tuple[tuple[Any, ...], ...]) -> None:
    """Rows in messages of about FRAME_BYTES each, so that no single one takes long to pack, to move or to read."""
    at, step = 0, 64
    while at < len(rows):
        body = encode(rows[at : at + step])
        send(ROWS, body)
        at += step
        step = min(4096, max(1, step * FRAME_BYTES // (2 * len(body) + 1)))
