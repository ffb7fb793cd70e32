"""New weights in a running server: its texts are those of a server that was started with them, and nothing in flight is
lost."""

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.end_to_end.helpers.rollouts import (
    NUM_TOKENS,
    ByParity,
    RolloutServer,
    continued_by,
    find_faults,
    kill_in_update,
    known_completions,
    make_prompts,
    rollout_server,
)
from tests.end_to_end.helpers.toka_process import wait_for
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus import Client, Sampling

MODES = ["keep", "abort", *(["wait"] if IS_NIGHTLY else [])]
PROMPTS = make_prompts()


@pytest.fixture(scope="session")
def new(second: RolloutServer) -> list[list[int]]:
    return second.all_greedy(PROMPTS, NUM_TOKENS)


def assert_updates(
    server: RolloutServer, second: RolloutServer, new: list[list[int]], models: list[Path], modes: list[str]
) -> None:
    """server: with the first model's weights, of version 0; it has them at the end too."""
    old = server.all_greedy(PROMPTS, NUM_TOKENS)
    assert all(one != other for one, other in zip(old, new, strict=True))
    weights = {"0": known_completions(PROMPTS, old), "new": continued_by(second)}
    for mode in modes:
        with server.in_flight(PROMPTS) as answers:
            assert server.update(models[1], version="new", mode=mode) == server.version == "new"
            assert server.all_greedy(PROMPTS[:8], NUM_TOKENS) == new[:8]
            details = [server.greedy(prompt, 1)["usage"]["prompt_tokens_details"] for prompt in PROMPTS[8:16]]
        assert len(answers) == len(PROMPTS)
        assert find_faults(PROMPTS, answers, weights) == []
        reasons = {answer["choices"][0]["finish_reason"] for answer in answers}
        versions = {span["version"] for answer in answers for span in answer["choices"][0]["weight_versions"]}
        if mode == "keep":
            assert (reasons, versions) == ({"length"}, {"0", "new"})
        else:
            assert versions == {"0"}
            assert reasons == {"length"} if mode == "wait" else "abort" in reasons
            assert [detail["cached_tokens"] for detail in details] == [0] * 8, "cached by old weights"
        assert server.update(models[0], version="0") == "0"
        assert server.all_greedy(PROMPTS[:8], NUM_TOKENS) == old[:8]


def test_new_weights_give_the_texts_of_a_fresh_server_and_no_request_is_lost(
    server: RolloutServer, second: RolloutServer, new: list[list[int]], models: list[Path]
) -> None:
    assert_updates(server, second, new, models, MODES)


def test_a_pause_that_aborts_does_not_wait_behind_one_that_waits(server: RolloutServer) -> None:
    """A trainer's second attempt, after a pause that took too long."""
    with ThreadPoolExecutor(1) as pool, server.in_flight(PROMPTS * 3, 470) as answers:
        waits = pool.submit(server.post, "/pause", mode="wait")
        wait_for(lambda: server.http.get("/is_paused").json()["is_paused"], 60)
        server.post("/pause", mode="abort")
        waits.result()
        server.post("/resume")
    assert "abort" in {answer["choices"][0]["finish_reason"] for answer in answers}


