"""Chooses the data-parallel replica for the next request."""

from collections.abc import Sequence

from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.engine_client.prefix_index import hash_prefixes
from tokasaurus.server.engine_client.replica import Replica

TOKENS_PER_SEQUENCE = 32
"""An unfinished sequence delays a request as much as the prefill of this many tokens."""


def choose_replica(replicas: Sequence[Replica], request: GenerateRequest) -> Replica:
    """The replica with most of the prompt cached, unless another is so much less busy that it is ready sooner.

    Among equals, the one that was sent the fewest tokens; among those, the first. The chosen one is expected to cache
    the prompt from now on. replicas: at least one, all up.
    """
    if len(replicas) == 1:
        return replicas[0]  # hashing would be useless
    prefixes = hash_prefixes(request.prompt_ids, request.cache_salt)

    def cost(replica: Replica) -> tuple[int, int]:
        num_uncached = len(request.prompt_ids) - replica.prefixes.num_cached_tokens(prefixes)
        return num_uncached + TOKENS_PER_SEQUENCE * replica.num_unfinished_sequences, replica.prefixes.num_tokens

    replica = min(replicas, key=cost)
    replica.prefixes.add(prefixes)
    return replica
