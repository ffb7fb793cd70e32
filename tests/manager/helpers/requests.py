"""Makes requests for the engine: one from its number, or many from random shapes."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tests.manager.helpers.fake_grammars import VOCAB_SIZE
from tests.manager.helpers.simulation import simulate
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import EngineLimits


def make_request(
    number: int,
    num_prompt_tokens: int = 5,
    num_sequences: int = 1,
    max_new_tokens: int = 8,
    stop_strings: tuple[str, ...] = (),
    ignore_eos: bool = False,
    want_logprobs: bool = False,
) -> GenerateRequest:
    """The request r<number>, whose seed is its number."""
    prompt_ids = np.random.default_rng(number).integers(0, VOCAB_SIZE, num_prompt_tokens).astype(np.int32)
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=prompt_ids,
        num_sequences=num_sequences,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        seed=number,
        stop_strings=stop_strings,
        ignore_eos=ignore_eos,
        want_logprobs=want_logprobs,
    )


@dataclass(frozen=True)
class Shape:
    """The parameters of a random request. Fields without a docstring are GenerateRequest's."""

    prefix: int
    """Which text the prompt begins with: one of a few long texts; or, if negative, the prompt and completion of an
    earlier request (-1: the previous one), as in the next message of a conversation."""
    num_shared: int
    """Number of tokens of that text that the prompt begins with, at most."""
    num_fresh: int
    """Random tokens that follow them."""
    num_sequences: int
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = True
    want_logprobs: bool = False
    cache_salt: str = ""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    prompt_top: int | None = None
    """Number of top-k prompt logprobs; None for no prompt logprobs."""
    grammar: str = ""
    adapter: str = ""


def make_requests(shapes: Iterable[Shape], limits: EngineLimits) -> list[GenerateRequest]:
    """r0, r1, ... with seeds 0, 1, ...; prompts are cut to max_tokens_per_sequence - max_new_tokens."""
    requests: list[GenerateRequest] = []
    for number, shape in enumerate(shapes):
        if shape.prefix < 0 and requests:
            before = requests[max(0, number + shape.prefix)]
            text = [*before.prompt_ids.tolist(), *simulate(before, 0)[0]]
        else:
            text = np.random.default_rng([shape.prefix + 100, 7]).integers(0, VOCAB_SIZE, 200).tolist()
        fresh = np.random.default_rng([number, 9]).integers(0, VOCAB_SIZE, shape.num_fresh).tolist()
        most = limits.max_tokens_per_sequence - shape.max_new_tokens
        prompt_ids = [*text[: shape.num_shared], *fresh][:most] or [1]
        request = make_request(
            number,
            1,
            shape.num_sequences,
            shape.max_new_tokens,
            shape.stop_strings,
            shape.ignore_eos,
            shape.want_logprobs,
        )
        requests.append(
            dataclasses.replace(
                request,
                prompt_ids=np.array(prompt_ids, np.int32),
                cache_salt=shape.cache_salt,
                stop_token_ids=shape.stop_token_ids,
                min_tokens=min(shape.min_tokens, shape.max_new_tokens),
                want_prompt_logprobs=shape.prompt_top is not None,
                num_top_prompt_logprobs=shape.prompt_top or 0,
                grammar=shape.grammar,
                adapter=shape.adapter,
                adapter_version=shape.adapter and f"version of {shape.adapter}",
            )
        )
    return requests


def sequence_keys(requests: Iterable[GenerateRequest]) -> list[tuple[int, int]]:
    """(seed, sample index) of every sequence in order of arrival: the fake worker's key for a sequence."""
    return [(request.seed, index) for request in requests for index in range(request.num_sequences)]


def streamed(request: GenerateRequest) -> GenerateRequest:
    return dataclasses.replace(request, is_streamed=True)
