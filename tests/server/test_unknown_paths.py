"""Paths of other servers: a 404 says what to use in their place, and that is there."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.app import ROLLOUT_ROUTES
from tokasaurus.server.paths import OTHER_SERVERS, ROLLOUTS, TRAINERS, paths_of
from tokasaurus.server.served_model import ServedModel


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/engines/small/embeddings", "/v1/embeddings"),
        ("/v1/audio/speech", "text only"),
        ("/v1/audio/transcriptions", "text only"),
        ("/v1/images/generations", "text only"),
        ("/v1/moderations", "response_format"),
        ("/v1/fine_tuning/jobs", "trains no models"),
        ("/v1/uploads", "/v1/files"),
        ("/v1/threads/t/messages", CHAT),
        ("/v1/vector_stores", CHAT),
        ("/v1/edits", CHAT),
        ("/openai/deployments/gpt-4/chat/completions", CHAT),
        ("/v1/complete", COMPLETIONS),
        ("/v1beta/models/gemini-pro:generateContent", CHAT),
        ("/v2/chat", CHAT),
        ("/api/chat", CHAT),
        ("/api/generate", COMPLETIONS),
        ("/api/tags", "/v1/models"),
        ("/api/show", "/v1/models"),
        ("/api/ps", "/v1/models"),
        ("/api/embed", "/v1/embeddings"),
        ("/api/version", "/version"),
        ("/api/pull", "one model"),
        ("/v1/api/chat", CHAT),
        ("/api/v1/chat/completions", CHAT),
        ("/v1/fim/completions", COMPLETIONS),
        ("/infill", COMPLETIONS),
        ("/v2/embed", "/v1/rerank"),
        ("/completion", COMPLETIONS),
        ("/props", "/v1/models"),
        ("/slots/0", "/metrics"),
        ("/apply-template", "/tokenize"),
        ("/generate_stream", "stream=true"),
        ("/info", "/v1/models"),
        ("/invocations", CHAT),
        ("/generate", "rl=T"),
        ("/update_weights", "rl=T"),
        ("/model_info", "rl=T"),
        ("/collective_rpc", "rl=T"),
        ("/v1/load_lora_adapter", "rl=T"),
        ("/weights_checker", "rl=T"),
        ("/start_profile", "trace=FILE"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/modles", "did you mean /v1/models?"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_of_another_server_says_what_to_use(
    shared_server: LiveServer, method: str, path: str, expected: str
) -> None:
    answer = shared_server.http.request(method, path)
    error = assert_openai_error(answer.content)
    assert (answer.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    assert expected in error["message"]
    assert f"{method} {path}" in error["message"]


def test_a_path_that_a_routes_parameter_matches_is_told_too(shared_server: LiveServer) -> None:
    for path in ("/v1/responses/compact", "/responses/compact/"):
        answer = shared_server.http.post(path, json={"input": "hello"})
        error = assert_openai_error(answer.content)
        assert (answer.status_code, error["code"]) == (404, "unknown_url")
        assert "compacts no conversations" in error["message"]
    assert shared_server.http.put("/v1/responses/compact").status_code == 404
    assert shared_server.http.put("/v1/responses/resp_1").status_code == 405


def test_what_is_advised_is_there(shared_server: LiveServer) -> None:
    paths: dict[str, Any] = shared_server.http.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} | {"GET /docs"}
    named = [route for *_, advice in OTHER_SERVERS for route in re.findall(r"(?:GET|POST) /[\w/]*\w", advice)]
    assert len(named) >= len(OTHER_SERVERS) // 2
    assert set(named) <= routes


OF_TRAINERS = [
    *(
        "/weights_checker",
        "/weight_checker",
        "/init_weights_update_group",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
    ),
    *("/update_weights_from_ipc", "/pull_weights", "/open_session", "/abort_requests", "/weight_info"),
]


def test_the_flag_for_rollouts_is_advised_only_where_it_is_not_set(served_model: ServedModel) -> None:
    routes = paths_of([route for routes in ROLLOUT_ROUTES for route in routes.router.routes])
    for rl in (False, True):
        with live_server(replace(served_model, rl=rl), FakeEngine()) as server:
            served = server.http.get("/openapi.json").json()["paths"]
            for path in (*OF_TRAINERS, *([] if rl else routes)):
                answer = server.http.post(path, json={})
                message = answer.json()["error"]["message"]
                assert (answer.status_code, "rl=T" in message) == (404, not rl), (path, message)
                named = re.findall(r"(?:GET|POST) (/[\w/]*\w)", message.partition(": ")[2].partition(": ")[2])
                assert not rl or set(named) <= served.keys(), message
    assert all(re.fullmatch(ROLLOUTS, path.removeprefix("/")) for path in routes)
    assert not any(re.fullmatch(pattern, path.removeprefix("/")) for _, pattern, *_ in TRAINERS for path in routes)


def test_no_known_route_is_called_another_servers(shared_server: LiveServer) -> None:
    """With rl=T, the routes for roll-outs are served."""
    for path in shared_server.http.get("/openapi.json").json()["paths"]:
        assert not any(re.fullmatch(pattern, path.removeprefix("/")) for _, pattern, _ in OTHER_SERVERS), path


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nothing/at/all", "/" + "x" * 5000])
def test_other_unknown_paths_are_named_alone(shared_server: LiveServer, path: str) -> None:
    error = assert_openai_error(shared_server.http.get(path).content)
    assert error["message"].startswith("unknown route: GET /")
    assert len(error["message"]) < 200
