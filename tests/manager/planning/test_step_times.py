"""Predicted step times against devices whose law is known, and bounds of a step's time by the steps before."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tokasaurus.manager.planning.step_times import (
    CONTEXT_TOKENS,
    GROWTH,
    IS_OF_DECODE,
    StepTimeModel,
    StepTimes,
    step_cost,
    step_features,
)

LAWS = {
    "fixed": [2e-3, 0, 0, 60e-3 / 8192, 0],
    "rows and context": [1e-3, 1e-6, 2e-9, 7e-6, 5e-10],
    "slow": [10e-3, 2e-4, 1e-7, 2e-3, 3e-8],
}
"""Seconds per unit of each feature."""


def random_step(rng: np.random.Generator, has_prefill: bool) -> NDArray[np.float64]:
    """A step of 700 to 1,024 decode rows, and perhaps a prompt."""
    num_decode = int(rng.integers(700, 1025))
    num_tokens = np.ones(num_decode + has_prefill, np.int32)
    num_kv_tokens = rng.integers(100, 1000, len(num_tokens))
    if has_prefill:
        num_tokens[-1] = rng.integers(1, 8192)
        num_kv_tokens[-1] = num_tokens[-1] + rng.integers(3000)
    return step_features(num_tokens, num_kv_tokens, num_decode)


def errors(law: list[float], model: StepTimeModel, num_steps: int, prefill_share: float, outlier_share: float = 0.0):
    """Relative errors of the predictions, each made before its step is observed with 2 % of noise."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(num_steps):
        features = random_step(rng, rng.random() < prefill_share)
        seconds = float(features @ np.array(law))
        found.append(model.predict(features) / seconds - 1)
        noise = 1 + 0.02 * rng.standard_normal()
        model.note(features, seconds * noise * (50 if rng.random() < outlier_share else 1))
        assert (model.weights >= 0).all()
    return np.abs(found)


def test_features_equal_sums_over_rows() -> None:
    num_tokens, num_kv_tokens = np.array([1, 1, 30, 5], np.int32), np.array([10, 20, 40, 5])
    assert step_features(num_tokens, num_kv_tokens, 2).tolist() == [1, 2, 10 + 20, 30 + 5, 30 * 40 + 5 * 5]
    assert (step_features(num_tokens[:2], num_kv_tokens[:2], 2) == [1, 2, 30, 0, 0]).all()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("prefill_share", [0.3, 0.02])
def test_predictions_are_good_after_some_steps(law: str, prefill_share: float) -> None:
    found = errors(LAWS[law], StepTimeModel(), 600, prefill_share)
    assert np.median(found[50:]) < 0.1
    assert np.quantile(found[300:], 0.98) < 0.4


@pytest.mark.parametrize("law", LAWS)
def test_outliers_of_50_times_the_step_time_do_little(law: str) -> None:
    found = errors(LAWS[law], StepTimeModel(), 600, 0.3, outlier_share=0.02)
    assert np.median(found[50:]) < 0.15
    assert found[100:].max() < 1.5


def test_a_change_of_speed_is_followed_within_some_steps() -> None:
    model, law = StepTimeModel(), LAWS["fixed"]
    errors(law, model, 300, 0.3)
    for factor in (10.0, 0.1):
        found = errors([factor * weight for weight in law], model, 60, 0.3)
        assert found[0] > 0.8
        assert np.median(found[30:]) < 0.1


def test_short_decode_steps_are_told_from_long_prefill_steps_that_alternate_with_them() -> None:
    """An average of both would be wrong about each of them by a factor."""
    model, decode = StepTimeModel(), np.array([1, 1000, 500_000, 0, 0.0])
    prefill = decode + np.array([0, 0, 0, 8192, 8192 * 4000])
    for _ in range(50):
        model.note(prefill, 0.062)
        model.note(decode, 0.002)
    assert model.predict(decode) == pytest.approx(0.002, rel=0.1)
    assert model.predict(prefill) == pytest.approx(0.062, rel=0.1)
    assert model.predict(prefill * IS_OF_DECODE) == model.predict(decode)
    assert model.predict(decode + prefill) == pytest.approx(model.predict(decode) + model.predict(prefill))


def test_ten_thousand_decode_steps_do_not_change_what_is_known_about_prefill() -> None:
    model = StepTimeModel()
    errors(LAWS["fixed"], model, 200, 0.5)
    before = model.weights.copy()
    for _ in range(10_000):
        model.note(np.array([1, 1000, 500_000, 0, 0.0]), 0.002)
    assert (model.weights[3:] == before[3:]).all()
    assert np.isfinite(model.weights).all()
    assert model.predict(np.array([1, 1000, 500_000, 0, 0.0])) == pytest.approx(0.002, rel=0.01)


def test_a_feature_is_unknown_until_a_step_had_it() -> None:
    model, decode = StepTimeModel(), np.array([1, 4, 90, 0, 0.0])
    prefill = np.array([1, 0, 0, 50, 50 * 50.0])
    assert not model.knows(prefill)
    model.note(prefill, 0.01)
    assert model.knows(prefill)
    assert not model.knows(decode)
    model.note(decode, 0.01)
    assert model.knows(decode + prefill)
    assert model.predict(decode) == pytest.approx(0.01, rel=0.01), "all that is not explained belongs to what is new"


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e9, float("inf")])
def test_absurd_times_leave_finite_weights(seconds: float) -> None:
    model, decode = StepTimeModel(), np.array([1, 4, 90, 0, 0.0])
    for _ in range(2000):
        model.note(decode, seconds)
    assert np.isfinite(model.weights).all()
    assert 1e-7 < model.predict(decode) < 1e4


