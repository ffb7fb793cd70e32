"""Which servers have the routes for roll-outs, and who may use them; tests/end_to_end/rollouts has what they do."""

from dataclasses import replace

import httpx
import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import live_server
from tokasaurus.server.served_model import ServedModel

ROUTES = {
    ("POST", "/abort_request"),
    ("POST", "/collective_rpc"),
    ("POST", "/continue_generation"),
    ("POST", "/finish_session"),
    ("POST", "/finish_weight_update"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/generate"),
    ("GET", "/get_model_info"),
    ("GET", "/get_server_info"),
    ("GET", "/get_weight_version"),
    ("GET", "/get_world_size"),
    ("GET", "/health_generate"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/init_weight_transfer_engine"),
    ("GET", "/is_paused"),
    ("GET", "/model_info"),
    ("POST", "/pause"),
    ("POST", "/pause_generation"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/resume"),
    ("POST", "/resume_memory_occupation"),
    ("GET", "/server_info"),
    ("POST", "/sleep"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/update_weights_from_disk"),
    ("GET", "/v1/loads"),
    ("POST", "/wake_up"),
    *(("POST", path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
    *(("POST", f"/{name}") for name in ("load_lora_adapter", "unload_lora_adapter", "load_lora_adapter_from_tensors")),
}


def test_the_routes_are_there_with_rl_alone_and_need_the_key(served_model: ServedModel) -> None:
    paths = {}
    for rl in (False, True):
        with live_server(replace(served_model, rl=rl), FakeEngine(), api_key="key") as server:
            page = server.http.get("/openapi.json").json()["paths"]
            paths[rl] = {(method.upper(), path) for path, methods in page.items() for method in methods}
            for method, path in ROUTES:
                assert httpx.request(method, server.url + path).status_code == 401
                if not rl:
                    assert server.http.request(method, path).status_code == 404
    assert paths[True] - paths[False] == ROUTES


@pytest.mark.parametrize("path", ["/pause", "/generate", "/update_weights"])
def test_they_are_refused_until_the_engine_is_up(served_model: ServedModel, path: str) -> None:
    bodies = {"/generate": {"text": "a"}, "/update_weights": {"weight_dir": "a"}}
    with live_server(replace(served_model, rl=True), FakeEngine(), start_engine=False) as server:
        answer = server.http.post(path, json=bodies.get(path))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"method": "report_device_id"}, "method", "start_weight_update"),
        ({"method": 5}, "method", "must be a string"),
        ({"method": None}, "method", "must be a string"),
        ({"method": "update_weights_nccl"}, "kwargs.update_info", "is required for update_weights_nccl"),
        ({"method": "update_weights_ipc", "kwargs": {"update_info": {"names": ["a"]}}}, "", "NCCL"),
        (
            {"method": "skyrl_finish_weight_update", "kwargs": {"update_info": {"weight_dir": "/a"}}},
            "kwargs.update_info",
            "does not go with skyrl_finish_weight_update",
        ),
        ({"method": "update_weights", "args": ["/a"]}, "args", "not implemented"),
        ({}, "method", "required"),
    ],
)
def test_calls_of_other_workers_are_refused_by_name(
    served_model: ServedModel, body: dict[str, object], param: str, words: str
) -> None:
    with live_server(replace(served_model, rl=True), FakeEngine()) as server:
        answer = server.http.post("/collective_rpc", json=body)
        error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in error["message"]
    assert param in (error["param"], "")


@pytest.mark.parametrize("query", ["reset_external=true", "reset_running_requests=maybe"])
def test_what_a_reset_cannot_do_is_refused_in_the_query_too(served_model: ServedModel, query: str) -> None:
    with live_server(replace(served_model, rl=True), FakeEngine()) as server:
        answer = server.http.post(f"/reset_prefix_cache?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize("header", ["X-Session-ID", "X-SMG-Routing-Key"])
@pytest.mark.parametrize("rl", [False, True])
def test_requests_carry_the_session_that_their_header_names(served_model: ServedModel, header: str, rl: bool) -> None:
    fields = {"model": "default", "max_tokens": 1}
    bodies = {
        "/v1/completions": fields | {"prompt": [5]},
        "/v1/chat/completions": fields | {"messages": [{"role": "user", "content": "a"}]},
    }
    if rl:
        bodies["/inference/v1/generate"] = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
        bodies["/generate"] = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    with live_server(replace(served_model, rl=rl), FakeEngine()) as server:
        for path, body in bodies.items():
            assert server.http.post(path, json=body, headers={header: f"of {path}"}).status_code == 200
        sessions = [request.session for request in server.engine.requests]
    assert sessions == [f"of {path}" if rl else "" for path in bodies]
