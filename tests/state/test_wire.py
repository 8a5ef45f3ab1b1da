"""The wire between trainer and worker: everything arrives as it left, and nothing that is no message is taken for one."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savepoint.state import ExecResult, Quota, ResetProof, SetupError, StaleLease, StateError, wire
from savepoint.state.wire import ANSWER, CALL, FRAME_BYTES, ROWS, Channel, WireError

texts = st.text(alphabet=st.characters(codec="utf-8", categories=None) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF))
values = st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | texts | st.binary()
results = st.builds(
    ExecResult, st.sampled_from(["ok", "sql_error", "timeout"]), st.tuples(texts), st.lists(st.tuples(values, values)).map(tuple), st.booleans(),
    error=st.none() | texts, vm_steps=st.integers(0, 1 << 40),
)  # fmt: skip


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@given(results)
def test_a_result_arrives_as_it_left(result: ExecResult):
    assert repr(wire.decode(wire.encode(result))) == repr(result)


@pytest.mark.parametrize("record", [Quota(delta_bytes=7), ResetProof("a", 1, 0, True, True, 3)])
def test_records_keep_their_type(record: object):
    assert wire.decode(wire.encode((1, {"x": record}, [record]))) == (1, {"x": record}, (record,))


@pytest.mark.parametrize("error", [StateError("a"), StaleLease("b"), SetupError("c"), ValueError("d")])
def test_errors_keep_their_kind_and_words(error: Exception):
    arrived = wire.decode_error(wire.encode_error(error))
    assert (type(arrived), str(arrived)) == (type(error), str(error))


def test_an_error_of_another_kind_is_a_fault_of_ours():
    arrived = wire.decode_error(wire.encode_error(KeyError("x")))
    assert type(arrived) is WireError
    assert "KeyError" in str(arrived)


def test_what_cannot_travel_is_refused_and_spoils_nothing_that_follows():
    for value in (object(), {1: (Quota(), object())}):
        with pytest.raises(TypeError, match="object does not travel"):
            wire.encode(value)
        assert wire.decode(wire.encode((1, Quota()))) == (1, Quota())


@given(st.binary())
def test_bytes_that_are_no_message_are_an_error_and_nothing_else(body: bytes):
    with contextlib.suppress(WireError):
        wire.decode(body)


def test_an_unknown_record_is_refused():
    import msgpack

    for body in (msgpack.packb(msgpack.ExtType(99, b"")), msgpack.packb(msgpack.ExtType(0, msgpack.packb([1] * 40)))):
        with pytest.raises(WireError):
            wire.decode(body)


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 10 * FRAME_BYTES + 7])
def test_a_message_of_any_size_arrives_whole(size: int, ends: tuple[Channel, Channel]):
    body = os.urandom(size)
    sender = threading.Thread(target=ends[0].send, args=(7, CALL, body))
    sender.start()
    assert ends[1].receive() == (7, CALL, body)
    sender.join()


def test_frames_of_several_messages_interleave(ends: tuple[Channel, Channel]):
    bodies = {number: os.urandom(3 * FRAME_BYTES + number) for number in range(8)}
    senders = [threading.Thread(target=ends[0].send, args=(number, ANSWER, body)) for number, body in bodies.items()]
    for sender in senders:
        sender.start()
    received = {number: bytes(body) for number, _, body in (ends[1].receive() for _ in bodies)}
    assert received == bodies
    for sender in senders:
        sender.join()


def test_a_small_message_does_not_wait_for_the_end_of_a_large_one(ends: tuple[Channel, Channel]):
    large = threading.Thread(target=ends[0].send, args=(1, ANSWER, bytes(200 * FRAME_BYTES)))
    large.start()
    small = threading.Thread(target=ends[0].send, args=(2, ANSWER, b"small"))
    small.start()
    assert ends[1].receive() == (2, ANSWER, b"small")
    assert ends[1].receive()[0] == 1
    large.join()
    small.join()


def test_a_descriptor_travels_with_its_message(ends: tuple[Channel, Channel], tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    ends[0].send(1, CALL, b"base", descriptor)
    os.close(descriptor)
    assert ends[1].receive() == (1, CALL, b"base")
    arrived = ends[1].descriptors.popleft()
    assert os.read(arrived, 10) == b"content"
    os.close(arrived)


@pytest.mark.parametrize("junk", [b"\xff" * 40, struct.pack("<IQB", FRAME_BYTES + 1, 1, CALL)])
def test_a_frame_larger_than_any_is_an_error_before_it_is_read(junk: bytes, ends: tuple[Channel, Channel]):
    ends[0].socket.sendall(junk)
    with pytest.raises(WireError, match="is the most"):
        ends[1].receive()


def test_the_end_of_a_connection_is_told_to_both_sides(ends: tuple[Channel, Channel]):
    ends[0].close()
    with pytest.raises(WireError, match="has ended"):
        ends[1].receive()
    with pytest.raises(WireError, match="broken"):
        for _ in range(100):
            ends[1].send(1, CALL, bytes(FRAME_BYTES))


@given(st.lists(st.tuples(st.integers(), st.binary(max_size=3000)), max_size=400))
def test_rows_travel_in_messages_of_bounded_size_and_in_order(rows: list[tuple[int, bytes]]):
    rows = [(number % (1 << 60), data) for number, data in rows]
    sent: list[bytes] = []
    wire.send_rows(lambda kind, body: sent.append(body) if kind == ROWS else None, tuple(rows))
    assert [row for body in sent for row in wire.decode(body)] == rows
    assert all(len(body) <= 2 * FRAME_BYTES for body in sent)
