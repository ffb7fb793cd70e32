"""Choosing a replica, by what it has cached and how busy it is, and the index of its cached prefixes."""

import asyncio
import dataclasses
import os
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parallelism.prefix_routing import choose_at_random, make_chats, simulate
from tests.helpers.examples import IS_NIGHTLY
from tests.server.helpers.client_driver import make_request
from tokasaurus.messages import channel
from tokasaurus.messages.channel import ReplicaConnection, make_channel
from tokasaurus.messages.generation import CancelRequest
from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.engine_client import replicas as replicas_module
from tokasaurus.server.engine_client.replicas import (
    CHUNK_ENDS,
    SESSION_SEQUENCES,
    TOKENS_PER_SEQUENCE,
    PrefixIndex,
    Replica,
    choose_replica,
    hash_prefixes,
)

LIMITS = EngineLimits(num_kv_blocks=100, page_size=16, max_tokens_per_sequence=512)
PROMPT = list(range(160))


def make_replicas(*num_unfinished: int) -> list[Replica]:
    replicas = [Replica(num_unfinished_sequences=count) for count in num_unfinished]
    for replica in replicas:
        replica.start(LIMITS)
    return replicas


@pytest.mark.parametrize(("num_unfinished", "expected"), [((0,), 0), ((2, 1, 1), 1), ((0, 0), 0), ((5, 4, 3), 2)])
def test_a_new_prompt_goes_where_the_fewest_sequences_are_unfinished(num_unfinished, expected):
    replicas = make_replicas(*num_unfinished)
    assert choose_replica(replicas, make_request("a", PROMPT)) is replicas[expected]


def test_prompts_with_nothing_in_common_alternate_between_idle_replicas():
    replicas = make_replicas(0, 0)
    requests = [make_request(str(number), [number] * 32) for number in range(4)]
    assert [replicas.index(choose_replica(replicas, request)) for request in requests] == [0, 1, 0, 1]


def test_a_known_prefix_outweighs_some_load_but_not_any():
    replicas = make_replicas(0, 0)
    choose_replica(replicas, make_request("a", PROMPT))
    again = make_request("b", [*PROMPT[:96], *range(1000, 1064)])
    replicas[0].num_unfinished_sequences = 96 // TOKENS_PER_SEQUENCE - 1
    assert choose_replica(replicas, again) is replicas[0]
    assert choose_replica(replicas, dataclasses.replace(again, cache_salt="other")) is replicas[1]
    replicas[0].num_unfinished_sequences = 96 // TOKENS_PER_SEQUENCE + 1
    other = make_request("c", [*PROMPT[:96], *range(2000, 2064)])
    assert choose_replica(replicas, other) is replicas[1]
    replicas[0].num_unfinished_sequences = 0
    assert choose_replica(replicas, other) is replicas[1], "both have the first 96 tokens, but only this one the rest"


def test_a_replica_that_starts_again_has_nothing_cached():
    replicas = make_replicas(0, 0)
    request = make_request("a", PROMPT)
    assert choose_replica(replicas, request) is replicas[0]
    replicas[0] = make_replicas(1)[0]
    assert choose_replica(replicas, request) is replicas[1]


def test_two_replicas_find_nearly_as_much_in_their_caches_as_one():
    """Real managers; chats of 8 turns. With routing at random, four fifths are found."""
    num_chats = 64 if IS_NIGHTLY else 24
    chats = make_chats(num_chats, 8, seed=7)
    assert sum(len(chat.turns) for chat in chats) == 8 * num_chats
    one = simulate(chats, 1, 400_000, choose_replica)
    two = simulate(chats, 2, 400_000, choose_replica)
    at_random = simulate(chats, 2, 400_000, partial(choose_at_random, Random(1)))
    assert two.cached >= 0.95 * one.cached > at_random.cached
    assert np.isclose(one.asked, two.asked, rtol=0.01)


