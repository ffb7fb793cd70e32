"""A server that sleeps: memory is given back, requests wait or are refused, and nothing changes after waking."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.helpers.toka_process import running_toka, wait_for
from tests.helpers.examples import few
from tests.helpers.tiny_model import save_tiny_model

NUM_KV_TOKENS = 200_000
CACHE_BYTES = NUM_KV_TOKENS * 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(model, "llama")
    flags = ("dtype=float32", f"kv_cache_num_tokens={NUM_KV_TOKENS}", "rl=T")
    with running_toka(f"model={model}", *flags) as toka, httpx.Client(base_url=toka.url, timeout=60) as client:
        client.headers["x-launcher"] = str(toka.process.pid)
        yield client


def complete(http: httpx.Client, prompt: str, max_tokens: int = 24) -> httpx.Response:
    body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def worker(http: httpx.Client) -> psutil.Process | None:
    """None while it is being started again."""
    launcher = psutil.Process(int(http.headers["x-launcher"]))
    return next((child for child in launcher.children() if child.name().startswith("toka-worker")), None)


def touched_bytes(process: psutil.Process) -> int:
    """Of a worker, once its cache, which is touched in the background, no longer grows."""
    found, before = 0, -1
    while found > before:
        found, before = process.memory_info().rss, found
        time.sleep(0.3)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_texts_are_the_same_afterwards(http: httpx.Client, level: int) -> None:
    before = text_of(complete(http, "Once"))
    process = worker(http)
    assert process is not None
    awake = touched_bytes(process)
    assert http.post("/sleep", params={"level": level}).json() == {"is_sleeping": True}
    assert awake - process.memory_info().rss > 0.8 * CACHE_BYTES
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up").json() == {"is_sleeping": False}
    assert text_of(complete(http, "Once")) == before
    assert text_of(complete(http, "Another")) != before


def test_requests_wait_while_it_sleeps_and_running_ones_go_on_afterwards(http: httpx.Client) -> None:
    complete(http, "A long one", 400)
    started_s = time.monotonic()
    before = text_of(complete(http, "A long one", 400))
    seconds = time.monotonic() - started_s
    texts: list[str] = []
    running = threading.Thread(target=lambda: texts.append(text_of(complete(http, "A long one", 400))))
    running.start()
    time.sleep(seconds / 5)
    assert http.post("/sleep").status_code == 200
    waiting = threading.Thread(target=lambda: texts.append(text_of(complete(http, "A long one", 400))))
    waiting.start()
    for path in ("/resume", "/update_weights"):
        refused = http.post(path, json={"weight_dir": "/nowhere"} if path == "/update_weights" else None)
        assert "the engine sleeps" in refused.json()["error"]["message"]
    assert not texts
    assert http.post("/wake_up").status_code == 200
    for thread in (running, waiting):
        thread.join(60)
    assert texts == [before, before]


def test_weights_are_replaced_between_the_two_steps_of_taking_memory_again(http: httpx.Client, tmp_path: Path) -> None:
    """As trainers do that share the device: SGLang's names."""
    save_tiny_model(tmp_path, "llama", seed=1)
    before = text_of(complete(http, "Once"))
    refused = http.post("/release_memory_occupation", json={"tags": ["weights"]})
    assert refused.json()["error"]["param"] == "tags"
    for tag in ("kv_cache", "weights"):
        assert http.post("/release_memory_occupation", json={"tags": [tag]}).json()["success"]
    texts: list[str] = []
    waiting = threading.Thread(target=lambda: texts.append(text_of(complete(http, "Once"))))
    waiting.start()
    assert http.post("/resume_memory_occupation", json={"tags": ["weights"]}).json()["success"]
    assert http.post("/update_weights_from_disk", json={"model_path": str(tmp_path)}).json()["success"]
    time.sleep(0.1)
    assert not texts
    assert http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).json()["success"]
    waiting.join(60)
    assert texts == [text_of(complete(http, "Once"))] != [before]


def test_requests_are_refused_while_it_sleeps_if_that_is_asked_for(http: httpx.Client) -> None:
    assert http.post("/sleep", params={"refuse": True}).status_code == 200
    refused = complete(http, "Once")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_asleep")
    assert http.post("/wake_up").status_code == 200
    assert text_of(complete(http, "Once"))


def test_an_engine_that_dies_in_its_sleep_sleeps_when_it_is_started_again(http: httpx.Client) -> None:
    before = text_of(complete(http, "Once"))
    old = worker(http)
    assert old is not None
    awake = touched_bytes(old)
    assert http.post("/sleep").status_code == 200
    old.kill()

    def is_there_again() -> bool:
        process = worker(http)
        return http.get("/ready").json().get("status") == "ready" and process is not None and process.pid != old.pid

    wait_for(is_there_again, 240)
    process = worker(http)
    assert process is not None
    wait_for(lambda: process.memory_info().rss <= awake - 0.8 * CACHE_BYTES, 60)
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up").status_code == 200
    wait_for(lambda: process.memory_info().rss >= awake - 0.2 * CACHE_BYTES, 60)
    assert text_of(complete(http, "Once")) == before


def test_new_weights_may_be_written_over_the_old_ones_while_it_sleeps(http: httpx.Client, tmp_path: Path) -> None:
    texts = []
    for seed in (1, 2):
        save_tiny_model(tmp_path, "llama", seed=seed)
        if seed == 2:
            assert http.post("/release_memory_occupation", json={}).json()["success"]
            refused = http.post("/resume_memory_occupation", json={})
            assert "have changed" in refused.json()["error"]["message"]
            assert http.post("/resume_memory_occupation", json={"tags": ["weights"]}).json()["success"]
            for path in ("/resume", "/resume_memory_occupation"):
                assert "have changed" in http.post(path, json={}).json()["error"]["message"]
        assert http.post("/update_weights_from_disk", json={"model_path": str(tmp_path)}).json()["success"]
        if seed == 2:
            assert http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).json()["success"]
        texts.append(text_of(complete(http, "Once")))
    assert texts[0] != texts[1]


@few(1, "flag", ["tp_size=2", "pp_size=2"])
def test_ranks_and_stages_sleep_and_wake_together(flag: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    flags = ("dtype=float32", "kv_cache_num_tokens=2000", "rl=T", flag)
    file = tmp_path / "model.safetensors"
    with running_toka(f"model={tmp_path}", *flags) as toka, httpx.Client(base_url=toka.url, timeout=60) as client:
        before = text_of(complete(client, "Once"))
        for level in (1, 2):
            assert client.post("/sleep", params={"level": level}).status_code == 200
        file.rename(tmp_path / "away")
        answer = client.post("/wake_up")
        assert answer.status_code == 409
        assert "cannot be read again" in answer.text
        (tmp_path / "away").rename(file)
        assert client.post("/wake_up").status_code == 200
        assert text_of(complete(client, "Once")) == before


def test_a_server_that_is_paused_stops_at_once(http: httpx.Client) -> None:
    """No request could go on: it drains no longer. The last test, because it ends the server."""
    waiting = threading.Thread(target=lambda: texts.append(complete(http, "Once", 400).status_code))
    texts: list[int] = []
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    waiting.start()
    time.sleep(0.2)
    launcher, began_s = psutil.Process(int(http.headers["x-launcher"])), time.monotonic()
    launcher.terminate()
    waiting.join(60)
    assert texts == [503]
    while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began_s < 10, "it has drained"
        time.sleep(0.05)
