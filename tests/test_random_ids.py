"""Ids and seeds: each is given out once, to threads and to children as well."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

from tokasaurus.random_ids import random_id, random_seed


def ids(number: int) -> list[str]:
    return [random_id() for _ in range(number)]


def test_threads_never_get_the_same_id() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [one for some in pool.map(ids, [3000] * 8) for one in some]
    assert len(set(found)) == 24_000
    assert {len(one) for one in found} == {32}


def test_a_forked_child_has_ids_of_its_own() -> None:
    random_id()  # the pool has more
    with multiprocessing.get_context("fork").Pool(2) as pool:
        children = pool.map(ids, [50, 50])
    assert len({*children[0], *children[1], *ids(300)}) == 400


def test_seeds_fill_64_bits() -> None:
    seeds = [random_seed() for _ in range(200)]
    assert len(set(seeds)) == 200
    assert 0 <= min(seeds) < 1 << 60
    assert 1 << 62 < max(seeds) < 1 << 64
