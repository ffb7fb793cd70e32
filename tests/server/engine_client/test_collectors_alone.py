"""Collectors without a client: restarted and failed requests, reads of limited size, answers that are too large."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.server.helpers.client_driver import make_request
from tokasaurus.messages.generation import FinishReason, SequenceDelta, TopLogprobs
from tokasaurus.server.engine_client.collectors import (
    VALUES_PER_DELTA,
    AnswerTooLarge,
    FinishedSequence,
    Results,
    SequenceAborted,
    StreamCollector,
)

NUM_TOP = 3


def make_delta(
    index: int, token_ids: list[int], reason: FinishReason | None = None, wants_logprobs: bool = True
) -> SequenceDelta:
    ids = np.array([[token_id] * NUM_TOP for token_id in token_ids], np.int32).reshape(-1, NUM_TOP)
    logprobs = [-float(token_id) for token_id in token_ids] if wants_logprobs else None
    top = TopLogprobs(ids, -ids.astype(np.float32)) if wants_logprobs else None
    return SequenceDelta("r", index, token_ids, logprobs, reason, 1, 2, 0, 0, top)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_a_restarted_request_has_only_what_came_after() -> None:
    async def use() -> None:
        results = Results([make_request("a", [1], 2), make_request("b", [1])])
        results.add(0, make_delta(0, [1, 2], "stop"))
        results.add(1, make_delta(0, [9], "stop"))
        assert results.restart(0)
        results.add(0, make_delta(0, [3], "stop"))
        assert not results.finished.done(), "the other sample is missing again"
        results.add(0, make_delta(1, [4], "stop"))
        await results.finished
        assert [[sequence.token_ids for sequence in row] for row in results.sequences] == [[[3], [4]], [[9]]]

    run(use())


def test_a_stream_restarts_a_request_until_some_of_it_was_read() -> None:
    async def use() -> None:
        collector = StreamCollector([make_request("a", [1], 2), make_request("b", [1])])
        collector.add(0, make_delta(0, [1]))
        collector.add(0, make_delta(1, [2], "stop"))
        collector.add(1, make_delta(0, [7]))
        assert collector.restart(0)
        assert [(index, delta.token_ids) for index, delta in await collector.read()] == [(1, [7])]
        assert collector.restart(0)
        assert not collector.restart(1), "its first token has been read"
        collector.add(1, make_delta(0, [8], "stop"))
        collector.add(0, make_delta(1, [5], "stop"))
        assert not collector.restart(1)
        read = await collector.read()
        assert [(index, delta.token_ids) for index, delta in read] == [(1, [8]), (0, [5])]
        collector.add(0, make_delta(0, [6], "stop"))
        assert [delta.token_ids for _, delta in await collector.read()] == [[6]]
        assert await collector.read() == []

    run(use())


def test_a_stream_restarts_what_was_read_if_nothing_of_it_was_sent() -> None:
    async def use() -> None:
        collector = StreamCollector([make_request("a", [1], 2), make_request("b", [1])])
        collector.add(0, make_delta(0, [1]))
        collector.add(0, make_delta(1, [2], "stop"))
        collector.add(1, make_delta(0, [7]))
        assert len(await collector.read()) == 3
        assert not collector.restart(0), "it may be on its way to the client"
        assert not collector.begins_anew
        collector.note_nothing_sent()
        assert collector.restart(0)
        for delta in (make_delta(0, [3], "stop"), make_delta(1, [4], "stop")):
            collector.add(0, delta)
        read = [(index, delta.token_ids) for index, delta in await collector.read()]
        assert read == [(1, [7]), (0, [3]), (0, [4])], "the other request's token counts as before"
        assert collector.begins_anew
        assert not collector.restart(1), "it may be on its way to the client"
        collector.note_sent()
        collector.add(1, make_delta(0, [8], "stop"))
        assert [delta.token_ids for _, delta in await collector.read()] == [[8]]
        assert await collector.read() == []

    run(use())


def test_a_restart_after_the_first_text_was_sent_leaves_the_reader_where_it_is() -> None:
    async def use() -> None:
        collector = StreamCollector([make_request(name, [1]) for name in "abc"])
        collector.add(0, make_delta(0, [1]))
        await collector.read()
        collector.note_nothing_sent()
        collector.add(1, make_delta(0, [2]))
        await collector.read()
        assert not collector.restart(0), "what is about to be sent may contain its token"
        collector.note_sent()
        assert not collector.restart(0), "its token is in what was sent, or is part of the reader's state"
        assert not collector.restart(1)
        assert collector.restart(2), "nothing of it was read"
        collector.add(2, make_delta(0, [3], "stop"))
        assert [(index, delta.token_ids) for index, delta in await collector.read()] == [(2, [3])]
        assert not collector.begins_anew

    run(use())


def test_a_failure_reaches_the_waiting_or_the_next_reader() -> None:
    async def use() -> None:
        error = RuntimeError("the engine is gone")
        results = Results([make_request("a", [1])])
        results.fail(error)
        results.fail(RuntimeError("a second one"))
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await results.finished

        collector = StreamCollector([make_request("a", [1])])
        reading = asyncio.ensure_future(collector.read())
        await asyncio.sleep(0)
        collector.fail(error)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await reading
        collector.add(0, make_delta(0, [1]))
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await collector.read()

    run(use())


def test_a_failure_after_the_end_of_a_stream_changes_nothing() -> None:
    async def use() -> None:
        collector = StreamCollector([make_request("a", [1])])
        collector.add(0, make_delta(0, [1], "stop"))
        await collector.read()
        collector.fail(RuntimeError("too late"))
        assert await collector.read() == []

    run(use())


def test_an_aborted_sequence_fails_a_reader_before_the_deltas_in_front_of_it() -> None:
    async def use() -> None:
        collector = StreamCollector([make_request("a", [1], 2)])
        collector.add(0, make_delta(0, [1] * 100))
        collector.add(0, replace(make_delta(1, [], "stop"), error="grammar", error_code="grammar_too_complex"))
        with pytest.raises(SequenceAborted, match="grammar"):
            await collector.read(1)

    run(use())


@pytest.mark.parametrize("max_values", [1, 30, 200, 10**9])
@pytest.mark.parametrize("seed", range(5))
def test_reads_of_limited_size_add_up_to_everything(seed: int, max_values: int) -> None:
    """Compared with the deltas added up one by one, in the order in which they came."""

    async def use() -> None:
        rng = random.Random(seed)
        wants_logprobs = rng.random() < 0.5
        collector = StreamCollector([make_request("a", [1], 3), make_request("b", [1], 2)])
        keys = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
        expected = {key: FinishedSequence() for key in keys}
        found = {key: FinishedSequence() for key in keys}
        open_keys = list(keys)
        while open_keys or any(not sequence.is_finished for sequence in found.values()):
            for _ in range(rng.randint(0, 8)):
                if not open_keys:
                    break
                key = rng.choice(open_keys)
                is_last = rng.random() < 0.05
                token_ids = [rng.randrange(1000) for _ in range(rng.choice([0, 1, 1, 2, 50]))]
                delta = make_delta(key[1], token_ids, "stop" if is_last else None, wants_logprobs)
                if is_last:
                    open_keys.remove(key)
                expected[key].append(delta)
                collector.add(key[0], delta)
            if collector._unread:
                deltas = await collector.read(max_values)
                per_token = 2 + NUM_TOP if wants_logprobs else 1
                work = sum(len(delta.token_ids) * per_token + VALUES_PER_DELTA for _, delta in deltas)
                assert work <= max_values + VALUES_PER_DELTA + per_token
                for index, delta in deltas:
                    assert not found[index, delta.sequence_index].is_finished
                    found[index, delta.sequence_index].append(delta)
        assert await collector.read() == []
        for key in keys:
            assert found[key].token_ids == expected[key].token_ids
            assert (found[key].logprobs or []) == (expected[key].logprobs or [])
            top, expected_top = found[key].top, expected[key].top
            assert (top is None) == (expected_top is None)
            if top is not None and expected_top is not None:
                assert top.token_ids.tolist() == expected_top.token_ids.tolist()
                assert top.logprobs.tolist() == expected_top.logprobs.tolist()

    run(use())


def test_an_answer_with_more_values_than_allowed_fails() -> None:
    async def use() -> None:
        per_token = 2 + NUM_TOP
        results = Results([make_request("a", [1], 2)], max_values=4 * per_token)
        results.add(0, make_delta(0, [1, 2, 3], "stop"))
        assert results.restart(0), "what is forgotten does not count"
        results.add(0, make_delta(0, [1, 2, 3], "stop"))
        assert not results.finished.done()
        results.add(0, make_delta(1, [1, 2], "stop"))
        with pytest.raises(AnswerTooLarge):
            await results.finished

    run(use())
