"""The requests of each workload, made before timing starts."""

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from tokasaurus.text.exact_json import loads

DATA = Path(__file__).with_name("data")
"""Extracts of GSM8K (arXiv 2110.14168), under the licence beside them."""

_SMALLEST = 1e-200

Cut = Callable[[str, int], str]
"""(text, num_tokens) -> the start of the text, about `num_tokens` tokens long, at least one word or token."""


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """One HTTP request to send."""

    content: dict[str, object]
    """{"prompt": text or token ids} for /completions, or {"messages": [...]} for /chat/completions."""
    num_samples: int
    """Number of choices: `n` in the request."""
    max_tokens: int
    """Limit for each choice."""
    temperature: float
    ignore_eos: bool
    arrival_s: float | None = None
    """Seconds from the start of the run until it is due; None: as soon as the concurrency allows."""
    after: int | None = None
    """Position of the request before it in the same chat: sent when that one is answered, and its messages follow that
    one's messages and answer."""
    fields: dict[str, object] = field(default_factory=dict)
    """Further fields of the body."""

    def messages(self) -> list[dict[str, str]]:
        """Messages of a chat request."""
        messages: Any = self.content["messages"]
        return list(messages)

    def following(self, messages: list[dict[str, str]]) -> "OfferedRequest":
        """The same request after `messages`."""
        return dataclasses.replace(self, content={"messages": [*messages, *self.messages()]}, after=None)


