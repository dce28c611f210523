"""Both boxes in one process."""

import ctypes
import os

import pytest

from hybridpp.cluster.shared_memory.message_log import Channel, Inbox, Message, Outbox
from hybridpp.errors import PeerError


@pytest.fixture
def boxes():
    outbox = Outbox()
    inbox = Inbox(outbox.arena.descriptor, "rank 1")
    yield outbox, inbox
    inbox.close()
    outbox.close()


ONE, OTHER = Channel


def put(outbox, data, channel=ONE):
    source = ctypes.create_string_buffer(data)
    outbox.add(ctypes.addressof(source), len(data), channel)


def taken(inbox, channel=ONE):
    assert inbox.has_message(channel)
    message = inbox.take(channel)
    return ctypes.string_at(message.address, message.size)


def resident(outbox):
    return os.fstat(outbox.arena.descriptor).st_blocks * 512


@pytest.mark.parametrize("ahead", [1, 254, 255, 256, 3000])
def test_however_far_ahead_messages_arrive_and_memory_is_used_again(boxes, ahead):
    outbox, inbox = boxes
    most = 0
    for turn in range(4):
        for number in range(ahead):
            put(outbox, b"%d" % (turn * ahead + number))
        most = most or resident(outbox)
        assert resident(outbox) <= most + 4096
        for number in range(ahead):
            assert taken(inbox) == b"%d" % (turn * ahead + number)
        assert not inbox.has_message(ONE)
        outbox.free((turn + 1) * ahead)


def test_an_empty_message_is_a_message(boxes):
    outbox, inbox = boxes
    for data in (b"", b"1", b""):
        put(outbox, data)
    assert [taken(inbox) for _ in range(3)] == [b"", b"1", b""]


def test_what_is_not_taken_is_not_written_over(boxes):
    outbox, inbox = boxes
    for number in range(600):
        put(outbox, b"%d" % number)
        outbox.free(number // 2)
    for _ in range(300):
        taken(inbox)
    assert [taken(inbox) for _ in range(300)] == [b"%d" % number for number in range(300, 600)]


def test_a_page_of_records_stays_until_the_next_one_was_found(boxes):
    outbox, inbox = boxes
    for _ in range(256):
        put(outbox, b"1")
    for _ in range(255):
        taken(inbox)
    outbox.free(255)
    for _ in range(256):
        put(outbox, b"2" * 4096)
    assert taken(inbox) == b"1"
    assert taken(inbox) == b"2" * 4096


@pytest.mark.parametrize(("word", "value"), [(0, 2**63), (1, 2**40), (0, 2**36)])
def test_a_record_of_garbage_is_an_error_and_no_crash(boxes, word, value):
    outbox, inbox = boxes
    put(outbox, b"1")
    outbox._records[word] = value
    with pytest.raises(
        PeerError, match=r"^rank 1 says that \d+ bytes lie at \d+ of \d+: its memory was overwritten\. "
    ):
        inbox.has_message(ONE)


def test_a_next_page_of_garbage_is_an_error_and_no_crash(boxes):
    outbox, inbox = boxes
    records = outbox._records
    for _ in range(256):
        put(outbox, b"1")
    records[510] = 2**64 - 1
    for _ in range(255):
        taken(inbox)
    with pytest.raises(PeerError, match=r"^rank 1 says that 4096 bytes lie at 18446744073709551615 of "):
        inbox.has_message(ONE)


def test_channels_are_taken_in_any_order_and_freed_in_theirs(boxes):
    outbox, inbox = boxes
    back = Inbox(outbox.arena.descriptor, "this rank")
    for number in range(6):
        put(outbox, b"%d" % number, Channel(number % 2))
    order = []
    for channel in (OTHER, OTHER, ONE, OTHER, ONE, ONE):
        assert inbox.has_message(channel)
        message = inbox.take(channel)
        # As if the peer's messages were this rank's: what is taken back is not looked at any more.
        outbox.take(message)
        order.append((ctypes.string_at(message.address, message.size), back.num_taken(6)))
    assert order == [(b"1", 0), (b"3", 0), (b"0", 2), (b"5", 2), (b"2", 4), (b"4", 6)]
    assert not inbox.has_message(ONE)
    assert not inbox.has_message(OTHER)
    back.close()


def test_counts_of_garbage_are_an_error(boxes):
    outbox, inbox = boxes
    for number in range(3):
        outbox.take(Message(number, 0, 0))
        if number < 2:
            assert inbox.num_taken(num_sent=2) == number + 1
    with pytest.raises(PeerError, match=r"^rank 1 has taken 3 messages of 2: its memory was overwritten\. "):
        inbox.num_taken(num_sent=2)


def test_counts_are_seen(boxes):
    outbox, inbox = boxes
    assert not inbox.is_closed
    outbox.ask(OTHER)
    assert [inbox.num_asked(channel) for channel in Channel] == [0, 1]
    outbox.end()
    assert inbox.is_closed
