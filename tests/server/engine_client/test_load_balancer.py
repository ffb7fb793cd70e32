"""Which replica gets the next request."""

import dataclasses
from functools import partial
from random import Random

import numpy as np
import pytest

from benchmarks.prefix_routing import choose_at_random, make_chats, simulate
from tests.server.helpers.client_driver import make_request
from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.engine_client.load_balancer import TOKENS_PER_SEQUENCE, choose_replica
from tokasaurus.server.engine_client.replica import Replica

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
    """Real managers; 64 chats of 8 turns. With routing at random, four fifths are found."""
    chats = make_chats(64, 8, seed=7)
    assert sum(len(chat.turns) for chat in chats) == 512
    one = simulate(chats, 1, 400_000, choose_replica)
    two = simulate(chats, 2, 400_000, choose_replica)
    at_random = simulate(chats, 2, 400_000, partial(choose_at_random, Random(1)))
    assert two.cached >= 0.95 * one.cached > at_random.cached
    assert np.isclose(one.asked, two.asked, rtol=0.01)
