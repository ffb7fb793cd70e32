"""Prompt tokens of the steps of microbatches, against rounds by hand and a pipeline that is run step by step."""

import pytest

from tokasaurus.manager.planning.microbatch_prefill import Pipeline


def round_time(num_stages: int, lengths: list[float]) -> float:
    """Of a pipeline in which these steps, one of each microbatch, go round; a microbatch's next step begins after its
    last one has left the last stage."""
    free = [0.0] * num_stages
    left = [0.0] * len(lengths)
    ends = []
    for _ in range(60):
        for microbatch, length in enumerate(lengths):
            ready = left[microbatch]
            for stage in range(num_stages):
                ready = free[stage] = max(ready, free[stage]) + length
            left[microbatch] = ready
        ends.append(left[-1])
    return (ends[-1] - ends[-21]) / 20


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (2, 4), (4, 5), (4, 6), (3, 5)])
def test_spare_tokens_delay_no_other_step_and_more_tokens_would(num_stages: int, num_microbatches: int) -> None:
    num_decoding = 1200  # divisible, and far above the 64 tokens that any step may have
    pipeline = Pipeline(num_stages, num_microbatches, max_tokens=10_000)
    num_spare = pipeline.most_prefill(num_decoding, num_all_tokens=num_microbatches * num_decoding)

    def lost(num_more: int) -> float:
        """Time in which the stages compute nothing, in a round."""
        lengths = [float(num_decoding)] * (num_microbatches - 1) + [float(num_decoding + num_more)]
        return round_time(num_stages, lengths) - sum(lengths)

    assert lost(num_spare) == pytest.approx(0)
    assert lost(num_spare + 10) > 1


@pytest.mark.parametrize(
    ("num_decoding", "num_all_tokens", "most"),
    [
        (100, 1000, 150),  # a quarter of all for each of four steps
        (100, 400, 64),
        (300, 1200, 150),  # half of its rows: (4 - 3) / (3 - 1)
        (0, 0, 64),
        (280, 4000, 232),  # no more than 512 in all
    ],
)
def test_a_steps_prompt_tokens_by_hand(num_decoding: int, num_all_tokens: int, most: int) -> None:
    assert Pipeline(3, 4, max_tokens=512).most_prefill(num_decoding, num_all_tokens) == most


@pytest.mark.parametrize(
    ("num_decoding", "num_left", "rate"),
    [
        ([10] * 5, [40] * 5, 200),  # all in one round
        ([10] * 5, [100, 0, 0, 0, 0], 50),  # 64 and 36
        ([10] * 5, [0, 500, 0, 0, 0], 72),  # 100, 80 and five times 64: seven rounds
        ([0] * 5, [64, 64, 64, 0, 0], 192),
        ([10] * 5, [0] * 5, None),
        ([512] * 5, [9] * 5, None),  # no room
    ],
)
def test_prompt_tokens_of_a_round_by_hand(num_decoding: list[int], num_left: list[int], rate: int | None) -> None:
    assert Pipeline(4, 5, max_tokens=512).prefill_per_round(num_decoding, num_left) == rate
