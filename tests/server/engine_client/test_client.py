"""EngineClient against scripted engines: results, cancellation, load balancing, limits and counts."""

import asyncio

import pytest

from tests.server.helpers.client_driver import make_request, run_with, until
from tests.server.helpers.fake_engine import FakeEngine, Reply, echo, hand_over
from tokasaurus.messages.generation import SequenceDelta
from tokasaurus.messages.status import EngineLimits, EngineStats, Ready, ServerTotals
from tokasaurus.server.engine_client.client import CallCounts, EngineClient


def test_results_are_ordered_by_request_and_sequence_index(engine: FakeEngine) -> None:
    engine.script = lambda request, index: Reply(
        [*request.prompt_ids.tolist(), index], [-1.0] * (len(request.prompt_ids) + 1), "length", index
    )

    async def use(client: EngineClient) -> None:
        requests = [make_request("a", [1, 2], 3), make_request("b", [7], 2)]
        results = await client.generate(requests)
        assert [[sequence.token_ids for sequence in sequences] for sequences in results] == [
            [[1, 2, 0], [1, 2, 1], [1, 2, 2]],
            [[7, 0], [7, 1]],
        ]
        assert results[0][2].logprobs == [-1.0] * 3
        assert results[0][2].finish_reason == "length"
        assert [sequence.num_cached_tokens for sequence in results[0]] == [0, 1, 2]

    run_with([engine], use)


def test_concurrent_callers_each_get_their_own_result(engine: FakeEngine) -> None:
    async def use(client: EngineClient) -> None:
        requests = [make_request(f"r{number}", [number, number + 1]) for number in range(300)]
        results = await asyncio.gather(*(client.generate([request]) for request in requests))
        assert [result[0][0].token_ids for result in results] == [[number, number + 1] for number in range(300)]

    run_with([engine], use)


def test_update_larger_than_the_pipe_buffer_arrives_complete(engine: FakeEngine) -> None:
    """A Linux pipe buffers 64 KiB, so the reader must drain a larger message while it is being written."""
    token_ids = list(range(200_000))
    engine.script = lambda request, _index: Reply(token_ids) if request.request_id == "long" else echo(request, 0)

    async def use(client: EngineClient) -> None:
        requests = [make_request("long", [1]), make_request("after", [2])]
        results = await asyncio.gather(*(client.generate([request]) for request in requests))
        assert results[0][0][0].token_ids == token_ids
        assert results[1][0][0].token_ids == [2]

    run_with([engine], use)


def test_cancelled_caller_cancels_only_its_unfinished_requests(engine: FakeEngine) -> None:
    engine.script = lambda request, index: None if request.request_id == "hangs" else echo(request, index)

    async def use(client: EngineClient) -> None:
        requests = [make_request("done", [1]), make_request("hangs", [2], 3), make_request("done too", [3])]
        call = asyncio.create_task(client.generate(requests))
        await until(engine, lambda engine: len(engine.requests) == 3)
        assert client.num_pending_requests == 3
        other = await client.generate([make_request("other", [9])])
        assert other[0][0].token_ids == [9]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.num_pending_requests == 0
        await until(engine, lambda engine: len(engine.cancelled) > 0)

    run_with([engine], use)
    assert engine.cancelled == ["hangs"]


def test_answer_that_arrives_after_its_cancellation_is_ignored(engine: FakeEngine) -> None:
    engine.script = lambda _request, _index: None

    async def use(client: EngineClient) -> None:
        call = asyncio.create_task(client.generate([make_request("late", [1])]))
        await until(engine, lambda engine: len(engine.requests) == 1)
        call.cancel()
        await asyncio.wait([call])
        engine._answer(make_request("late", [1]))  # sends no delta, since the script returns None
        engine.script = echo
        engine._answer(make_request("late", [1]))
        assert (await client.generate([make_request("next", [5])]))[0][0].token_ids == [5]

    run_with([engine], use)


def test_stats_include_an_answer_as_soon_as_it_is_returned(engine: FakeEngine) -> None:
    async def use(client: EngineClient) -> None:
        assert client.stats == [EngineStats(0, 0, 0, engine.limits.num_kv_blocks, 0, 0, 0)]
        for number in range(1, 20):
            await client.generate([make_request(str(number), [1, 2, 3], 2)])
            (stats,) = client.stats
            assert stats is not None
            assert (stats.total_prompt_tokens, stats.total_generation_tokens) == (3 * number, 6 * number)

    run_with([engine], use)


