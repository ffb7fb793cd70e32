"""The prefix cache as a client sees it, and counters that are exact after each request."""

import random
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.helpers.demo_model_texts import TIE, read_questions
from tests.end_to_end.helpers.expected_texts import COUNTERS
from tests.end_to_end.helpers.toka_process import TokaProcess
from tests.helpers.examples import IS_NIGHTLY, few
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.text.tokenizer import Tokenizer

PAGE_SIZE = 16


@pytest.fixture
def toka(demo_model: TokaProcess) -> TokaProcess:
    return demo_model


def ask(toka: TokaProcess, route: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{toka.url}/v1/{route}", json={"model": "default", **fields}, timeout=240)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def common_prefix(first: list[int], second: list[int]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))


@few(2, "num_tokens", [16, 65, 17, 48])
def test_a_repeated_prompt_is_cached_in_whole_blocks_but_for_its_last_token(num_tokens: int, toka: TokaProcess) -> None:
    rng = random.Random(num_tokens)
    prompt = [rng.randrange(1000, 20000) for _ in range(num_tokens)]
    num_in_blocks = min(num_tokens // PAGE_SIZE * PAGE_SIZE, num_tokens - 1)
    bodies = [{}, {}, {"n": 3}, {"cache_salt": "a"}, {"cache_salt": "b", "n": 2}, {"cache_salt": "a"}, {}]
    cached = [num_cached(ask(toka, "completions", prompt=prompt, max_tokens=2, **fields)) for fields in bodies]
    assert cached == [0, num_in_blocks, num_in_blocks, 0, 0, num_in_blocks, num_in_blocks]


def test_prompts_share_their_common_blocks(toka: TokaProcess) -> None:
    rng = random.Random(1)
    earlier_prompts: list[list[int]] = []
    for _ in range(8):
        other = rng.choice(earlier_prompts) if earlier_prompts else []
        prompt = other[: rng.randint(0, len(other))] + [rng.randrange(20000, 40000) for _ in range(rng.randint(1, 40))]
        expected = (
            max((common_prefix(prompt, earlier) for earlier in earlier_prompts), default=0) // PAGE_SIZE * PAGE_SIZE
        )
        expected = min(expected, len(prompt) - 1)
        # One token is sampled and its KV is never computed: the cache has only whole blocks of prompts.
        assert num_cached(ask(toka, "completions", prompt=prompt, max_tokens=1)) == expected
        earlier_prompts.append(prompt)


def test_the_second_request_of_a_chat_finds_the_first_prompt_and_answer_cached(toka: TokaProcess) -> None:
    tokenizer = Tokenizer.load(resolve_checkpoint(None).tokenizer_directory)
    messages = [{"role": "user", "content": "Tell me a story about a lighthouse and two cats."}]
    first = ask(toka, "chat/completions", messages=messages, max_tokens=20, temperature=0)
    reply = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    second = ask(toka, "chat/completions", messages=messages, max_tokens=5, temperature=0)
    num_known = first["usage"]["total_tokens"]
    before = tokenizer.encode_chat(messages[:1]) + tokenizer.encode(reply, add_special_tokens=False)
    assert (first["choices"][0]["finish_reason"], len(before)) == ("length", num_known)
    assert common_prefix(before, tokenizer.encode_chat(messages)) == num_known
    # The KV of the last token of the answer is never computed.
    assert num_cached(second) == (num_known - 1) // PAGE_SIZE * PAGE_SIZE
    assert num_cached(second) > first["usage"]["prompt_tokens"]


def test_prompt_logprobs_match_transformers_for_split_and_cached_prompts(toka: TokaProcess) -> None:
    checkpoint = resolve_checkpoint(None)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    texts = read_questions(8 if IS_NIGHTLY else 4)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in (*texts[:2], " ".join(texts[2:]), "A")]
    prompts += [prompts[2][: 100 if IS_NIGHTLY else 50] + prompts[0], prompts[1][:48]]
    assert len(prompts[2]) > 64, "longer than one step"
    fields = {"prompt": prompts, "cache_salt": "scores", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    answers = [ask(toka, "completions", **fields, prompt_logprobs=3) for _ in range(2)]
    # With N blocks of prompt logprobs cached, the last of their tokens is recomputed: its logits score the next token.
    assert num_cached(answers[1]) == sum(max(0, len(prompt) // PAGE_SIZE * PAGE_SIZE - 1) for prompt in prompts)
    model = AutoModelForCausalLM.from_pretrained(with_safetensors(checkpoint.directory), dtype=torch.float32).eval()
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        for answer in answers:
            assert_choice_matches(answer["choices"][index], prompt, expected)


def assert_choice_matches(choice: dict[str, Any], prompt: list[int], expected: torch.Tensor) -> None:
    """For an echo with `logprobs` = 1 and `prompt_logprobs` = 3. expected: logprobs [prompt tokens, V]."""
    values, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    first, *entries = choice["prompt_logprobs"]
    assert values[0] is tops[0] is first is None
    own = [entry[str(token_id)] for entry, token_id in zip(entries, prompt[1:], strict=True)]
    assert values[1:-1] == [one["logprob"] for one in own]
    is_greedy = [value == max(top.values()) for value, top in zip(values[1:-1], tops[1:-1], strict=True)]
    assert is_greedy == [one["rank"] == 1 for one in own]
    assert values[-1] == pytest.approx(expected[-1].max().item(), abs=1e-4)
    exact = expected[range(len(prompt) - 1), prompt[1:]]
    assert values[1:-1] == pytest.approx(exact.tolist(), abs=1e-4)
    fewest, most = ((expected[:-1] > exact[:, None] + shift).sum(dim=1).tolist() for shift in (TIE, -TIE))
    assert all(low < one["rank"] <= high for low, one, high in zip(fewest, own, most, strict=True))
    for entry, row, best in zip(entries, expected, expected.topk(3).values.tolist(), strict=False):
        most_likely = sorted(entry, key=lambda token_id: entry[token_id]["rank"])[:3]
        found = [entry[token_id]["logprob"] for token_id in most_likely]
        assert found == pytest.approx(row[[int(token_id) for token_id in most_likely]].tolist(), abs=1e-4)
        assert found == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}, {"logprobs": 2, "prompt_logprobs": 1}])
def test_an_echo_with_max_tokens_0_generates_no_token(toka: TokaProcess, fields: dict[str, Any]) -> None:
    num_generated = toka.gauge("toka_generation_tokens_total")
    answer = ask(toka, "completions", prompt=["One, two,", "€"], n=2, max_tokens=0, echo=True, stop=",", **fields)
    assert [choice["text"] for choice in answer["choices"]] == ["One, two,"] * 2 + ["€"] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == toka.gauge("toka_generation_tokens_total") - num_generated == 0
    for choice in answer["choices"]:
        assert (choice["logprobs"] is None) == (fields == {})
        if choice["logprobs"] is not None:
            assert "".join(choice["logprobs"]["tokens"]) in (choice["text"], "\ufffd" * 3)
    assert toka.gauge("toka_kv_blocks_used") == 0


def test_a_streamed_echo_equals_the_unstreamed_one(toka: TokaProcess) -> None:
    body = {"model": "default", "prompt": ["Once upon a time", "A " * 100], "n": 2, "seed": 5, "max_tokens": 6}
    body |= {"echo": True, "logprobs": 1}
    ask(toka, "completions", **body)  # then both find the same prompt logprobs cached
    unstreamed = ask(toka, "completions", **body)["choices"]
    client = openai.OpenAI(base_url=f"{toka.url}/v1", api_key="none", max_retries=0, timeout=240)
    joined: dict[int, tuple[str, list[str], list[float]]] = {}
    for chunk in client.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        text, tokens, values = joined.get(choice.index, ("", [], []))
        assert choice.logprobs is not None
        tokens = tokens + (choice.logprobs.tokens or [])
        joined[choice.index] = (text + choice.text, tokens, values + (choice.logprobs.token_logprobs or []))
    for choice in unstreamed:
        text, tokens, values = joined[choice["index"]]
        assert (text, tokens) == (choice["text"], choice["logprobs"]["tokens"])
        assert values[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_counters_are_exact_after_each_request(toka: TokaProcess) -> None:
    story = {"messages": [{"role": "user", "content": "Count to three."}], "max_tokens": 8}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "One, two,", "max_tokens": 7, "temperature": 0}),
        ("completions", {"prompt": ["One, two,", "A, B,"], "max_tokens": 6, "n": 3}),
        ("completions", {"prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 40, "stop": " 9"}),
        ("chat/completions", {**story, "temperature": 0}),
        ("chat/completions", {**story, "n": 4, "seed": 3}),
    ]
    totals = {name: toka.gauge(name) for name in COUNTERS}
    finish_reasons: set[str] = set()
    for route, fields in bodies:
        answer = ask(toka, route, **fields)
        finish_reasons |= {choice["finish_reason"] for choice in answer["choices"]}
        for name, count in COUNTERS.items():
            totals[name] += count(answer["usage"], fields.get("n", 1))
            assert toka.gauge(name) == totals[name], (name, fields)
        for name in ("toka_kv_blocks_used", "toka_requests_running", "toka_requests_waiting"):
            assert toka.gauge(name) == 0, (name, fields)
    assert finish_reasons == {"stop", "length"}