def load_jsonl(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def few_shot_prefix(seed: int) -> str:
    """Eight solved questions in an order that `seed` decides: 998 tokens with SmolLM2's tokenizer.

    The questions are the same for every seed, so that runs with different seeds have equally long prompts; their order
    differs, so that no run finds another's cached prefix."""
    shots = load_jsonl(DATA / "gsm8k_train_8_shots.jsonl")
    random.Random(seed).shuffle(shots)
    # Remove GSM8K's calculator annotations, as in "48/2 = <<48/2=24>>24".
    answers = [re.sub(r"<<.*?>>", "", shot["answer"]) for shot in shots]
    pairs = zip(shots, answers, strict=True)
    return "".join(f"Question: {shot['question']}\nAnswer: {answer}\n\n" for shot, answer in pairs)


def monkeys(
    num_questions: int,
    num_samples: int,
    max_tokens: int,
    temperature: float,
    ignore_eos: bool,
    separate_samples: bool,
    seed: int,
) -> list[OfferedRequest]:
    """Repeated sampling: `num_samples` answers to each of `num_questions` questions after one few-shot prefix.

    separate_samples: send one request per sample instead of one request with `n` samples.
    Raises ValueError if there are fewer questions. Source: Large Language Monkeys, arXiv 2407.21787."""
    questions = [line["question"] for line in load_jsonl(DATA / "gsm8k_test_200.jsonl")]
    if num_questions > len(questions):
        raise ValueError(f"there are {len(questions)} questions, not {num_questions}")
    prefix = few_shot_prefix(seed)
    copies, samples_each = (num_samples, 1) if separate_samples else (1, num_samples)
    return [
        OfferedRequest(
            {"prompt": f"{prefix}Question: {question}\nAnswer:"}, samples_each, max_tokens, temperature, ignore_eos
        )
        for question in random.Random(seed).sample(questions, num_questions)
        for _ in range(copies)
    ]


def capped_lognormal_mean(mu: float, sigma: float, cap: float) -> float:
    """Mean of min(X, cap), where log X is normal with mean `mu` and standard deviation `sigma`."""
    normal = NormalDist()
    z_cap = (math.log(cap) - mu) / sigma
    below = math.exp(mu + sigma**2 / 2) * normal.cdf(z_cap - sigma)
    return below + cap * (1 - normal.cdf(z_cap))


def lognormal_lengths(count: int, mean: float, sigma: float, cap: int, seed: int) -> list[int]:
    """`count` lengths between 1 and `cap` from a lognormal distribution whose mean after capping is `mean`.

    The lengths are its quantiles at (i + 1/2) / count, shuffled by `seed`. Every seed thus gives the same amount of
    work, so that runs with different seeds are comparable. Raises ValueError unless 1 <= mean < cap."""
    if not 1 <= mean < cap:
        raise ValueError(f"the mean length {mean} must be at least 1 and below the cap {cap}")
    low, high = math.log(mean) - 10 * sigma, math.log(cap) + 10 * sigma
    for _ in range(100):
        mu = (low + high) / 2
        low, high = (mu, high) if capped_lognormal_mean(mu, sigma, cap) < mean else (low, mu)
    distribution = NormalDist(low, sigma)
    quantiles = [math.exp(distribution.inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths = [max(1, min(cap, round(quantile))) for quantile in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths


def cut_by_words(tokens_per_word: float) -> Cut:
    """Cut by a fixed number of tokens per word: right only on average."""
    return lambda text, num_tokens: " ".join(text.split()[: max(1, round(num_tokens / tokens_per_word))])


def cut_by_tokenizer(path: Path) -> Cut:
    """Cut with the served model's tokenizer. path: a tokenizer.json, or a directory that contains one.

    The text that remains may encode to a token more or less than asked. Raises ValueError."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"cannot read a tokenizer from {file}: {error}") from None

    def cut(text: str, num_tokens: int) -> str:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[min(num_tokens, len(offsets)) - 1][1]]

    return cut


def sharegpt(
    num_requests: int,
    mean_tokens: float,
    sigma: float,
    cap: int,
    temperature: float,
    ignore_eos: bool,
    cut: Cut,
    seed: int,
) -> list[OfferedRequest]:
    """Unrelated requests with prompt and output lengths as varied as in chat logs, independent of each other.

    Each prompt begins with different random words, so that no request finds a cached prefix."""
    questions = [line["question"] for line in load_jsonl(DATA / "gsm8k_test_200.jsonl")]
    words = " ".join(questions).split()
    rng = random.Random(seed)
    prompt_lengths = lognormal_lengths(num_requests, mean_tokens, sigma, cap, rng.randrange(2**32))
    output_lengths = lognormal_lengths(num_requests, mean_tokens, sigma, cap, rng.randrange(2**32))
    requests = []
    for num_prompt_tokens, num_output_tokens in zip(prompt_lengths, output_lengths, strict=True):
        parts = [" ".join(rng.choices(words, k=8))]
        num_words = 8
        while (
            num_words < num_prompt_tokens
        ):  # a word is at least one token, so the text is long enough for any tokenizer
            parts.append(rng.choice(questions))
            num_words += len(parts[-1].split())
        prompt = cut(" ".join(parts), num_prompt_tokens)
        requests.append(OfferedRequest({"prompt": prompt}, 1, num_output_tokens, temperature, ignore_eos))
    return requests


NUM_OPTIONS = 4


def multiple_choice(num_contexts: int, context_tokens: int, cut: Cut, seed: int) -> list[OfferedRequest]:
    """Each of `num_contexts` solved examples and one question, with each of four answers: only its log-probabilities
    are wanted, as lm-eval asks for them. The longest requests come first.

    context_tokens: length of a context, about."""
    lines = load_jsonl(DATA / "gsm8k_test_200.jsonl")
    numbers = [line["answer"].split("#### ")[1] for line in lines]
    chance = random.Random(seed)
    prompts = []
    for index in range(num_contexts):
        question = f"Question: {lines[index % len(lines)]['question']}\nAnswer: The answer is"
        others = chance.sample([other for other in range(len(lines)) if other != index % len(lines)], len(lines) - 1)
        solved = itertools.cycle(
            f"Question: {lines[other]['question']}\nAnswer: The answer is {numbers[other]}\n\n" for other in others
        )
        text = ""
        while len(text) < 8 * context_tokens:  # a token has fewer than 8 characters
            text += next(solved)
        context = f"{cut(text, context_tokens)}\n\n{question}"
        right = numbers[index % len(lines)]
        wrong = chance.sample(sorted(set(numbers) - {right}), NUM_OPTIONS - 1)
        prompts += [f"{context} {option}" for option in (right, *wrong)]
    scored: dict[str, object] = {"echo": True, "logprobs": 1}
    return [
        OfferedRequest({"prompt": prompt}, 1, 1, 0.0, ignore_eos=False, fields=scored)
        for prompt in sorted(prompts, key=lambda prompt: (-len(prompt), prompt))
    ]


def prefix_chat(
    num_groups: int,
    chats_per_group: int,
    num_turns: int,
    system_tokens: int,
    max_tokens: int,
    temperature: float,
    ignore_eos: bool,
    cut: Cut,
    seed: int,
) -> list[OfferedRequest]:
    """Conversations: all of a group have the same long system message, and each turn has the turns before it with the
    answers that the server gave.

    system_tokens: of the system message, about. The first turns come first, then the second ones; groups take turns."""
    lines = load_jsonl(DATA / "gsm8k_test_200.jsonl")
    rng = random.Random(seed)
    systems = []
    for number in range(num_groups):
        solved = itertools.cycle(rng.sample(lines, len(lines)))
        text = f"You are tutor number {number} of class {seed}."
        while len(text) < 8 * system_tokens:  # a token has fewer than 8 characters
            line = next(solved)
            text += f"\nQuestion: {line['question']}\nAnswer: {line['answer']}"
        systems.append(cut(text, system_tokens))
    requests: list[OfferedRequest] = []
    num_chats = num_groups * chats_per_group
    for turn in range(num_turns):
        for chat in range(num_chats):
            messages = [{"role": "user", "content": rng.choice(lines)["question"]}]
            if turn == 0:
                messages.insert(0, {"role": "system", "content": systems[chat % num_groups]})
            after = None if turn == 0 else (turn - 1) * num_chats + chat
            content: dict[str, object] = {"messages": messages}
            requests.append(OfferedRequest(content, 1, max_tokens, temperature, ignore_eos, after=after))
    return requests


def read_file(path: Path, temperature: float, ignore_eos: bool) -> list[OfferedRequest]:
    """Requests from JSONL: {"prompt" or "messages", "max_tokens", and optionally "n", "temperature", "ignore_eos",
    "arrival_s"}.

    temperature, ignore_eos: defaults for lines without these fields. Raises ValueError with file and line number."""
    requests = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    requests.append(_parse_line(line, temperature, ignore_eos))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
    if not requests:
        raise ValueError(f"{path} has no requests")
    if len({request.arrival_s is None for request in requests}) > 1:
        raise ValueError(f"{path}: arrival_s must be on every line or on none")
    return requests


def _parse_line(line: str, temperature: float, ignore_eos: bool) -> OfferedRequest:
    fields = loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    content = {key: fields.pop(key) for key in ("prompt", "messages") if key in fields}
    if len(content) != 1:
        raise ValueError("exactly one of prompt and messages is required")
    prompt = content.get("prompt", "")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        raise ValueError("prompt must be one text or one list of token ids")
    counts = {"max_tokens": fields.pop("max_tokens", None), "n": fields.pop("n", 1)}
    for key, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} must be an integer of at least 1")
    numbers = {"temperature": fields.pop("temperature", temperature), "arrival_s": fields.pop("arrival_s", None)}
    for key, value in numbers.items():
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise ValueError(f"{key} must be a number of at least 0")
    ignore_eos = fields.pop("ignore_eos", ignore_eos)
    if type(ignore_eos) is not bool:
        raise ValueError("ignore_eos must be true or false")
    if fields:
        raise ValueError(f"unknown field {next(iter(fields))!r}")
    return OfferedRequest(
        content, counts["n"], counts["max_tokens"], numbers["temperature"], ignore_eos, numbers["arrival_s"]
    )


def with_arrivals(
    requests: list[OfferedRequest], per_second: float, burstiness: float, seed: int
) -> list[OfferedRequest]:
    """The same requests in the same order, with arrival times.

    The times between two arrivals have a gamma distribution of shape `burstiness` and mean 1 / per_second: 1 is a
    Poisson process, less is more bursty, infinity is a fixed interval. Their sum is len(requests) / per_second, so that
    every seed offers the same rate. These are the arrivals of `vllm bench serve`."""
    rng = random.Random(seed)
    is_regular = math.isinf(burstiness)
    gaps = [1.0 if is_regular else rng.gammavariate(burstiness, 1.0) for _ in requests]
    if sum(gaps) < _SMALLEST:  # a few gaps of a very bursty process may all be too small for a float
        gaps = [1.0] * len(requests)
    scale = len(requests) / per_second / sum(gaps)
    arrivals = itertools.accumulate(gap * scale for gap in gaps)
    return [
        dataclasses.replace(request, arrival_s=arrival) for request, arrival in zip(requests, arrivals, strict=True)
    ]


def as_chat(request: OfferedRequest) -> OfferedRequest:
    """The same request as a chat request with the prompt as one user message."""
    message = {"role": "user", "content": request.content["prompt"]}
    return dataclasses.replace(request, content={"messages": [message]})
