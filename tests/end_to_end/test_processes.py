"""Start and end of all processes of `toka` with a tiny model."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.text.tokenizer import Tokenizer

SMALL = ("dtype=float32", "kv_cache_num_tokens=4096", "max_tokens_per_forward=256", "max_seqs_per_forward=16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_tiny_model(directory, "llama")


@pytest.fixture(scope="module")
def toka(model: tuple[Path, PreTrainedModel]) -> Iterator[TokaProcess]:
    with running_toka(f"model={model[0]}", "served_model_name=tiny", "log_level=debug", *SMALL) as process:
        yield process


def test_a_served_local_checkpoint_matches_transformers(model: tuple[Path, PreTrainedModel], toka: TokaProcess) -> None:
    directory, oracle = model
    tokenizer = Tokenizer.load(directory)
    prompt = "A tiny prompt."
    assert [served["id"] for served in httpx.get(f"{toka.url}/v1/models").json()["data"]] == ["tiny"]
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 20,
        "ignore_eos": True,
        "logprobs": 0,
    }
    answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=60).json()
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=True)])
    expected = oracle.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token_id) for token_id in expected.tolist()]
    assert any(line.startswith("ready:") and "tiny" in line and toka.url in line for line in toka.lines)


def test_what_first_requests_need_is_there_when_it_is_ready(toka: TokaProcess) -> None:
    """The chat template's packages: a second or two."""
    (ready,) = (number for number, line in enumerate(toka.lines) if line.startswith("ready:"))
    assert any("chat template" in line for line in toka.lines[:ready])


def test_all_processes_end_when_the_launcher_is_killed(toka: TokaProcess) -> None:
    children = toka.children()
    assert len(children) == 3
    toka.process.kill()
    assert_all_end(list(children.values()), within_s=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_stop_signal_lets_open_requests_finish_and_refuses_new_ones(
    number: signal.Signals, model: tuple[Path, PreTrainedModel]
) -> None:
    with (
        running_toka(f"model={model[0]}", *SMALL, "drain_seconds=300") as toka,
        ThreadPoolExecutor() as pool,
        httpx.Client(timeout=60) as http,
    ):
        url = f"{toka.url}/v1/completions"
        body = {"model": "default", "prompt": "A", "n": 60, "max_tokens": 400, "ignore_eos": True}
        request = pool.submit(httpx.post, url, json=body, timeout=300)
        wait_for(lambda: toka.gauge("toka_requests_running") > 0, timeout_s=60)
        toka.process.send_signal(number)
        wait_for(lambda: http.get(f"{toka.url}/ready").status_code == 503, timeout_s=30)
        assert http.get(f"{toka.url}/health").status_code == 200
        seconds = []
        for _ in range(5):  # the machine may be busy
            started = time.monotonic()
            refused = http.post(url, json=body)
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 0.3
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert int(refused.headers["Retry-After"]) > 0
        assert not request.done()
        choices = request.result().json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 60
        assert toka.process.wait(timeout=60) == 0


@pytest.mark.long
def test_requests_still_open_after_draining_end_with_an_error(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with running_toka(f"model={tmp_path}", *SMALL, "drain_seconds=1") as toka, ThreadPoolExecutor() as pool:
        body = {"model": "default", "prompt": "A", "n": 2000, "max_tokens": 400, "ignore_eos": True}
        request = pool.submit(httpx.post, f"{toka.url}/v1/completions", json=body, timeout=300)
        wait_for(lambda: toka.gauge("toka_requests_running") > 0, timeout_s=60)
        assert toka.stop() == 0
        answer = request.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