def test_requests_go_to_the_replica_with_the_fewest_unfinished_sequences() -> None:
    engines = [FakeEngine(script=lambda _request, _index: None) for _ in range(3)]

    async def use(client: EngineClient) -> None:
        calls = [
            asyncio.create_task(client.generate([make_request(str(number), [1], num_sequences)]))
            for number, num_sequences in enumerate([5, 1, 3, 1, 2, 1])
        ]
        expected = [["0"], ["1", "3", "4"], ["2", "5"]]
        for engine, ids in zip(engines, expected, strict=True):
            await until(engine, lambda engine, ids=ids: len(engine.requests) == len(ids))
            assert [request.request_id for request in engine.requests] == ids
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        for engine, ids in zip(engines, expected, strict=True):
            await until(engine, lambda engine, ids=ids: len(engine.cancelled) == len(ids))
            assert sorted(engine.cancelled) == ids

    run_with(engines, use)


def test_limits_are_none_until_every_replica_is_ready_then_the_smallest() -> None:
    limits = [EngineLimits(64, 16, 900), EngineLimits(32, 16, 500)]
    engines = [FakeEngine(limits=one) for one in limits]
    num_ready = 0

    def on_ready() -> None:
        nonlocal num_ready
        num_ready += 1

    async def main() -> None:
        client = EngineClient(hand_over(*engines), len(engines), on_ready)
        with client.listening():
            assert client.limits is None
            for number, engine in enumerate(engines):
                assert (client.limits, num_ready) == (None, 0)
                engine.updates.send(Ready("manager", limits[number]))
                while client.stats[number] is None:  # noqa: ASYNC110 - the client signals no event for this
                    await asyncio.sleep(0.005)
            assert client.limits == limits[1]
            assert num_ready == 1

    asyncio.run(main())


def test_deltas_of_one_sequence_are_concatenated() -> None:
    async def main() -> None:
        engine = FakeEngine()
        client = EngineClient(hand_over(engine))
        call = asyncio.create_task(client.generate([make_request("a", [1])]))
        await asyncio.sleep(0)
        collector = client._pending["a"].collector
        collector.add(0, SequenceDelta("a", 0, [1, 2], [-1.0, -2.0], None, 3, 1, 0, 0))
        collector.add(0, SequenceDelta("a", 0, [5], [-5.0], "stop", 3, 4, 5, 6))
        (sequence,) = (await asyncio.wait_for(call, 5))[0]
        assert (sequence.token_ids, sequence.logprobs) == ([1, 2, 5], [-1.0, -2.0, -5.0])
        assert (sequence.finish_reason, sequence.num_cached_tokens) == ("stop", 3)
        counts = (sequence.num_computed_tokens, sequence.num_recomputed_tokens, sequence.num_shared_tokens)
        assert counts == (4, 5, 6), "the last delta has the totals"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("is_whole", "has_error", "error", "counted"),
    [
        (True, False, None, "answered"),
        (False, False, None, "aborted"),  # a stream whose reader stopped early
        (False, False, asyncio.CancelledError(), "aborted"),
        (False, False, GeneratorExit(), "aborted"),
        (True, False, asyncio.CancelledError(), "answered"),  # its last tokens were there
        (False, True, None, "failed"),
        (False, True, asyncio.CancelledError(), "failed"),
        (False, False, RuntimeError("engine died"), "failed"),
    ],
)
def test_a_call_counts_once_as_its_caller_saw_it(
    is_whole: bool, has_error: bool, error: BaseException | None, counted: str
) -> None:
    counts = CallCounts(num_open=2, tokens_by_key={"alice": (1, 2), "bob": (3, 4)})
    counts.note_end("alice", is_whole, has_error, error, 5, 7)
    assert counts.num_open == 1
    by_name = {"answered": counts.answered, "aborted": counts.aborted, "failed": counts.failed}
    assert by_name == {name: int(name == counted) for name in by_name}
    assert counts.totals() == ServerTotals(counts.answered, counts.aborted, counts.failed, 5, 7)
    assert counts.tokens_by_key == {"alice": (6, 9), "bob": (3, 4)}
    counts.note_end("127.0.0.1:1", is_whole, has_error, error, 5, 7)
    assert counts.tokens_by_key == {"alice": (6, 9), "bob": (3, 4)}, "no key: not kept"
