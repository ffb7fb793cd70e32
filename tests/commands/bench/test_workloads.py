import json
import math
import re
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tokasaurus.commands.bench import workloads

SHAREGPT = {"mean_tokens": 220, "sigma": 1.0, "cap": 1024, "temperature": 0.5, "ignore_eos": True}
ONE_TOKEN_A_WORD = workloads.cut_by_words(1.0)


@pytest.mark.parametrize(
    ("mean", "sigma", "cap"), [(220, 1.0, 1024), (220, 0.4, 1024), (50, 1.5, 100), (900, 1.0, 1024)]
)
def test_lengths_have_the_requested_mean_and_cap(mean: float, sigma: float, cap: int) -> None:
    lengths = workloads.lognormal_lengths(2000, mean, sigma, cap, seed=0)
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.01)
    assert min(lengths) >= 1
    assert max(lengths) <= cap


def test_lengths_below_the_cap_are_lognormal() -> None:
    logs = sorted(math.log(length) for length in workloads.lognormal_lengths(4000, 220, 1.0, 1024, seed=0))
    quartiles = np.quantile(logs, [0.1, 0.25, 0.5, 0.75, 0.9])
    np.testing.assert_allclose(np.diff(quartiles), np.diff([-1.2816, -0.6745, 0, 0.6745, 1.2816]), atol=0.02)


def test_capped_mean_equals_the_mean_of_many_draws() -> None:
    draws = np.minimum(np.random.default_rng(0).lognormal(5.0, 1.2, 400_000), 700)
    assert workloads.capped_lognormal_mean(5.0, 1.2, 700) == pytest.approx(draws.mean(), rel=0.005)


def test_every_seed_offers_the_same_amount_of_work_in_another_order() -> None:
    one, other = (workloads.lognormal_lengths(200, 220, 1.0, 1024, seed) for seed in (0, 1))
    assert one != other
    assert sorted(one) == sorted(other)
    assert one == workloads.lognormal_lengths(200, 220, 1.0, 1024, seed=0)


def test_impossible_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="below the cap"):
        workloads.lognormal_lengths(10, 100, 1.0, 100, seed=0)


def test_sharegpt_prompts_have_their_lengths_and_distinct_beginnings() -> None:
    requests = workloads.sharegpt(200, **SHAREGPT, cut=ONE_TOKEN_A_WORD, seed=0)
    prompts = [str(request.content["prompt"]).split() for request in requests]
    expected = workloads.lognormal_lengths(200, 220, 1.0, 1024, seed=0)
    assert sorted(len(prompt) for prompt in prompts) == sorted(expected)
    assert sorted(request.max_tokens for request in requests) == sorted(expected)
    assert [len(prompt) for prompt in prompts] != [request.max_tokens for request in requests]
    beginnings = [tuple(prompt[:4]) for prompt in prompts]
    assert len(set(beginnings)) == len(beginnings)
    again = workloads.sharegpt(200, **SHAREGPT, cut=ONE_TOKEN_A_WORD, seed=1)
    assert not set(beginnings) & {tuple(str(request.content["prompt"]).split()[:4]) for request in again}


def test_tokenizer_cuts_prompts_to_their_number_of_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # each character is a token
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        cut = workloads.cut_by_tokenizer(path)
        assert cut("How many eggs?", 5) == "How m"
        assert cut("eggs", 100) == "eggs"
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        workloads.cut_by_tokenizer(tmp_path / "broken.json")


def test_words_are_cut_by_the_stated_ratio() -> None:
    assert workloads.cut_by_words(2.0)("a b c d e f", 6) == "a b c"
    assert workloads.cut_by_words(2.0)("a b c", 1) == "a"


def test_monkeys_ask_distinct_test_questions_behind_one_prefix() -> None:
    requests = workloads.monkeys(16, 32, 128, 0.6, ignore_eos=True, separate_samples=False, seed=0)
    prompts = [str(request.content["prompt"]) for request in requests]
    prefix = workloads.few_shot_prefix(seed=0)
    known = {line["question"] for line in workloads.load_jsonl(workloads.DATA / "gsm8k_test_200.jsonl")}
    questions = [prompt.removeprefix(prefix + "Question: ").removesuffix("\nAnswer:") for prompt in prompts]
    assert len(set(questions)) == 16
    assert set(questions) <= known
    assert {(request.num_samples, request.max_tokens) for request in requests} == {(32, 128)}


def test_prefix_has_eight_solved_questions_and_about_a_thousand_tokens() -> None:
    prefix = workloads.few_shot_prefix(seed=0)
    assert prefix.count("Question: ") == prefix.count("\nAnswer: ") == prefix.count("\n#### ") == 8
    assert "<<" not in prefix
    # Most tokenizers make about one token per word, digit, punctuation mark and line break.
    assert 900 < len(re.findall(r"[^\W\d]+|\d|[^\w\s]|\n+", prefix)) < 1100


def test_another_seed_keeps_the_prefix_length_and_changes_its_order() -> None:
    one, other = workloads.few_shot_prefix(0), workloads.few_shot_prefix(1)
    assert one != other
    assert sorted(one.split("\n\n")) == sorted(other.split("\n\n"))


