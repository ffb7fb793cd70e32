"""Choose the replica that Ray Serve sends a request to: the one that has most of the prompt cached, or is ready
sooner."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tokasaurus.ray.replica import KV_CACHE_TOKENS
from tokasaurus.ray.requests import ForwardedRequest
from tokasaurus.server.engine_client.replicas import PrefixIndex, RoutedPrompt

_NO_PROMPT = RoutedPrompt(0, [])


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """The rule of toka's own data parallelism, over Serve's replicas.

    Each process that routes, which is each replica of the ingress, remembers what it has sent where. The load of a
    replica is what Serve says that it runs, or what this router has sent there, if that is more."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once, before all others."""
        del kwargs
        self._indexes: dict[ReplicaID, PrefixIndex] = {}
        """Prefix index of each replica that is there."""
        self._running: dict[str, ReplicaID] = {}
        """The replica where a request runs, by the request's internal id."""
        self._num_running: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, one by one, best first: the next one is for when one has no place for the request."""
        prompt = _NO_PROMPT
        if pending_request is not None:
            # Else the base class calls this again at once, for as long as no replica has a place.
            pending_request.routing_context.should_backoff = True
            prompt = _prompt_of(pending_request)
        if not candidate_replicas:
            return []
        costs = {
            replica.replica_id: prompt.cost(self._index_of(replica), self._load_of(replica))
            for replica in candidate_replicas
        }
        ranked = sorted(candidate_replicas, key=lambda replica: costs[replica.replica_id])
        # At once, so that requests that come before this one is sent find its prompt here.
        prompt.add_to(self._index_of(ranked[0]))
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica has accepted it."""
        del result
        if replica_id in self._indexes:
            _prompt_of(pending_request).add_to(self._indexes[replica_id])
        self._running[pending_request.metadata.internal_request_id] = replica_id
        self._num_running[replica_id] = self._num_running.get(replica_id, 0) + 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Also after the replica has refused it, and another may run it by then."""
        if self._running.get(internal_request_id) == replica_id:
            del self._running[internal_request_id]
            self._num_running[replica_id] -= 1
            if self._num_running[replica_id] == 0:
                del self._num_running[replica_id]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are there now."""
        present = {replica.replica_id for replica in replicas}
        for gone in self._indexes.keys() - present:
            del self._indexes[gone]
        super().update_replicas(replicas)

    def _index_of(self, replica: RunningReplica) -> PrefixIndex:
        index = self._indexes.get(replica.replica_id)
        if index is None:
            index = PrefixIndex(replica.replica_metadata[KV_CACHE_TOKENS])
            self._indexes[replica.replica_id] = index
        return index

    def _load_of(self, replica: RunningReplica) -> int:
        """Requests that it runs."""
        told = self.replica_queue_len_cache.get(replica.replica_id) or 0  # None: not asked for a while
        return max(told, self._num_running.get(replica.replica_id, 0))


def _prompt_of(pending: PendingRequest) -> RoutedPrompt:
    """The prompt of a call of `EngineReplica.answer`; no prompt for any other call, such as one for its health."""
    request = pending.args[0] if pending.args else None
    return request.prompt or _NO_PROMPT if isinstance(request, ForwardedRequest) else _NO_PROMPT
