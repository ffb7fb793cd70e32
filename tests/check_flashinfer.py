"""What is recorded of FlashInfer's calls against the packages in .venv-flashinfer: `make test-flashinfer`."""

import ast
import json
from pathlib import Path

import pytest

from tests.model.attention.helpers.flashinfer_source import RECORD, read_package

PACKAGES = Path(__file__).resolve().parents[1] / ".venv-flashinfer"
RECORDED = json.loads(RECORD.read_text())


@pytest.mark.parametrize("version", RECORDED)
def test_the_record_is_what_the_package_has(version: str) -> None:
    found = read_package(PACKAGES / version)
    assert json.loads(json.dumps(found)) == RECORDED[version]


@pytest.mark.parametrize("version", RECORDED)
def test_the_decode_wrapper_hands_every_keyword_of_plan_on(version: str) -> None:
    """Its `plan` takes any keyword; those of its table of deprecated arguments are parameters of `_plan_impl`."""
    tree = ast.parse((PACKAGES / version / "flashinfer/decode.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_BATCH_DECODE_PLAN_LEGACY_POS_ARGS"
    )
    parameters = {name for name, _, _ in RECORDED[version]["wrappers"]["BatchDecodeWithPagedKVCacheWrapper"]["plan"]}
    assert set(ast.literal_eval(table)) <= parameters
    assert {"sm_scale", "q_data_type", "kv_data_type", "o_data_type"} <= set(ast.literal_eval(table))


def test_both_wrappers_are_at_the_top_of_the_package() -> None:
    for version, found in RECORDED.items():
        names = {
            alias.name
            for node in ast.parse((PACKAGES / version / "flashinfer/__init__.py").read_text()).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert set(found["wrappers"]) <= names
