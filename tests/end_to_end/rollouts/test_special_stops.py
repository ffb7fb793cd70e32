"""Stop strings with the text of special tokens, against the same tokens without a stop string."""

import itertools
import json
from typing import Any

from tests.end_to_end.helpers.rollouts import RolloutServer
from tests.helpers.examples import few
from tests.helpers.tiny_model import EOS_ID

A, B, START = 64, 65, EOS_ID + 1  # "a", "b", "<|start|>"
TEXTS = {A: "a", B: "b", EOS_ID: "<|eos|>", START: "<|start|>"}
BODY = {
    "model": "default",
    "max_tokens": 60,
    "allowed_token_ids": [*TEXTS],
    "ignore_eos": True,
    "return_token_ids": True,
}
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


def complete(server: RolloutServer, route: str, **fields: Any) -> tuple[str, list[int], str]:
    """(text, ids of its tokens, finish reason), which are the same whole and streamed."""
    body = BODY | PROMPTS[route] | fields
    (choice,) = server.post(route, body)["choices"]
    whole = choice.get("text", choice.get("message", {}).get("content")), choice["token_ids"], choice["finish_reason"]
    text, ids, reason = "", list[int](), None
    for line in server.http.post(route, json=body | {"stream": True}).text.splitlines():
        if line.startswith("data: {"):
            (chunk,) = json.loads(line.removeprefix("data: "))["choices"]
            text += chunk.get("text", chunk.get("delta", {}).get("content")) or ""
            ids += chunk.get("token_ids") or []
            reason = chunk["finish_reason"] or reason
    assert (text, ids, reason) == whole
    return whole


CASES = [*itertools.product(PROMPTS, (False, True), (False, True))]
CASES.sort(key=lambda case: (case[0] == "/v1/completions") ^ case[1] ^ case[2])
"""The first half has every pair of values."""


@few(4, ("route", "keeps_stop", "shows_special"), CASES)
def test_generation_ends_at_the_token_that_completes_the_stop(
    server: RolloutServer, route: str, keeps_stop: bool, shows_special: bool
) -> None:
    num_stopped = 0
    for seed in range(2):
        whole, all_ids, _ = complete(server, route, seed=seed, skip_special_tokens=not shows_special)
        for stop in (["<|start|>"], ["ba<|start|>", "x"], ["<|eos|><|start|>"], ["<|start|>ab", "<|eos|>b<|start|>"]):
            fields = {"include_stop_str_in_output": keeps_stop, "skip_special_tokens": not shows_special}
            text, ids, reason = complete(server, route, seed=seed, stop=stop, **fields)
            shown = [TEXTS[id_] for id_ in all_ids]
            if not shows_special:  # tokens that no stop string names do not part others
                shown = [text if len(text) == 1 or any(text in each for each in stop) else "" for text in shown]
            ends = [end for end in range(1, len(shown) + 1) if any(each in "".join(shown[:end]) for each in stop)]
            if not ends:
                assert (text, ids, reason) == (whole, all_ids, "length")
                continue
            kept = "".join(shown[: ends[0]])
            kept = kept if keeps_stop else kept[: max(kept.rfind(each) for each in stop)]
            for special in ("<|eos|>", "<|start|>"):
                kept = kept if shows_special else kept.replace(special, "")
            assert (text, ids, reason) == (kept, all_ids[: ends[0]], "stop")
            num_stopped += 1
    assert num_stopped > 2


def test_every_dialect_stops_and_names_the_stop_string(server: RolloutServer) -> None:
    only = {"allowed_token_ids": [START], "seed": 1}
    message = {"max_tokens": 20, "messages": [{"role": "user", "content": "a"}], "stop_sequences": ["<|start|>"]}
    answer = server.post("/v1/messages", {"model": "default", **message, **only})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<|start|>")
    assert answer["usage"]["output_tokens"] == 1
    sampling = {"max_new_tokens": 20, "stop": ["<|start|>"], "ignore_eos": True, "logit_bias": {str(START): 100}}
    answer = server.post("/generate", {"text": "a", "sampling_params": sampling})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<|start|>"}
    sampling = {"max_tokens": 20, "stop": ["<|start|>"], "ignore_eos": True, "logit_bias": {str(START): 100}}
    (choice,) = server.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling})["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([START], "stop")
