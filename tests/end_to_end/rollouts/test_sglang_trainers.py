"""Trainers that know SGLang's roll-out routes: each plays the requests that its sources send, and reads what they read.

Read in areal 1.0.4, verl 0.9.1, slime's repository and sglang 0.5.23."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.helpers.rollouts import RolloutServer
from tests.end_to_end.helpers.toka_process import wait_for
from tests.helpers.examples import few

PROMPT = [72, 101, 108, 108, 111]


def slime_body(**sampling: Any) -> dict[str, Any]:
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 400,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return {"sampling_params": params | sampling, "return_logprob": True, "input_ids": PROMPT}


def test_slime_aborts_until_idle_and_goes_on_with_the_tokens_so_far(server: RolloutServer, models: list[Path]) -> None:
    """SGLangEngine, sglang_rollout.generate, and abort_servers_until_idle of a partial roll-out."""
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.get("/flush_cache").status_code == 200
    info = server.http.get("/get_server_info").json()
    assert [info[name] for name in ("tp_size", "dp_size", "pp_size", "ep_size", "nnodes")] == [1] * 5
    assert server.http.get("/server_info").json().keys() == info.keys()
    for route in ("/model_info", "/get_model_info"):
        model = server.http.get(route).json()
        assert (model["model_path"], model["is_generation"]) == (str(models[0]), True)
        assert model["weight_version"] == "0"
    refused = server.http.post("/weights_checker", json={"action": "snapshot"})
    assert (refused.status_code, "/get_weight_version" in refused.json()["error"]["message"]) == (404, True)
    refused = server.http.post("/start_profile", json={"num_steps": 3})
    assert (refused.status_code, "trace=FILE" in refused.json()["error"]["message"]) == (404, True)
    headers = {"X-SMG-Routing-Key": "sample-1"}
    before = server.toka.gauge("toka_generation_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        bodies = [slime_body(sampling_seed=number, ignore_eos=True) for number in range(4)]
        asked = [pool.submit(server.http.post, "/generate", json=body, headers=headers) for body in bodies]
        wait_for(lambda: sum(load["num_running_reqs"] for load in loads(server)) == 4, 60)
        wait_for(lambda: server.toka.gauge("toka_generation_tokens_total") > before, 60)
        assert server.http.get("/flush_cache").status_code == 409
        while True:
            server.post("/abort_request", {"abort_all": True})
            if sum(load["num_total_reqs"] for load in loads(server)) == 0:
                break
        answers = [one.result().json() for one in asked]
    assert any(answer["output_ids"] for answer in answers), "some had tokens when they were aborted"
    server.post("/update_weights_from_disk", {"model_path": str(models[1]), "weight_version": "7"})
    assert server.http.get("/get_weight_version").json()["weight_version"] == "7"
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        tokens = [item[1] for item in meta["output_token_logprobs"]]
        assert tokens == answer["output_ids"]
        assert len(tokens) == meta["completion_tokens"] < 400
        assert meta["weight_version"] == "0"
        if number > 1:
            continue
        rest = body["sampling_params"] | {"max_new_tokens": 400 - len(tokens)}
        later = server.post("/generate", body | {"input_ids": PROMPT + tokens, "sampling_params": rest})
        assert later["meta_info"]["finish_reason"] == {"type": "length", "length": 400 - len(tokens)}
        assert later["meta_info"]["prompt_tokens"] == len(PROMPT) + len(tokens)
        assert later["meta_info"]["weight_version"] == "7"
    server.post("/update_weights_from_disk", {"model_path": str(models[0]), "weight_version": "0"})


def test_slime_offloads_and_loads_by_tags(server: RolloutServer) -> None:
    """SGLangEngine.release_memory_occupation, and resume_memory_occupation around an update."""
    expected = server.greedy_ids(PROMPT, 20)
    server.post("/release_memory_occupation", {})
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    server.post("/resume_memory_occupation", {"tags": ["cuda_graph"]})
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    server.post("/resume_memory_occupation", {"tags": ["weights"]})
    server.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert server.greedy_ids(PROMPT, 20) == expected
    server.post("/release_memory_occupation", {"tags": ["cuda_graph"]})
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}


def loads(server: RolloutServer) -> list[dict[str, int]]:
    return list(server.http.get("/v1/loads?include=core,disagg,queues").json()["loads"])


@few(1, "mode", [None, "abort", "retract"])
def test_areal_is_interrupted_by_an_update_from_disk(
    server: RolloutServer, models: list[Path], mode: str | None
) -> None:
    """RemoteInfEngine.agenerate: what was aborted is continued by a further request. Older versions send no body."""
    paused = threading.Event()
    versions: list[str] = []

    def generate() -> list[int]:
        tokens: list[int] = []
        reason = ""
        while reason not in ("stop", "tool_calls", "length"):
            while paused.is_set():
                time.sleep(0.01)
            sampling = {
                "top_p": 1.0,
                "top_k": 100_000_000,
                "max_new_tokens": 400 - len(tokens),
                "temperature": 0.0,
                "stop_token_ids": [],
                "ignore_eos": True,
                "skip_special_tokens": True,
                "frequency_penalty": 0.0,
            }
            body = {"input_ids": PROMPT + tokens, "image_data": [], "sampling_params": sampling}
            meta = server.post("/generate", body | {"return_logprob": True, "stream": False})["meta_info"]
            reason = meta["finish_reason"]["type"]
            tokens += [item[1] for item in meta["output_token_logprobs"]]
            versions.extend(span["version"] for span in meta["weight_versions"])
        return tokens

    old = server.greedy_ids(PROMPT, 400)
    with ThreadPoolExecutor(1) as pool:
        generated = pool.submit(generate)
        wait_for(lambda: loads(server)[0]["num_running_reqs"] == 1, 60)
        paused.set()
        if mode is None:
            server.post("/pause_generation")
        else:
            server.post("/pause_generation", {"mode": mode})
        update = {"model_path": str(models[1]), "abort_all_requests": mode != "retract", "weight_version": "1"}
        assert server.post("/update_weights_from_disk", update)["success"]
        server.post("/continue_generation", {} if mode else None)
        paused.clear()
        tokens = generated.result()
    assert len(tokens) == 400
    assert versions == ["0", "1"]
    num_old = next(index for index in range(400) if tokens[index] != old[index])
    assert num_old > 0
    assert tokens[num_old:] == server.greedy_ids(PROMPT + tokens[:num_old], 400 - num_old)
    server.update(models[0], version="0")


def test_areal_scores_the_end_of_a_prompt(server: RolloutServer) -> None:
    """build_score_request and parse_score_response: compared with the log-probabilities of /v1/completions."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 2,
        "top_logprobs_num": 0,
        "stream": False,
    }
    fields = {"model": "default", "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 0}
    fields["return_tokens_as_token_ids"] = True
    choice = server.post("/v1/completions", fields)["choices"][0]
    expected = choice["logprobs"]["token_logprobs"]
    entries = server.post("/generate", body)["meta_info"]["input_token_logprobs"]
    assert [entry[0] for entry in entries] == expected[2:]
    assert [entry[1] for entry in entries] == PROMPT[2:]
    # as slime asks a teacher: of all tokens, and none sampled
    teacher = {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False}
    answer = server.post(
        "/generate", body | {"sampling_params": teacher, "logprob_start_len": 0, "top_logprobs_num": 2}
    )
    assert [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] == expected
    tops = answer["meta_info"]["input_top_logprobs"]
    assert tops[0] is None
    for top, likely in zip(tops[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert [entry[0] for entry in top] == sorted(likely.values(), reverse=True)[:2]
    assert (answer["text"], answer["output_ids"]) == ("", [])


def test_verl_aborts_one_request_by_its_id(server: RolloutServer) -> None:
    sampling = {"max_new_tokens": 450, "temperature": 0, "ignore_eos": True}
    bodies = [{"input_ids": [number, 2], "rid": f"rid-{number}", "sampling_params": sampling} for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(server.post, "/generate", body) for body in bodies]
        while loads(server)[0]["num_running_reqs"] < 3:
            if all(one.done() for one in asked):  # before they were seen
                asked = [pool.submit(server.post, "/generate", body) for body in bodies]
        server.post("/abort_request", {"rid": "rid-1", "abort_all": False})
        server.post("/abort_request", {"rid": "rid-9"})
        server.post("/abort_request", {"rid": ""})
        answers = [one.result() for one in asked]
    assert [answer["meta_info"]["id"] for answer in answers] == ["rid-0", "rid-1", "rid-2"]
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length", "abort", "length"]
    assert len(answers[1]["output_ids"]) < 450  # none, if its prompt was still being computed
    assert answers[1]["meta_info"]["finish_reason"]["message"]


def test_a_stream_has_all_tokens_so_far_and_ends_with_the_whole_answer(server: RolloutServer) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 60, "temperature": 0}, "return_logprob": True}
    whole = server.post("/generate", body)
    lines = server.http.post("/generate", json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for event in events:
        count = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:count]
        assert event["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
        assert whole["text"].startswith(event["text"])
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    for answer in (whole, events[-1]):
        for name in ("id", "cached_tokens"):
            del answer["meta_info"][name]
        del answer["usage"]
    assert events[-1] == whole


def test_texts_keep_what_ended_them_and_special_tokens_as_asked(server: RolloutServer) -> None:
    def ask(**sampling: Any) -> dict[str, Any]:
        params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, **sampling}
        return dict(server.post("/generate", {"input_ids": PROMPT, "sampling_params": params}))

    whole = ask()
    text, ids = whole["text"], whole["output_ids"]
    special = server.post("/detokenize", {"tokens": ids})["prompt"]
    assert ask(skip_special_tokens=False)["text"] == special
    stop_id = ids[10]
    count = ids.index(stop_id) + 1
    trimmed, kept = ask(stop_token_ids=[stop_id]), ask(stop_token_ids=[stop_id], no_stop_trim=True)
    assert trimmed["output_ids"] == kept["output_ids"] == ids[:count]
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    assert kept["text"] == server.post("/detokenize", {"tokens": ids[:count]})["prompt"] or stop_id > 255
    stop = next(char for char in text[8:] if char != "\ufffd")
    trimmed, kept = ask(stop=[stop]), ask(stop=[stop], no_stop_trim=True)
    assert trimmed["text"] == text[: text.index(stop)]
    assert kept["text"] == trimmed["text"] + stop
    assert kept["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ask(stop=[stop], skip_special_tokens=False)["text"].endswith(trimmed["text"][-1:])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/generate", {}, "input_ids"),
        ("/generate", {"text": "a", "input_ids": [1]}, "input_ids"),
        ("/generate", {"input_ids": [[1], [2]]}, "input_ids"),
        ("/generate", {"input_ids": [300]}, "input_ids"),
        ("/generate", {"text": ["a", "b"]}, "text"),
        ("/generate", {"text": "a" * 600}, "text"),
        ("/generate", {"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ("/generate", {"text": "a", "top_logprobs_num": 1}, "top_logprobs_num"),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 100}, "top_logprobs_num"),
        ("/generate", {"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 512}}, "sampling_params.max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ("/generate", {"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/abort_request", {"all": True}, "all"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "9" * 257}, "weight_version"),
        ("/update_weights_from_disk", {"model_path": "/nowhere", "load_format": "dummy"}, "load_format"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    server: RolloutServer, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = server.http.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param in error["message"]
    assert server.http.get("/is_paused").json() == {"is_paused": False}