def test_separate_samples_are_the_same_prompts_once_per_sample() -> None:
    together = workloads.monkeys(3, 4, 10, 0.6, ignore_eos=True, separate_samples=False, seed=5)
    separate = workloads.monkeys(3, 4, 10, 0.6, ignore_eos=True, separate_samples=True, seed=5)
    assert [r.content for r in separate] == [r.content for r in together for _ in range(4)]
    assert {request.num_samples for request in separate} == {1}


def test_more_questions_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="200 questions"):
        workloads.monkeys(201, 1, 1, 0.0, ignore_eos=True, separate_samples=False, seed=0)


def test_file_lines_become_requests_with_stated_defaults(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": "one", "max_tokens": 7},
        {"prompt": [1, 2], "max_tokens": 1, "n": 3, "temperature": 0, "ignore_eos": False},
        {"messages": messages, "max_tokens": 2},
    ]
    file = tmp_path / "load.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert workloads.read_file(file, temperature=0.5, ignore_eos=True) == [
        workloads.OfferedRequest({"prompt": "one"}, 1, 7, 0.5, True),
        workloads.OfferedRequest({"prompt": [1, 2]}, 3, 1, 0, False),
        workloads.OfferedRequest({"messages": messages}, 1, 2, 0.5, True),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "not a JSON object"),
        ("{", "2:"),
        ('{"max_tokens": 1}', "exactly one of prompt and messages"),
        ('{"prompt": ["a"], "max_tokens": 1}', "one text or one list of token ids"),
        ('{"prompt": "a"}', "max_tokens must be an integer"),
        ('{"prompt": "a", "max_tokens": 1, "n": true}', "n must be an integer"),
        ('{"prompt": "a", "max_tokens": 1, "temperature": -1}', "temperature must be a number"),
        ('{"prompt": "a", "max_tokens": 1, "ignore_eos": 1}', "ignore_eos must be true or false"),
        ('{"prompt": "a", "max_tokens": 1, "top_k": 5}', "unknown field 'top_k'"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": 1}', "on every line or on none"),
    ],
)
def test_wrong_file_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(f'{{"prompt": "a", "max_tokens": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=reason) as raised:
        workloads.read_file(file, temperature=0.5, ignore_eos=True)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_arrivals_have_the_rate_and_the_spread_of_their_distribution(burstiness: float, deviation: float) -> None:
    request = workloads.OfferedRequest({"prompt": "a"}, 1, 1, 0.0, True)
    requests = workloads.with_arrivals([request] * 20_000, per_second=20, burstiness=burstiness, seed=0)
    gaps = np.diff([0.0, *(request.arrival_s for request in requests)])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20)
    # of a gamma distribution: the deviation is the mean divided by the root of the shape
    assert gaps.std() == pytest.approx(deviation / 20, rel=0.05, abs=1e-9)


def test_gaps_that_are_all_too_small_for_a_float_are_even() -> None:
    request = workloads.OfferedRequest({"prompt": "a"}, 1, 1, 0.0, True)
    for seed in range(100):
        [only] = workloads.with_arrivals([request], per_second=4, burstiness=1e-3, seed=seed)
        assert only.arrival_s == pytest.approx(0.25)


def test_a_context_is_asked_with_each_of_four_options() -> None:
    requests = workloads.multiple_choice(5, 60, ONE_TOKEN_A_WORD, seed=3)
    prompts = [str(request.content["prompt"]) for request in requests]
    assert len(set(prompts)) == 20
    assert [len(prompt) for prompt in prompts] == sorted(map(len, prompts), reverse=True)
    contexts = Counter(prompt.rpartition(" ")[0] for prompt in prompts)
    assert set(contexts.values()) == {4}
    assert {request.max_tokens for request in requests} == {1}
    assert requests[0].fields == {"echo": True, "logprobs": 1}
    lines = workloads.load_jsonl(workloads.DATA / "gsm8k_test_200.jsonl")
    for context in contexts:
        question = context.rpartition("Question: ")[2].removesuffix("\nAnswer: The answer is")
        right = next(line["answer"].split("#### ")[1] for line in lines if line["question"] == question)
        assert f"{context} {right}" in prompts
        assert len(context.rpartition("\n\nQuestion: ")[0].split()) == 60


def test_chats_of_a_group_share_their_system_message_and_turns_follow_each_other() -> None:
    requests = workloads.prefix_chat(2, 3, 2, 50, 16, 0.5, True, ONE_TOKEN_A_WORD, seed=1)
    first, second = requests[:6], requests[6:]
    assert [request.after for request in first] == [None] * 6
    assert [request.after for request in second] == list(range(6))
    systems = [request.messages()[0]["content"] for request in first]
    assert systems[0] == systems[2] == systems[4] != systems[1] == systems[3] == systems[5]
    assert {len(system.split()) for system in systems} == {50}
    assert {len(request.messages()) for request in second} == {1}
    other = workloads.prefix_chat(2, 3, 2, 50, 16, 0.5, True, ONE_TOKEN_A_WORD, seed=2)
    assert not {request.messages()[0]["content"] for request in other[:6]} & set(systems)
