"""The last events of a stream whose replica has died, against those of a server whose engine dies."""

import random

import orjson
import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.finished_sequences import finished, interleaved, make_request
from tokasaurus.ray.broken_streams import StreamWatch
from tokasaurus.server.dialects.responses import ResponsesRequest, repeated_fields
from tokasaurus.server.endpoints import ENDPOINTS
from tokasaurus.server.errors import EngineDied
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.served_model import ServedModel

ERROR = EngineDied("the replica died while it answered")
TEXT = list(b"a text of some tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_served_model(save_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def prepared_for(path: str, model: ServedModel) -> Prepared:
    repeated = {}
    if path == "/v1/responses":
        repeated = repeated_fields(ResponsesRequest.model_validate({"model": "default", "input": "?"}), model)
    return Prepared("id_1", [make_request()], repeated=repeated)


def datas(events: bytes) -> list[dict[str, object]]:
    assert events.endswith(b"\n\n")
    lines = [line for line in events.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_broken_stream_ends_as_that_of_a_server_whose_engine_dies(model: ServedModel, path: str) -> None:
    stream = ENDPOINTS[path].stream(prepared_for(path, model), model, StreamOptions())
    groups = interleaved([[finished(TEXT, "length")]], random.Random(1))
    assert len(groups) > 2
    watch = StreamWatch(path)
    for group in groups[:-1]:
        watch.note(stream.events(group))
    ours, servers = watch.failure(ERROR), stream.failure(ERROR)
    if path != "/v1/responses":
        assert ours == servers
        return
    (our_error, our_end), (error, end) = datas(ours), datas(servers)
    assert our_error == error
    assert ours.startswith(b"event: error\n")
    # What was generated is in the events before; the ingress keeps none of it.
    end["response"]["output"] = []  # type: ignore[index]
    assert our_end == end


def test_a_stream_of_responses_without_a_first_event_ends_in_an_error_alone() -> None:
    (error,) = datas(StreamWatch("/v1/responses").failure(ERROR))
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "engine_died", 0)
