"""Pipeline stages over gloo, in float32: the texts of one process, also after one of the stages is killed."""

from pathlib import Path

import pytest

from tests.end_to_end.helpers.one_process import (
    assert_equals_one_process,
    assert_gives_the_demo_models_texts,
    assert_requests_outlive_deaths,
)
from tests.end_to_end.helpers.toka_process import free_port, starting_toka
from tests.helpers.tiny_model import save_tiny_model


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", "pp_size=2 tp_size=2"),  # both kinds of ranks: the one case in `make test`
        pytest.param("llama", "pp_size=2", marks=pytest.mark.long),
        pytest.param("qwen2", "dp_size=2 pp_size=2", marks=pytest.mark.long),
        pytest.param("llama", "pp_size=2 torch_compile=T", marks=pytest.mark.long),
    ],
)
def test_stages_equal_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, tied=family == "llama")
    assert_equals_one_process(tmp_path, *parallel.split())


@pytest.mark.long
def test_four_stages_equal_one_process(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=5)
    assert_equals_one_process(tmp_path, "pp_size=4")


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["pp_size=2", "pp_size=3", "pp_size=2 tp_size=3", "dp_size=2 pp_size=2"])
def test_uneven_stages_give_the_demo_models_texts(parallel: str) -> None:
    """30 layers: two stages have 19 and 11, since the LM head is as large as eight layers."""
    assert_gives_the_demo_models_texts(*parallel.split())
    assert_equals_one_process(None, *parallel.split())


@pytest.mark.parametrize(
    ("pp_size", "ranks"),
    [(2, [0]), pytest.param(2, [0, 1], marks=pytest.mark.long), pytest.param(3, [0, 1, 2], marks=pytest.mark.long)],
)
@pytest.mark.long
def test_requests_outlive_the_death_of_each_stage_and_nothing_is_left_over(
    pp_size: int, ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = f"1 replica x {pp_size} pipeline stages x 1 tensor-parallel rank = {pp_size} model workers"
    assert_requests_outlive_deaths(tmp_path, monkeypatch, f"pp_size={pp_size}", what, ranks)


@pytest.mark.long
def test_more_stages_than_layers_end_the_start_in_one_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with starting_toka(free_port(), f"model={tmp_path}", "device=cpu", "pp_size=4") as toka:
        assert toka.process.wait(120) == 2
    (line,) = {line for line in toka.lines if line.startswith("toka: ")}
    assert "pp_size=4 is more than the model's 3 layers" in line