def tokens(*parts: tuple[int, int]) -> np.ndarray:
    """The token `value` `count` times, for each (value, count) in turn."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


prompts = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60)), min_size=1, max_size=5).map(
    lambda parts: tokens(*parts)
)


@given(st.lists(st.tuples(prompts, st.sampled_from(["", "a"])), max_size=6), prompts, st.sampled_from(["", "a"]))
def test_the_longest_common_prefix_of_whole_chunks_is_found(sent, asked, salt):
    index = PrefixIndex(100_000)
    for prompt, its_salt in sent:
        index.add(hash_prefixes(prompt, its_salt))
    common = [
        int(np.cumprod(prompt[: len(asked)] == asked[: len(prompt)]).sum()) // 16 * 16
        for prompt, its_salt in sent
        if its_salt == salt
    ]
    assert index.num_cached_tokens(hash_prefixes(asked, salt)) == max(common, default=0)
    distinct = {
        (its_salt, prompt[:end].tobytes()) for prompt, its_salt in sent for end in range(16, len(prompt) + 1, 16)
    }
    assert index.num_tokens == 16 * len(distinct)


def test_long_prompts_have_few_chunks():
    assert CHUNK_ENDS[:2] == (16, 32)
    assert CHUNK_ENDS[63:66] == (1024, 1088, 1152)
    prompt = np.arange(1_000_000, dtype=np.int32)
    prefixes = hash_prefixes(prompt, "")
    assert len(prefixes) < 450
    index = PrefixIndex(1_000_000)
    index.add(prefixes)
    changed = prompt.copy()
    changed[500_000] = -1
    assert 400_000 < index.num_cached_tokens(hash_prefixes(changed, "")) <= 500_000


def test_what_was_not_used_for_longest_is_forgotten_tail_first():
    index = PrefixIndex(160)
    first, second = hash_prefixes(tokens((1, 48)), ""), hash_prefixes(tokens((2, 96)), "")
    index.add(first)
    index.add(second)
    index.add(first)  # used again
    index.add(hash_prefixes(tokens((3, 48)), ""))
    assert index.num_tokens == 160
    assert index.num_cached_tokens(first) == 48
    assert index.num_cached_tokens(second) == 64


def test_a_prompt_longer_than_the_cache_is_remembered_up_to_its_size():
    index = PrefixIndex(64)
    prefixes = hash_prefixes(tokens((1, 200)), "")
    index.add(prefixes)
    assert index.num_cached_tokens(prefixes) == index.num_tokens == 64


def test_what_is_sent_in_one_pass_of_the_loop_arrives_in_order_by_one_write(monkeypatch):
    requests, updates = make_channel(), make_channel()
    writes = []
    monkeypatch.setattr(
        channel.os, "write", lambda fd, data, write=os.write: writes.append(len(data)) or write(fd, data)
    )

    async def send():
        replica = Replica(ReplicaConnection(requests[1], updates[0]))
        for number in range(50):
            replica.send(make_request(str(number), PROMPT))
        replica.send(CancelRequest("7"))
        assert not writes
        await asyncio.sleep(0)
        replica.send(CancelRequest("8"))
        await asyncio.sleep(0)

    asyncio.run(send())
    received = requests[0].drain()
    assert [message.request_id for message in received] == [*map(str, range(50)), "7", "8"]
    assert len(writes) == 2


def test_a_session_stays_on_its_replica_unless_that_is_overloaded():
    """Its prompts share nothing, and are short: alone, they would alternate."""
    replicas = make_replicas(0, 0)
    requests = [
        dataclasses.replace(make_request(str(number), [number] * 8), session=f"session {number % 2}")
        for number in range(8)
    ]
    chosen = [replicas.index(choose_replica(replicas, request)) for request in requests]
    assert chosen[::2] == [0] * 4
    assert chosen[1::2] == [1] * 4 or chosen[1::2] == [0] * 4
    replicas[0].num_unfinished_sequences = SESSION_SEQUENCES - 1
    assert choose_replica(replicas, requests[0]) is replicas[0]
    replicas[0].num_unfinished_sequences = SESSION_SEQUENCES + 2
    assert choose_replica(replicas, requests[0]) is replicas[1]


def test_sessions_not_used_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(replicas_module, "MAX_SESSIONS", 2)
    index = PrefixIndex(100)
    for session in ("a", "b", "a", "c"):
        index.note_session(session)
    assert [index.has_session(session) for session in "abc"] == [True, False, True]
    for session in ("a", "b", "a"):
        index.forget_session(session)
    assert [index.has_session(session) for session in "abc"] == [False, False, True]