def test_lines_of_a_batch_that_are_aborted_run_again(server: RolloutServer) -> None:
    body = {"model": "default", "prompt": "a", "max_tokens": 400, "n": 8, "ignore_eos": True}
    line = {"url": "/v1/completions", "method": "POST", "body": body}
    lines = [line | {"custom_id": str(number)} for number in range(16)]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    file = server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}).json()
    before = server.toka.gauge("toka_generation_tokens_total")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = server.post("/v1/batches", asked)
    wait_for(lambda: server.toka.gauge("toka_generation_tokens_total") > before, 60)
    server.post("/pause", mode="abort")
    assert server.toka.gauge("toka_generation_tokens_total") < before + 16 * 8 * 400
    assert server.http.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] < len(lines)
    server.post("/resume")
    wait_for(lambda: server.http.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed", 120)
    output = server.http.get(f"/v1/batches/{batch['id']}").json()["output_file_id"]
    results = [json.loads(line) for line in server.http.get(f"/v1/files/{output}/content").text.splitlines()]
    choices = [choice for result in results for choice in result["response"]["body"]["choices"]]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 16 * 8


def test_samples_of_the_library_name_their_weights(server: RolloutServer, models: list[Path]) -> None:
    with Client(server.toka.url) as client:
        for model, version in ((models[1], "new"), (models[0], "0")):
            assert server.update(model, version=version) == version
            (result,) = client.generate(["a"], Sampling(n=2, max_tokens=2))
            assert [sample.weight_version for sample in result.samples] == [version] * 2


@pytest.mark.long
@pytest.mark.parametrize("flag", ["tp_size=2", "pp_size=2", "dp_size=2"])
def test_ranks_stages_and_replicas_change_together(
    second: RolloutServer, new: list[list[int]], models: list[Path], flag: str
) -> None:
    with rollout_server(models[0], flag) as ranks:
        assert_updates(ranks, second, new, models, MODES)


def test_a_worker_killed_in_an_update_comes_back_with_the_weights_that_its_version_names(
    server: RolloutServer, second: RolloutServer, new: list[list[int]], models: list[Path]
) -> None:
    prompts = PROMPTS[:16]
    old = server.all_greedy(prompts, NUM_TOKENS)
    weights = ByParity({"0": known_completions(prompts, old), "1": continued_by(second)})
    report = kill_in_update(server, models, 1, prompts, "toka-worker", after_s=0.01)
    assert (report.status, server.version) == (200, "1")
    assert find_faults(prompts, report.answers, weights) == []
    assert server.all_greedy(prompts[:4], NUM_TOKENS) == new[:4]
    server.update(models[0], version="0")
    assert server.all_greedy(prompts[:4], NUM_TOKENS) == old[:4]


def test_a_new_http_server_knows_the_weights_of_the_engine_and_that_it_is_paused(
    server: RolloutServer, new: list[list[int]], models: list[Path]
) -> None:
    """Kills of the server after an update, in a pause, and in an update that its client repeats."""

    def kill() -> None:
        os.kill(server.toka.children()["toka-server"], signal.SIGKILL)
        wait_for(lambda: server.toka.gauge("toka_server_restarts_total") > before, 60)

    old = server.all_greedy(PROMPTS[:4], NUM_TOKENS)
    before = server.toka.gauge("toka_server_restarts_total")
    server.update(models[1], version="1")
    kill()
    assert server.version == "1"
    assert server.all_greedy(PROMPTS[:4], NUM_TOKENS) == new[:4]
    server.post("/pause", mode="keep")
    before += 1
    kill()
    assert server.http.get("/is_paused").json()["is_paused"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.greedy_ids, PROMPTS[0], NUM_TOKENS)
        time.sleep(0.2)
        is_answered = answer.done()
        server.post("/resume")
        assert not is_answered
        assert answer.result() == new[0]
    before += 1
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(server.http.post, "/update_weights", json={"weight_dir": str(models[0]), "version": "0"})
        time.sleep(0.01)
        kill()
        with suppress(httpx.TransportError):
            updated.result()
    expected = {"0": old, "1": new[:4]}[server.version]
    assert server.all_greedy(PROMPTS[:4], NUM_TOKENS) == expected, "and it is not paused"
    server.update(models[0], version="0")
    assert server.all_greedy(PROMPTS[:4], NUM_TOKENS) == old


def test_a_stream_that_crosses_an_update_names_both_weights_at_its_end(
    server: RolloutServer, second: RolloutServer, models: list[Path]
) -> None:
    prompt = PROMPTS[0]
    old = server.greedy_ids(prompt, 400)
    body = {"model": "default", "prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    choices: list[dict[str, Any]] = []
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                choices.append(json.loads(line.removeprefix("data: "))["choices"][0])
                if len(choices) == 2:
                    server.update(models[1], version="new")
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    spans = choices[-1]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "new"]
    start = spans[1]["start"]
    assert [spans[0]["end"], spans[1]["end"]] == [start, 400]
    assert ids[:start] == old[:start]
    assert ids[start:] == second.greedy_ids(prompt + ids[:start], 400 - start)
    server.update(models[0], version="0")


def test_new_weights_that_a_fresh_server_would_use_otherwise_are_refused(
    server: RolloutServer, models: list[Path], tmp_path: Path
) -> None:
    """By both servers' routes, with the difference, before the engine is paused; and nothing has changed."""
    before = server.greedy_ids(PROMPTS[0], 8)
    shutil.copytree(models[1], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    for path, field in (("/update_weights", "weight_dir"), ("/update_weights_from_disk", "model_path")):
        answer = server.http.post(path, json={field: str(tmp_path)})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert "rms_norm_eps is 0.0001, not 1e-06" in error["message"]
    assert server.version == "0"
    assert server.greedy_ids(PROMPTS[0], 8) == before


@pytest.mark.long
def test_a_server_with_tied_embeddings_takes_those_that_are_tied_and_refuses_others(tmp_path: Path) -> None:
    """Also where the checkpoint has stored both matrices. The first texts are compared with a fresh server's."""
    tied, both, new, untied = (tmp_path / name for name in ("tied", "both", "new", "untied"))
    for seed, path in enumerate((tied, new)):
        save_tiny_model(path, "llama", tied=True, seed=seed)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    for path, source, factor in ((both, tied, 1), (untied, new, 2)):
        shutil.copytree(source, path)
        tensors = load_file(source / "model.safetensors")
        save_file({**tensors, head: tensors[embedding] * factor}, path / "model.safetensors", {"format": "pt"})
    prompts = PROMPTS[:8]
    with rollout_server(new) as fresh:
        expected = fresh.all_greedy(prompts, 20)
    with rollout_server(both) as server:
        answer = server.http.post("/update_weights", json={"weight_dir": str(untied)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight_dir")
        assert f"tensor {head} differs from {embedding}" in answer.json()["error"]["message"]
        assert server.version == "0"
        server.update(new)
        assert server.all_greedy(prompts, 20) == expected
    with rollout_server(untied) as server:
        server.update(both)
        before = server.all_greedy(prompts, 20)
    with rollout_server(tied) as fresh:
        assert fresh.all_greedy(prompts, 20) == before


def test_sampling_parameters_of_the_models_files_have_no_effect(server: RolloutServer) -> None:
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    asked = {"model": "default", "prompt": PROMPTS[0], "max_tokens": 20, "seed": 1, "logprobs": 0}
    answers = [server.post("/v1/completions", asked | fields)["choices"] for fields in ({}, neutral)]
    assert answers[0] == answers[1]
    for sampling in ({}, neutral):
        tokens = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 20, "seed": 1, "logprobs": 0, **sampling}}
        (choice,) = server.post("/inference/v1/generate", tokens)["choices"]
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert found == pytest.approx(answers[0][0]["logprobs"]["token_logprobs"], abs=1e-4)


def test_an_update_through_a_link_has_the_weights_that_it_led_to(
    server: RolloutServer, new: list[list[int]], models: list[Path], tmp_path: Path
) -> None:
    """Also in a worker that is started again when the link leads elsewhere."""
    link = tmp_path / "latest"
    link.symlink_to(models[1])
    assert server.post("/update_weights", {"weight_dir": f"{link}/", "version": "new"})["weight_version"] == "new"
    link.unlink()
    link.symlink_to(models[0])
    (worker,) = [pid for name, pid in server.toka.children().items() if name.startswith("toka-worker")]
    os.kill(worker, signal.SIGKILL)
    assert server.all_greedy(PROMPTS[:4], NUM_TOKENS) == new[:4]
    assert server.version == "new"
    server.update(models[0], version="0")
