"""Every sampling parameter reaches every sampler: a changed value changes the tokens, in each to the same ones."""

import json
from pathlib import Path

import pytest

from tests.helpers.installed_triton import needs_interpreter, run_python
from tests.model.sampling.helpers.changed_params import (
    DEFAULTS,
    Tokens,
    draw_on_rank,
    drawn_by_kernels,
    drawn_by_torch,
)
from tests.model.sampling.helpers.shard_ranks import run_ranks
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, SamplingParams
from tokasaurus.model.sampling.rules import RULES


@pytest.fixture(scope="module")
def by_torch() -> Tokens:
    return drawn_by_torch()


def assert_every_parameter_has_its_effect(tokens: Tokens, by_torch: Tokens) -> None:
    """Rounded sums of probabilities may exclude another token at the end of top_p."""
    assert list(tokens) == [DEFAULTS, *SamplingParams._fields]
    num_rows = len(tokens[DEFAULTS])
    for name, drawn in tokens.items():
        num_equal = sum(map(int.__eq__, drawn, by_torch[name]))
        assert num_equal >= 0.98 * num_rows, f"{name} is not what plain torch draws"
        num_changed = sum(map(int.__ne__, drawn, tokens[DEFAULTS]))
        assert name == DEFAULTS or num_changed >= num_rows // 12, f"{name} has no effect"


def test_each_parameter_has_values_that_must_change_something() -> None:
    """A new parameter needs them: the tests below then fail for each sampler that does not read it."""
    assert list(CLIENT_PARAMETERS) == list(SamplingParams._fields)
    defaults = SamplingParams()._asdict()
    assert not [name for name, one in CLIENT_PARAMETERS.items() if defaults[name] in (one.strong, one.weak)]


def test_each_parameter_belongs_to_one_rule() -> None:
    assert sorted(name for rule in RULES for name in rule.fields) == sorted(SamplingParams._fields)


def test_plain_torch_reads_every_parameter(by_torch: Tokens) -> None:
    assert_every_parameter_has_its_effect(by_torch, by_torch)
    assert len({tuple(drawn) for drawn in by_torch.values()}) == len(by_torch), "no two of them do the same"


def test_the_kernels_read_every_parameter(by_torch: Tokens) -> None:
    assert_every_parameter_has_its_effect(drawn_by_kernels(), by_torch)


@needs_interpreter
@pytest.mark.long
def test_triton_reads_every_parameter(by_torch: Tokens) -> None:
    printed = run_python("-m", "tests.model.sampling.helpers.changed_params")
    assert_every_parameter_has_its_effect(json.loads(printed), by_torch)


@pytest.mark.long
def test_ranks_with_a_part_of_the_vocabulary_read_every_parameter(by_torch: Tokens, tmp_path: Path) -> None:
    for of_rank in run_ranks(2, tmp_path, 2, draw_on_rank):
        for tokens in of_rank:
            assert_every_parameter_has_its_effect(tokens, by_torch)
