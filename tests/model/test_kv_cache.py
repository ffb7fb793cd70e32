"""Sizing of the KV cache."""

import re
from pathlib import Path

import pytest

from tokasaurus.messages.lifecycle import UserError
from tokasaurus.model.kv_cache import available_cpu_bytes, plan_auto, plan_fixed

GIB = 1024**3


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(16, 1), (17, 2), (4096, 256)])
def test_a_size_that_is_asked_for_holds_at_least_as_many_tokens(num_tokens: int, num_blocks: int) -> None:
    assert plan_fixed(num_tokens, page_size=16, bytes_per_block=1000).num_blocks == num_blocks


def test_the_automatic_size_is_the_share_of_memory_less_the_padding_block() -> None:
    plan = plan_auto(16 * GIB, "of memory available", 0.25, num_replicas=2, page_size=16, bytes_per_block=2**20)
    assert plan.num_blocks == 2 * GIB // 2**20 - 1
    # The arithmetic shown to the user is that of the result.
    assert re.search(
        r"16 GiB .* x 0.25 / 2 replicas / 1 MiB a block = 2,047 blocks of 16 = 32,752 tokens", plan.arithmetic
    )


def test_memory_for_not_even_one_block_is_refused() -> None:
    with pytest.raises(UserError, match="kv_cache_num_tokens"):
        plan_auto(GIB, "of memory available", 0.25, 1, page_size=16, bytes_per_block=GIB)


def test_available_memory_is_positive_and_no_more_than_the_machine_has() -> None:
    with Path("/proc/meminfo").open() as lines:
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
    assert 0 < available_cpu_bytes() <= total
