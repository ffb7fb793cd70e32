"""Fields of bodies for roll-outs that are not implemented: neutral values are accepted, others are refused by name."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fields_page import ROLLOUTS, rollout_fields
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel

MINIMAL: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [1]},
    "/generate": {"text": "a"},
}
FIELDS = [
    (route, name, limit.neutral)
    for route, body in ROLLOUTS.items()
    for name, limit in rollout_fields(body).items()
    if limit is not None
]


@pytest.fixture(scope="module")
def server(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(dataclasses.replace(served_model, rl=True), FakeEngine()) as server:
        yield server


def with_field(route: str, name: str, value: object) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens" if "token_ids" in MINIMAL[route] else "max_new_tokens": 2}
    outer, _, inner = name.rpartition(".")
    body = MINIMAL[route] | {"sampling_params": sampling}
    (body[outer] if outer else body)[inner] = value
    return body


@pytest.mark.parametrize(("route", "name", "neutral"), FIELDS)
def test_neutral_values_are_accepted_and_others_refused_by_name(
    server: LiveServer, route: str, name: str, neutral: tuple[object, ...]
) -> None:
    for value in neutral:
        assert server.http.post(route, json=with_field(route, name, value)).status_code == 200
    answer = server.http.post(route, json=with_field(route, name, "no value of any field"))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not implemented beyond ")


def test_a_neutral_number_may_have_a_point_and_is_not_a_boolean(server: LiveServer) -> None:
    name = "sampling_params.n"
    assert server.http.post("/generate", json=with_field("/generate", name, 1.0)).status_code == 200
    assert server.http.post("/generate", json=with_field("/generate", name, True)).status_code == 400


def test_there_are_such_fields_at_both_routes_and_in_their_sampling_parameters() -> None:
    for route in ROLLOUTS:
        assert len([name for owner, name, _ in FIELDS if owner == route]) > 10
        assert any(name.startswith("sampling_params.") for owner, name, _ in FIELDS if owner == route)
