"""Trainers that know vLLM's roll-out routes: each plays the requests that its sources send, and reads what they read.

Read in verifiers 0.4.0 with renderers 0.1.12 (which prime-rl uses), skyrl 0.3.0, trl 1.16.0 and prime-rl's client."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.helpers.rollouts import RolloutServer

PROMPT = [72, 101, 108, 108, 111]


def test_renderers_finds_a_logprob_of_each_token(server: RolloutServer) -> None:
    """As renderers.client.generate does it for verifiers and prime-rl, checks of the answer included."""
    (card,) = [card for card in server.http.get("/v1/models").json()["data"] if card["id"] == "first"]
    assert card["max_model_len"] == 512
    body = {
        "model": card["id"],
        "token_ids": PROMPT,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 0.95,
            "max_tokens": 30,
            "routed_experts_prompt_start": 4,
            "stop_token_ids": [256, 257],
            "logprobs": 1,
            "skip_special_tokens": False,
        },
        "cache_salt": "7",
        "priority": 3,
    }
    answer = server.http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "trace-1"}).json()
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) > 0
    for token_id, entry in zip(choice["token_ids"], content, strict=True):
        assert entry["token"] == f"token_id:{token_id}"
        assert type(entry["logprob"]) is float
        assert math.isfinite(entry["logprob"])
        (top,) = entry["top_logprobs"]
        assert (entry["rank"] == 1) == (top["token_id"] == token_id)
        assert entry["logprob"] <= top["logprob"]
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["request_id"]
    assert answer["usage"]["completion_tokens"] == len(content)


def test_prime_rl_updates_between_pause_and_resume_and_may_send_all_of_it_again(
    server: RolloutServer, models: list[Path]
) -> None:
    pause = {"mode": "keep", "clear_cache": "false"}
    old = server.greedy_ids(PROMPT, 20)
    for _ in range(2):  # again, as after a timeout
        for _ in range(2):
            server.post("/pause", **pause)
            server.post("/update_weights", {"weight_dir": models[1].as_posix()})
        server.post("/resume")
        server.post("/resume")
    assert server.greedy_ids(PROMPT, 20) != old
    server.post("/update_weights", {"weight_dir": models[0].as_posix(), "version": "0"})
    assert server.greedy_ids(PROMPT, 20) == old


def test_skyrl_samples_scores_prompts_and_pauses(server: RolloutServer) -> None:
    """RemoteInferenceClient: generate with its own sampling parameters, sample as for Tinker, and the control plane."""
    sampling = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 1,
        "stop": None,
    }
    headers = {"Content-Type": "application/json", "X-Session-ID": "5"}
    body: dict[str, Any] = {"sampling_params": sampling, "model": "first", "token_ids": PROMPT, "cache_salt": "v1"}
    choice = server.http.post("/inference/v1/generate", json=body, headers=headers).json()["choices"][0]
    assert len([entry["logprob"] for entry in choice["logprobs"]["content"]]) == len(choice["token_ids"])
    assert choice["finish_reason"] in ("stop", "length")
    tinker = {"n": 3, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 2, "max_tokens": 4, "seed": 7}
    answer = server.post("/inference/v1/generate", {"sampling_params": tinker, "token_ids": PROMPT})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["prompt_logprobs"][0] is None
    for token_id, entry in zip(PROMPT[1:], answer["prompt_logprobs"][1:], strict=True):
        likely = sorted(((int(key), value["logprob"]) for key, value in entry.items()), key=lambda pair: -pair[1])
        assert len(likely[:2]) == 2
        assert entry[str(token_id)]["logprob"] <= likely[0][1]
    assert server.http.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    server.post("/pause", mode="keep", clear_cache="false")
    server.post("/resume")
    server.post("/reset_prefix_cache", {"reset_running_requests": False})
    assert server.http.post("/finish_session", params={"session_id": "5"}).status_code == 200


def test_skyrl_wakes_weights_and_cache_one_after_the_other(server: RolloutServer, models: list[Path]) -> None:
    """RemoteInferenceClient.sleep and wake_up with tags, around new weights."""
    old = server.greedy_ids(PROMPT, 20)
    with server.in_flight([PROMPT] * 32, 470) as answers:  # most of which take a fast machine long enough
        server.post("/sleep", level="2")
        server.post("/wake_up", tags="weights")
        assert server.http.get("/is_paused").json() == {"is_paused": True}
        server.update(models[1], version="tags")
        server.post("/wake_up", tags="kv_cache")
        assert server.http.get("/is_paused").json() == {"is_paused": False}
    versions = [answer["weight_version"] for answer in answers]
    assert set(versions) <= {"0", "tags"}  # some had ended before
    assert versions.count("tags") > len(versions) // 2
    assert server.greedy_ids(PROMPT, 20) != old
    refused = server.http.post("/sleep", params={"tags": "weights"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")
    assert server.http.post("/wake_up", params={"tags": "scheduling"}).status_code == 400
    server.post("/sleep", tags="kv_cache")
    server.post("/wake_up")


def test_an_older_word_for_waiting_is_understood(server: RolloutServer) -> None:
    with server.in_flight([PROMPT] * 2, 200) as answers:
        server.post("/pause", wait_for_inflight_requests="true")
        server.post("/resume")
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 2


def test_skyrls_calls_of_workers_update_weights_from_a_directory(server: RolloutServer, models: list[Path]) -> None:
    """RemoteInferenceClient.start_weight_update and finish_weight_update, with a strategy that names a directory."""
    old = server.greedy_ids(PROMPT, 20)
    start = {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}
    assert server.post("/collective_rpc", start) == {"results": [None]}
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    update = {"weight_dir": str(models[1]), "version": "rpc"}
    server.post("/collective_rpc", {"method": "update_weights_nccl", "kwargs": {"update_info": update}})
    server.post("/collective_rpc", {"method": "skyrl_finish_weight_update"})
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert server.version == "rpc"
    assert server.greedy_ids(PROMPT, 20) != old


@pytest.mark.parametrize("as_query", [False, True])
def test_running_requests_compute_their_kv_again_at_a_reset(server: RolloutServer, as_query: bool) -> None:
    prompts = [[number, *PROMPT] for number in range(8)]
    expected = server.all_greedy(prompts, 470)
    with server.in_flight(prompts, 470) as answers:
        assert server.http.post("/reset_prefix_cache").status_code == 409
        if as_query:
            server.post("/reset_prefix_cache", reset_running_requests="true")
        else:
            server.post("/reset_prefix_cache", {"reset_running_requests": True})
        assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    server.post("/pause", mode="keep", clear_cache="false")
    assert server.post("/reset_prefix_cache", {"reset_running_requests": True}) == {"is_paused": True, "success": True}
    server.post("/resume")


def test_trl_samples_completions_and_sends_its_weights_through_a_directory(
    server: RolloutServer, models: list[Path]
) -> None:
    """AsyncGRPO's VLLMClient, with a weight_transfer of its user's that names a directory."""
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    info = server.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["model_config"]["dtype"].removeprefix("torch.") == "float32"
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["weight_transfer_config"] is None
    teacher = {"model": "default", "prompt": [PROMPT], "max_tokens": 1, "prompt_logprobs": 100}
    refused = server.http.post("/v1/completions", json=teacher)
    assert (refused.status_code, "max_topk_logprobs=" in refused.json()["error"]["message"]) == (400, True)
    assert server.http.get("/get_world_size").json()["world_size"] == 1
    nccl = {"master_address": "10.0.0.1", "master_port": 12345, "rank_offset": 1, "world_size": 2, "packed": True}
    refused = server.http.post("/init_weight_transfer_engine", json={"init_info": nccl})
    assert refused.status_code == 400
    assert "NCCL" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "init_info.master_address"
    server.post("/init_weight_transfer_engine", {"init_info": {}})
    payload = {
        "model": "first",
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": 12345,
    }
    old = server.post("/v1/completions", payload)
    choice = old["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    with server.in_flight([PROMPT] * 64, 470) as answers:  # likewise
        server.post("/pause", mode="keep")
        server.post("/start_weight_update", {"is_checkpoint_format": True})
        server.post("/update_weights", {"update_info": {"weight_dir": str(models[1]), "version": "trl"}})
        server.post("/finish_weight_update")
        assert server.http.get("/is_paused").json() == {"is_paused": True}
        server.post("/resume")
    new = server.post("/v1/completions", payload)
    assert (old["weight_version"], new["weight_version"]) == ("0", "trl")
    assert new["choices"][0]["token_ids"] != choice["token_ids"]
    spans = [answer["choices"][0]["weight_versions"] for answer in answers]
    assert ["0", "trl"] in [[span["version"] for span in choice] for choice in spans]
    server.update(models[0], version="0")


def test_an_update_in_parts_has_one_version_and_runs_no_step_between(server: RolloutServer, models: list[Path]) -> None:
    server.post("/start_weight_update")
    server.post("/start_weight_update")
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    for _ in range(2):
        part = {"weight_dir": str(models[1]), "partial": True}
        assert server.post("/update_weights", {"update_info": part}) == {"weight_version": "1"}
    assert server.post("/finish_weight_update", {"weight_version": "1"}) == {"weight_version": "1"}
    assert server.post("/finish_weight_update") == {"weight_version": "1"}
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    server.update(models[0], version="0")


def test_every_kind_of_answer_names_its_weights(server: RolloutServer, models: list[Path]) -> None:
    server.update(models[0], version="step 8")
    sampling = {"model": "first", "max_tokens": 3, "ignore_eos": True}
    chat = {**sampling, "messages": [{"role": "user", "content": "Hi"}]}
    completion = {**sampling, "prompt": "Hi", "n": 2, "logprobs_in_fingerprint": True}
    bodies = {"/v1/chat/completions": chat, "/v1/completions": completion}
    for path, body in bodies.items():
        answer = server.post(path, body)
        lengths = [3] * len(answer["choices"])
        assert answer["weight_version"] == "step 8"
        versions = [choice["weight_versions"] for choice in answer["choices"]]
        assert versions == [[{"version": "step 8", "start": 0, "end": length}] for length in lengths]
    lines = [{"custom_id": path, "method": "POST", "url": path, "body": body} for path, body in bodies.items()]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    bulk = server.http.post("/v1/bulk", content=content, headers={"Content-Type": "application/x-ndjson"})
    assert [json.loads(line)["response"]["body"]["weight_version"] for line in bulk.text.splitlines()] == ["step 8"] * 2
    file = server.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", json.dumps(lines[0]) + "\n")}
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": lines[0]["url"], "completion_window": "24h"}
    batch = server.post("/v1/batches", asked)
    while batch["status"] not in ("completed", "failed"):
        batch = server.http.get(f"/v1/batches/{batch['id']}").json()
    result = json.loads(server.http.get(f"/v1/files/{batch['output_file_id']}/content").text)
    assert result["response"]["body"]["weight_version"] == "step 8"
    for path, body in bodies.items():
        fields = {name: value for name, value in body.items() if name != "logprobs_in_fingerprint"} | {"stream": True}
        stream = server.http.post(path, json=fields).text
        events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
        last = [event for event in events if event["choices"][0]["finish_reason"] is not None]
        assert len(last) == fields.get("n", 1)
        for event in last:
            assert event["weight_version"] == "step 8"
            assert event["choices"][0]["weight_versions"] == [{"version": "step 8", "start": 0, "end": 3}]
        assert all(("weight_version" in event) == (event in last) for event in events)
    server.update(models[0], version="0")


def test_an_aborted_request_for_prompt_logprobs_can_be_sent_again(server: RolloutServer) -> None:
    """At a pause that finds it before its prompt was computed: its request has nothing to return yet."""
    server.post("/pause", mode="keep")
    fields = {"model": "first", "prompt": "x", "max_tokens": 1}
    with httpx.Client(base_url=server.toka.url, timeout=60) as http, ThreadPoolExecutor(2) as pool:
        scored = pool.submit(http.post, "/v1/completions", json=fields | {"prompt_logprobs": 0})
        plain = pool.submit(http.post, "/v1/completions", json=fields | {"logprobs": 2})
        while not (scored.done() and plain.done()):
            server.post("/pause", mode="abort")
        assert scored.result().status_code == 503
        assert scored.result().json()["error"]["code"] == "aborted"
        choice = plain.result().json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    server.post("/resume")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/inference/v1/generate", {"sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [[1]]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1, 272]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {}}, "features"),
        ("/inference/v1/generate", {"token_ids": [1], "stream": True}, "stream"),
        ("/inference/v1/generate", {"token_ids": [1], "extra": 1}, "extra"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"best": 1}}, "sampling_params.best"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 512}}, None),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"min_tokens": 512}}, None),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stop_token_ids": [900]}}, None),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"bad_words": "a"}}, None),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"allowed_token_ids": []}}, None),
        ("/inference/v1/generate", {"token_ids": [1], "cache_salt": "a", "sampling_params": {"cache_salt": "b"}}, None),
        ("/update_weights", {}, "weight_dir"),
        ("/update_weights", {"weight_dir": None}, "weight_dir"),
        ("/update_weights", {"weight_dir": "/nowhere"}, "weight_dir"),
        ("/update_weights", {"weight_dir": "/nowhere", "mode": "later"}, "mode"),
        ("/update_weights", {"update_info": {"weight_dir": "/nowhere"}}, "update_info.weight_dir"),
        ("/update_weights", {"update_info": {"names": ["a"], "packed": True}}, "update_info.names"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/finish_weight_update", {"weight_version": "other"}, "weight_version"),
        ("/init_weight_transfer_engine", {}, "init_info"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    server: RolloutServer, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = server.http.post(path, json=fields)
    error = answer.json()["error"]
    if param is None:
        (name,) = set(fields["sampling_params"])
        param = name if name in fields else f"sampling_params.{name}"
    assert (answer.status_code, error["param"]) == (400, param)
    assert param in error["message"]
    assert server.http.get("/is_paused").json() == {"is_paused": False}
