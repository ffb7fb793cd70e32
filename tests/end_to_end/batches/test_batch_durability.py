"""kill -9 of each process of a server that runs batches: nothing is lost, doubled or changed."""

from pathlib import Path

import pytest

from tests.end_to_end.helpers.killed_batches import VICTIMS, WORKER, KilledBatches
from tests.helpers.tiny_model import save_tiny_model

NUM_LINES = 60
"""Of each of the two batches."""


@pytest.mark.long
def test_batches_outlive_the_death_of_each_process(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_model(model, "llama")
    batches = KilledBatches(model, tmp_path, NUM_LINES, seed=3)
    batches.prepare()
    with batches.killed_run([WORKER, "toka-manager"]) as outcome:
        expected = batches.ask_live(outcome.url)
    assert batches.find_faults(outcome, expected) == []
    assert batches.kills == dict.fromkeys(VICTIMS, 1)
