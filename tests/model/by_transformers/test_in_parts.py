"""Classes whose tensors are divided among ranks, and whose layers among stages: right, or refused with the reason."""

import json
from pathlib import Path

import pytest

from tests.model.by_transformers.helpers.every_class import RIGHT
from tests.model.by_transformers.helpers.in_parts import IN_PARTS, SERVED, outcomes

_EXPECTED: dict[str, dict[str, str]] = json.loads(IN_PARTS.read_text(encoding="utf-8"))
_SOME = ("mixtral", "gemma2", "deepseek_v3", "gpt2")
_OTHERS = [family for family in SERVED if family not in _SOME]


def test_most_families_are_served_by_two_ranks_and_by_two_stages() -> None:
    assert set(_EXPECTED) == set(SERVED)
    num_right = {mesh: sum(each[mesh] == RIGHT for each in _EXPECTED.values()) for mesh in _EXPECTED["mixtral"]}
    assert num_right["tp_size=2"] >= 75
    assert num_right["pp_size=2"] >= 90


@pytest.mark.parametrize(
    "families", [_SOME, *(pytest.param(_OTHERS[start::8], marks=pytest.mark.long) for start in range(8))], ids=str
)
def test_what_becomes_of_families_in_parts(families: list[str], tmp_path: Path) -> None:
    assert outcomes([*families], tmp_path) == {family: _EXPECTED[family] for family in families}
