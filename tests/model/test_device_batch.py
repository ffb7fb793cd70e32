"""The counts that batches are padded to."""

import random
from pathlib import Path

from tests.model.steps import StepDriver, make_runner
from tests.model.test_decoder import load
from tests.tiny_model import save_tiny_model
from tokasaurus.model.device_batch import padded_count


def test_padding_adds_at_most_a_sixteenth_and_leaves_few_counts() -> None:
    padded = [padded_count(count) for count in range(8193)]
    assert padded[:17] == list(range(17))
    assert padded == sorted(padded)
    for count, result in enumerate(padded):
        assert count <= result <= count + count / 16
        assert padded_count(result) == result
    # 16 exact ones, then 16 to each of the 9 doublings up to 8,192; and 0.
    assert len(set(padded)) == 161


def test_matrix_products_see_padded_counts_alone(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    counts: set[int] = set()
    for linear in (model.layers[0].mlp.gate_up, model.lm_head):
        linear.register_forward_hook(lambda _module, inputs, _output: counts.add(inputs[0].shape[0]))
    driver = StepDriver(make_runner(model, info, "torch", num_blocks=600), num_blocks=600)
    rng = random.Random(0)
    asked: set[int] = set()
    for slot in range(1, 21):
        prompt = [1] * rng.randint(17, 400)
        driver.open(slot, prompt)
        asked.add(len(prompt))
        driver.run([], [(slot, len(prompt))])
        driver.run(list(range(1, slot + 1)), [])
    assert counts <= {padded_count(count) for count in range(1, 401)}
    assert not asked <= counts, "most prompts are no padded count"
