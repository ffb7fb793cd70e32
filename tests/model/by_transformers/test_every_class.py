"""Every causal language model of transformers: served as its own class computes it, or refused with the reason."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.tiny_model import OPTIONS, option_config, save_random_model
from tests.model.by_transformers.helpers.every_class import RIGHT, TABLE, assert_equals, outcome
from tests.model.by_transformers.helpers.tiny_classes import FAMILIES, VOCAB_SIZE
from tests.model.helpers.greedy_decoding import assert_equals_oracle
from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.families.states import FAMILIES as STATES

_EXPECTED: dict[str, str] = json.loads(TABLE.read_text(encoding="utf-8"))
_TESTED = ".".join(_EXPECTED.pop("transformers").split(".")[:2])
"""The version that the table is of."""
_ROOT = Path(__file__).parents[3]
_SOME = (
    *("mixtral", "minimax_m3_vl_text", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "falcon_h1"),
    *("gpt2", "gemma2", "bloom", "roberta"),
)
"""By default; the others are long."""
_NATIVE_ONLY = {
    **dict.fromkeys([("phi3", 1), ("phimoe", 1)], "rope_type longrope depends on the longest sequence of a batch"),
    ("internlm3", 0): "does not run without weights",
    ("llama4_text", 0): "Llama4TextAttention gives attention a mask that cannot be computed without weights",
    **{(family, number): "keeps a state beside keys and values" for family in STATES for number in range(2)},
}
"""Options of native families with which the class is refused, and the reason: angles depend on the batch, or there are
chunks or states."""


def test_at_least_ninety_families_are_served() -> None:
    assert sum(each == RIGHT for each in _EXPECTED.values()) >= 90


def test_a_newer_transformers_has_the_same_families() -> None:
    """The table may lack families of another version than its own, or have some that are gone."""
    gained, lost = set(FAMILIES) - set(_EXPECTED), set(_EXPECTED) - set(FAMILIES)
    assert not gained | lost, f"transformers {version('transformers')} gained {sorted(gained)} and lost {sorted(lost)}"


def test_the_tested_version_is_told() -> None:
    assert f"classes of {_TESTED} are tested" in (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"of transformers {_TESTED} " in (_ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in _SOME else (pytest.mark.long,)) for each in _EXPECTED]
)
def test_what_becomes_of_a_family(family: str, tmp_path: Path) -> None:
    """But for torch's own words, which depend on whether its compiler has been imported."""
    found, expected = (
        text.partition(" without weights: ")[0] for text in (outcome(family, tmp_path), _EXPECTED[family])
    )
    assert found == expected


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, marks=() if number == 0 and family in ("phi", "gemma2") else pytest.mark.long)
        for family, options in OPTIONS.items()
        for number in range(len(options))
    ],
)
def test_native_layers_the_class_and_transformers_agree(family: str, number: int, tmp_path: Path) -> None:
    oracle = save_random_model(tmp_path, option_config(family, number, vocab_size=VOCAB_SIZE), seed=number)
    assert_equals_oracle(tmp_path, oracle, None, seed=number, vocab_size=VOCAB_SIZE)
    if reason := _NATIVE_ONLY.get((family, number)):
        with pytest.raises(CheckpointError, match=reason):
            assert_equals(tmp_path, oracle)
    else:
        assert_equals(tmp_path, oracle)
