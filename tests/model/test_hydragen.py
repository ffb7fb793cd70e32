"""Steps with prefix groups sample the same tokens as the same steps without groups."""

from pathlib import Path

import pytest

from tests.helpers.examples import few
from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import StepDriver, make_runner, one_thread


@few(
    3,
    ("backend", "page_size"),
    [("reference", 5), ("torch", 7), ("cpu", 16), ("reference", 16), ("torch", 16), ("cpu", 32)],
)
@few(1, "family", FAMILIES)
def test_sequences_in_groups_sample_the_same_tokens(family: str, backend: str, page_size: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    model, info = load(tmp_path, packed=backend == "cpu")
    runs = []
    for grouped in (False, True):
        driver = StepDriver(make_runner(model, info, backend, page_size), page_size)
        samples = Samples(driver, page_size, seed=FAMILIES.index(family))
        with one_thread():
            samples.run(25, grouped)
        runs.append(samples.sampled)
        assert (samples.num_grouped > 100) is grouped
    for alone, together in zip(*(run.values() for run in runs), strict=True):
        assert [token for token, _ in together] == [token for token, _ in alone]
        assert [logprob for _, logprob in together] == pytest.approx([logprob for _, logprob in alone], abs=1e-4)
