"""Channels between real processes: order, size, closing, and messages that a killed process left half-written."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass

import pytest

from tokasaurus.messages.channel import ChannelClosed, Sender, make_channel, send_to_all, wait

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Numbered:
    number: int
    content: bytes = b""


def send_all(sender: Sender[Numbered], sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        sender.send(Numbered(number, bytes(size)))
    sender.flush(60)


def send_large_for_ever(sender: Sender[Numbered]) -> None:
    sender.send(Numbered(0))
    sender.send(Numbered(1, bytes(50_000_000)))
    threading.Event().wait()


def start(target, sender: Sender[Numbered], *arguments):
    process = SPAWN.Process(target=target, args=(sender, *arguments), daemon=True)
    process.start()
    sender.close()
    return process


def test_messages_of_another_process_arrive_in_order_and_then_the_end() -> None:
    sizes = [0, 1, 70_000, 3_000_000, 5, 20_000_000, 0]
    receiver, sender = make_channel()
    process = start(send_all, sender, sizes)
    received = [receiver.receive(60) for _ in sizes]
    assert [(message.number, len(message.content)) for message in received] == list(enumerate(sizes))
    with pytest.raises(ChannelClosed):
        receiver.receive(60)
    assert receiver.drain() == []
    process.join(10)
    assert process.exitcode == 0


def test_send_never_blocks_and_the_rest_is_written_once_somebody_reads() -> None:
    receiver, sender = make_channel()
    began_s = time.monotonic()
    for number in range(100):
        sender.send(Numbered(number, bytes(200_000)))
    assert time.monotonic() - began_s < 10, "20 MB into a pipe of 1 MB that nobody reads"
    assert [receiver.receive(10).number for _ in range(100)] == list(range(100))


def test_what_fits_into_the_pipe_is_written_by_send_itself() -> None:
    """No thread takes part, so nothing waits for the GIL."""
    receiver, sender = make_channel()
    num_threads = threading.active_count()
    for number in range(20):
        sender.send(Numbered(number, bytes(300_000)))
        assert [message.number for message in receiver.drain()] == [number]
    for number in range(8):
        sender.send(Numbered(number, bytes(100_000)))
    assert threading.active_count() == num_threads
    assert [message.number for message in receiver.drain()] == list(range(8))


def test_a_half_written_message_of_a_killed_process_neither_blocks_nor_arrives() -> None:
    receiver, sender = make_channel()
    process = start(send_large_for_ever, sender)
    assert receiver.receive(60).number == 0
    assert wait([receiver], 10), "a part of the large message has arrived"
    began_s = time.monotonic()
    assert receiver.drain() == []
    assert time.monotonic() - began_s < 10
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    with pytest.raises(ChannelClosed):
        receiver.receive(10)


def test_receive_times_out_without_a_message() -> None:
    receiver, _sender = make_channel()
    with pytest.raises(TimeoutError):
        receiver.receive(0.05)


def test_sending_to_a_reader_that_has_gone_does_nothing() -> None:
    receiver, sender = make_channel()
    receiver.close()
    for _ in range(3):
        sender.send(Numbered(1, bytes(2_000_000)))
    sender.flush(5)
    sender.close()
    sender.send(Numbered(2))


def test_messages_sent_before_the_end_are_received_after_it() -> None:
    receiver, sender = make_channel()
    sender.send(Numbered(1))
    sender.send(Numbered(2))
    sender.close()
    assert [message.number for message in receiver.drain()] == [1, 2]
    assert receiver.is_closed


def test_threads_may_send_at_once() -> None:
    receiver, sender = make_channel()
    threads = [
        threading.Thread(target=lambda base=base: [sender.send(Numbered(base + n, bytes(5000))) for n in range(200)])
        for base in range(0, 1000, 200)
    ]
    for thread in threads:
        thread.start()
    numbers = [receiver.receive(10).number for _ in range(1000)]
    assert sorted(numbers) == list(range(1000))
    for base in range(0, 1000, 200):
        assert [n for n in numbers if base <= n < base + 200] == list(range(base, base + 200))


class CountsPickles:
    """Counts in the sending process how often it is pickled."""

    num_pickles = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        CountsPickles.num_pickles += 1
        return CountsPickles, ()


def test_a_message_to_several_readers_is_pickled_once_and_reaches_each_in_order() -> None:
    channels = [make_channel() for _ in range(3)]
    senders = [sender for _, sender in channels]
    senders[1].send("before")
    send_to_all(senders, CountsPickles())
    send_to_all(senders, "after")
    assert CountsPickles.num_pickles == 1
    for number, (receiver, _) in enumerate(channels):
        received = [type(message).__name__ for message in receiver.drain()]
        assert received == ["str"] * (number == 1) + ["CountsPickles", "str"]


def test_a_reader_that_has_gone_does_not_keep_a_message_from_the_others() -> None:
    (gone, first), (receiver, second) = make_channel(), make_channel()
    gone.close()
    send_to_all([first, second], Numbered(7))
    assert receiver.receive(10).number == 7