@pytest.mark.parametrize("num_tokens", [200, 1000])
def test_the_cost_of_a_token_is_told_from_that_of_its_context(num_tokens: int) -> None:
    """Prompts of 8,000 tokens in chunks, beside decode rows: their context grows while nothing else changes."""
    model, rng = StepTimeModel(), np.random.default_rng(2)
    law = np.array(LAWS["slow"])
    for _ in range(20):
        decode = np.array([1, 8, 400, 0, 0.0])
        model.note(decode, float(decode @ law))
    for _ in range(3):
        for start in range(0, 8000, num_tokens):
            tokens, context = np.array([1] * 8 + [num_tokens], np.int32), np.array([50] * 8 + [start + num_tokens])
            features = step_features(tokens, context, num_decode=8)
            model.note(features, float(features @ law) * rng.uniform(0.95, 1.05))
    assert model.prefill_weights[0] == pytest.approx(LAWS["slow"][3], rel=0.1)
    assert model.prefill_weights[1] == pytest.approx(LAWS["slow"][4], rel=0.5)


def test_prefill_is_known_up_to_a_multiple_of_the_largest_of_the_latest_steps() -> None:
    model = StepTimeModel()
    assert model.max_prefill == float("inf")
    for num_tokens in (300, 40, 5):
        model.note(np.array([1, 0, 0, num_tokens, num_tokens**2]), 0.1)
        model.note(np.array([1, 4, 90, 0, 0.0]), 0.01)
    assert model.max_prefill == GROWTH * 300
    for _ in range(8):
        model.note(np.array([1, 0, 0, 40, 40.0**2]), 0.01)
    assert model.max_prefill == GROWTH * 40


@pytest.mark.parametrize("per_pair", [1e-8, 1e-7, 1e-6])
def test_a_measured_cost_of_context_outlasts_short_prompts(per_pair: float) -> None:
    """Chunks that grow from 9 tokens to a thousand, each with noise and the time of a step, and then a long context."""
    model, rng = StepTimeModel(first_per_pair=per_pair), np.random.default_rng(3)
    costs = np.array([5e-3, 1e-5, 1e-8, 2e-4, per_pair])
    for num_tokens in [9] * 8 + [16, 24, 36, 54, 81, 122, 182, 273, 410, 615, 922]:
        short = np.array([1, 4, 400, num_tokens, num_tokens * num_tokens])
        model.note(short, float(short @ costs) * float(np.exp(rng.normal(0, 0.3))))
    long = np.array([1, 4, 400, 500, 500 * 8000])
    assert model.predict(long) == pytest.approx(float(long @ costs), rel=0.4)


def test_long_prompts_correct_a_wrong_first_cost_of_context() -> None:
    for factor in (0.3, 3.0):
        model = StepTimeModel(first_per_pair=1e-7 * factor)
        costs = np.array([5e-3, 1e-5, 1e-8, 2e-4, 1e-7])
        for context in range(500, 8500, 500):
            chunk = np.array([1, 4, 400, 500, 500 * context])
            model.note(chunk, float(chunk @ costs))
        assert model.prefill_weights[1] == pytest.approx(1e-7, rel=0.3)


def test_cost_counts_tokens_and_their_context() -> None:
    num_tokens, num_kv_tokens = np.array([1, 100], np.int32), np.array([3 * CONTEXT_TOKENS, CONTEXT_TOKENS])
    assert step_cost(num_tokens, num_kv_tokens) == 1 * 4 + 100 * 2


def test_before_any_step_the_start_value_counts_for_each_token() -> None:
    assert StepTimes(0.5).longest(100) == 50


def test_before_any_step_attention_is_not_taken_for_faster_than_it_is() -> None:
    """24,000 tokens with 500 of context, where attention takes ten times as long as all other work."""
    per_token, per_pair = 1e-5, 2e-7
    cost = step_cost(np.full(48, 500, np.int32), np.full(48, 500))
    seconds = 24_000 * (per_token + 500 * per_pair)
    assert seconds <= StepTimes(per_token, per_pair).longest(cost) < 3 * seconds


@pytest.mark.parametrize(("cost", "longest"), [(16, 0.1), (10, 0.1), (1, 0.1), (17, 0.2), (64, 0.4), (8192, 0.1 * 512)])
def test_a_cheaper_step_takes_no_longer_and_a_dearer_one_at_most_in_proportion(cost: float, longest: float) -> None:
    times = StepTimes(0.5)
    times.note(16, 0.1)
    assert times.longest(cost) == pytest.approx(longest)


def test_a_bound_from_a_long_step_does_not_loosen_that_of_short_ones() -> None:
    times = StepTimes(0.5)
    times.note(8192, 30.0)
    times.note(16, 0.1)
    assert times.longest(16) == pytest.approx(0.1)
    assert times.longest(8192) == pytest.approx(30.0)


def test_a_single_slow_step_is_forgotten_slowly() -> None:
    times = StepTimes(0.5)
    times.note(16, 5.0)
    times.note(16, 0.1)
    assert 4.5 < times.longest(16) < 5
    for _ in range(1000):
        times.note(16, 0.1)
    assert times.longest(16) == pytest.approx(0.1)


def test_bounds_hold_for_a_device_with_a_fixed_time_and_a_time_per_token() -> None:
    random = np.random.default_rng(1)
    times = StepTimes(0.5)
    for _ in range(300):
        cost = float(2 ** random.uniform(0, 13))
        seconds = 0.02 + 0.001 * cost
        if _ > 0:
            assert seconds <= 2 * times.longest(cost)
        times.note(cost, seconds)
