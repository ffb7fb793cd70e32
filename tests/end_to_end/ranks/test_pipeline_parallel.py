"""Pipeline stages over gloo, in float32: the texts of one process, also after one of the stages is killed."""

import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.helpers.one_process import (
    assert_equals_one_process,
    assert_gives_the_demo_models_texts,
    assert_requests_outlive_deaths,
)
from tests.end_to_end.helpers.toka_process import free_port, running_toka, starting_toka
from tests.helpers.limits import join
from tests.helpers.tiny_model import save_tiny_model


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", "pp_size=2"),  # tensor-parallel ranks: test_engine_deaths.py
        pytest.param("qwen3", "pp_size=2 tp_size=2", marks=pytest.mark.long),
        pytest.param("qwen2", "dp_size=2 pp_size=2", marks=pytest.mark.long),
        pytest.param("llama", "pp_size=2 torch_compile=T", marks=pytest.mark.long),
    ],
)
def test_stages_equal_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, tied=family == "llama")
    assert_equals_one_process(tmp_path, *parallel.split())


@pytest.mark.long
def test_a_watched_server_tells_what_each_stage_does(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    flags = f"model={tmp_path}", "device=cpu", "pp_size=2", "dtype=float32", "kv_cache_num_tokens=4096"
    with running_toka(*flags) as toka:
        body = {"model": "default", "prompt": "a", "max_tokens": 200, "n": 8, "ignore_eos": True}

        def ask() -> None:
            while not is_over.is_set():
                assert httpx.post(f"{toka.url}/v1/completions", json=body, timeout=120).status_code == 200

        is_over = threading.Event()
        client = threading.Thread(target=ask)
        client.start()
        time.sleep(1)  # work that nobody watches
        events = []
        with httpx.stream("GET", f"{toka.url}/live", timeout=60) as response:
            for line in response.iter_lines():
                if line and "stages" in (event := json.loads(line.removeprefix("data: ")))["replicas"][0]:
                    events.append(event)
                if len(events) == 4:
                    break
        is_over.set()
        join(client)
    assert all(stage["busy"] == stage["waiting"] == 0 for stage in events[0]["replicas"][0]["stages"])
    elapsed_s = events[-1]["time"] - events[0]["time"]
    for number in range(2):
        stages = [event["replicas"][0]["stages"][number] for event in events[1:]]
        busy_s, waiting_s = (sum(stage[name] for stage in stages) for name in ("busy", "waiting"))
        assert busy_s > 0.01 * elapsed_s
        assert waiting_s > 0, "a stage waits for hidden states or tokens"
        assert busy_s + waiting_s < elapsed_s + 2  # a step, or a late sample
        assert all(stage["microbatches"] >= 0 for stage in stages)
    assert any(stage["microbatches"] for event in events for stage in event["replicas"][0]["stages"])


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
