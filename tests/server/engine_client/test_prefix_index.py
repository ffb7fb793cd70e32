"""Tests the prefixes that a replica is known to have, against sets of token lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokasaurus.server.engine_client.prefix_index import CHUNK_ENDS, PrefixIndex, hash_prefixes


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
