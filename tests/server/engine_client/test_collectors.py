"""Streams of deltas, compared with the answers that `generate` returns."""

import asyncio
import dataclasses
from dataclasses import replace

import pytest

from tests.server.helpers.client_driver import make_request, run_with, until
from tests.server.helpers.fake_engine import FakeEngine, Reply, prompt_logprobs
from tokasaurus.messages.generation import GenerateRequest, PromptLogprobs
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.collectors import FinishedSequence


def streamed(request: GenerateRequest) -> GenerateRequest:
    return replace(request, is_streamed=True)


def count_up(request: GenerateRequest, index: int) -> Reply:
    """100 consecutive ids starting at the prompt's first token; each further sample has 100 more."""
    first = int(request.prompt_ids[0])
    token_ids = list(range(first, first + 100 * (index + 1)))
    return Reply(token_ids, [-float(token_id) for token_id in token_ids], "length", index, 5, 6, 7)


async def follow(
    client: EngineClient, requests: list[GenerateRequest], pause_s: float = 0.0
) -> list[list[FinishedSequence]]:
    """Same result as `generate`, built from the deltas of a stream that is read every `pause_s` seconds."""
    sequences = [[FinishedSequence() for _ in range(request.num_sequences)] for request in requests]
    async with client.stream(requests) as collector:
        while deltas := await collector.read():
            for request_index, delta in deltas:
                sequences[request_index][delta.sequence_index].append(delta)
            keys = [(request_index, delta.sequence_index) for request_index, delta in deltas]
            assert len(set(keys)) == len(keys), "at most one delta per sequence in each read"
            await asyncio.sleep(pause_s)
        assert await collector.read() == []
    return sequences


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@pytest.mark.parametrize("delta_size", [1, 7, 1000])
def test_deltas_of_a_stream_add_up_to_the_result_of_generate(
    engine: FakeEngine, delta_size: int, pause_s: float
) -> None:
    engine.script = count_up
    engine.delta_size = delta_size

    async def use(client: EngineClient) -> None:
        expected = await client.generate([make_request("a", [10], 3), make_request("b", [5000], 2)])
        asked = [streamed(make_request("c", [10], 3)), streamed(make_request("d", [5000], 2))]
        assert await follow(client, asked, pause_s) == expected

    run_with([engine], use)
    assert engine.cancelled == []


def test_concurrent_stream_and_generate_calls_each_get_their_own_tokens(engine: FakeEngine) -> None:
    engine.script = count_up

    async def use(client: EngineClient) -> None:
        requests = [make_request(f"r{number}", [number]) for number in range(60)]
        results = await asyncio.gather(
            *(
                follow(client, [streamed(r)]) if number % 2 else client.generate([r])
                for number, r in enumerate(requests)
            )
        )
        for number, ((sequence,),) in enumerate(results):
            assert sequence.token_ids == list(range(number, number + 100))

    run_with([engine], use)


def test_leaving_a_stream_cancels_only_its_unfinished_requests(engine: FakeEngine) -> None:
    def script(request: GenerateRequest, index: int) -> Reply:
        return Reply([1, 2], finish_reason=None if request.request_id == "endless" and index == 1 else "stop")

    engine.script = script

    async def use(client: EngineClient) -> None:
        asked = [streamed(make_request("whole", [1])), streamed(make_request("endless", [2], 2))]
        num_ended = 0
        async with client.stream(asked) as collector:
            while num_ended < 2:
                num_ended += sum(delta.finish_reason is not None for _, delta in await collector.read())
            assert client.num_pending_requests == 2
        assert client.num_pending_requests == 0
        await until(engine, lambda engine: len(engine.cancelled) > 0)

    run_with([engine], use)
    assert engine.cancelled == ["endless"]


def test_cancelling_a_task_that_reads_a_stream_cancels_its_request(engine: FakeEngine) -> None:
    engine.script = lambda _request, _index: None

    async def use(client: EngineClient) -> None:
        call = asyncio.create_task(follow(client, [streamed(make_request("a", [1]))]))
        await until(engine, lambda engine: len(engine.requests) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(engine, lambda engine: engine.cancelled == ["a"])

    run_with([engine], use)


def test_slow_reader_of_a_stream_gets_prompt_logprobs_once(engine: FakeEngine) -> None:
    engine.delta_size, engine.pause_s = 2, 0.01
    request = dataclasses.replace(
        make_request("a", [5, 6, 7, 8, 9], 2), is_streamed=True, want_prompt_logprobs=True, num_top_prompt_logprobs=2
    )
    found: list[PromptLogprobs | None] = []

    async def use(client: EngineClient) -> None:
        async with client.stream([request]) as collector:
            await until(engine, lambda engine: len(engine.requests) == 1)
            await asyncio.sleep(0.1)  # every delta has arrived by then
            found.extend(delta.prompt_logprobs for _, delta in await collector.read())

    run_with([engine], use)
    (computed,) = [logprobs for logprobs in found if logprobs is not None]
    expected = prompt_logprobs(request)
    assert computed.ranks.tolist() == expected.ranks.tolist()
    assert len(found) == 2
