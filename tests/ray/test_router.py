"""Which replica is chosen, with stand-ins for Serve's replicas."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from tokasaurus.ray.replica import KV_CACHE_TOKENS
from tokasaurus.ray.requests import ForwardedRequest
from tokasaurus.ray.router import PrefixRouter
from tokasaurus.server.engine_client.replicas import TOKENS_PER_SEQUENCE, RoutedPrompt, hash_prefixes

NUM_SHARED = 160


class StandIn(PrefixRouter):
    """A router that Serve tells nothing but what the test says."""

    def __init__(self, *names: str) -> None:
        self.told: dict[str, int] = {}
        self.known = [SimpleNamespace(replica_id=name, replica_metadata={KV_CACHE_TOKENS: 10_000}) for name in names]
        self.initialize_state()

    @property
    def replica_queue_len_cache(self) -> Any:
        """Requests of all routers at a replica; none if Serve has not asked it for a while."""
        return self.told

    def choose(self, request: Any) -> list[str]:
        """Best first."""
        ranks = asyncio.run(self.choose_replicas(self.known, request))
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id for rank in ranks]


def pending(name: str, prefix: int | None = None) -> Any:
    """A request, with a long prompt behind a prefix that the number tells."""
    prompt = None
    if prefix is not None:
        ids = np.array([prefix] * NUM_SHARED + list(name.encode() * 20), np.int32)
        prompt = RoutedPrompt(len(ids), hash_prefixes(ids, ""))
    return SimpleNamespace(
        args=[ForwardedRequest("POST", "/v1/completions", [], b"", prompt)],
        metadata=SimpleNamespace(internal_request_id=name),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def test_a_known_prefix_outweighs_some_load_but_not_any() -> None:
    router = StandIn("x", "y")
    assert router.choose(pending("a", prefix=1)) == ["x", "y"]
    assert router.choose(pending("b", prefix=2)) == ["y", "x"], "which was sent fewer tokens"
    router.told = {"x": NUM_SHARED // TOKENS_PER_SEQUENCE - 1}
    assert router.choose(pending("c", prefix=1)) == ["x", "y"]
    router.told = {"x": NUM_SHARED // TOKENS_PER_SEQUENCE + 1}
    assert router.choose(pending("d", prefix=1)) == ["y", "x"]


def test_the_load_is_what_serve_says_or_what_the_router_has_sent() -> None:
    router = StandIn("x", "y")
    for number in range(3):
        request = pending(f"r{number}")
        assert router.choose(request)[0] == "xyx"[number]
        router.on_request_routed(request, "xyx"[number], None)
    assert router.choose(pending("more"))[0] == "y"
    router.told = {"y": 5}
    assert router.choose(pending("more"))[0] == "x"
    router.on_request_completed("x", "r0")
    router.on_request_completed("x", "r2")
    router.told = {}
    assert router.choose(pending("more"))[0] == "x"


def test_a_request_that_a_replica_has_refused_counts_where_it_runs() -> None:
    """Serve tells the end of the refused call when another replica has it already."""
    router = StandIn("x", "y")
    router.on_request_routed(pending("a"), "y", None)
    router.on_request_completed("x", "a")
    assert router.choose(pending("b"))[0] == "x"
    router.on_request_completed("y", "a")
    router.on_request_routed(pending("c"), "x", None)
    assert router.choose(pending("d"))[0] == "y"


def test_without_a_place_the_next_attempt_waits() -> None:
    request = pending("a")
    assert StandIn().choose(request) == []
    assert request.routing_context.should_backoff


def test_calls_without_a_request_go_to_the_least_loaded_replica() -> None:
    router = StandIn("x", "y")
    router.told = {"x": 1}
    other = pending("a")
    other.args = ["no request"]
    for request in (None, other):
        assert router.choose(request)[0] == "y"
