"""A token whose embedding is NaN: the request that reads it fails, and no other changes."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.end_to_end.helpers.completions import Answer, complete, make_body, random_ids
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.tiny_model import save_tiny_model
from torture.rows import Row, show_rows

PART = "numerics"
POISON = 250
"""The token whose embedding has a NaN; `random_ids` are smaller."""
NUM_REQUESTS = 100
NUM_TOKENS = 24
PREFIX = random_ids(0, 48)
"""All prompts begin with it, the poisoned ones too: they share its blocks."""
FLAGS = {
    "cpu": (),
    "torch": ("cpu_isa=torch",),
    "reference": ("cpu_isa=torch",),
}
"""Flags beside attention_backend."""


def run_numerics() -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        _save_poisoned_model(Path(directory))
        for backend, flags in FLAGS.items():
            server_flags = (f"attention_backend={backend}", "dtype=float32", "kv_cache_num_tokens=16384", *flags)
            with running_toka(f"model={directory}", *server_flags) as toka:
                rows += show_rows(_rows(toka, backend))
    return rows


def _save_poisoned_model(directory: Path) -> None:
    model = save_tiny_model(directory, "llama", tied=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON, 3] = torch.nan
    model.save_pretrained(directory)


def _rows(toka: TokaProcess, backend: str) -> list[Row]:
    before = _ask_all(toka)
    assert all(answer.status == 200 for answer in before), [answer.body for answer in before][:3]
    rows_before = toka.gauge("toka_nonfinite_rows_total")
    beside = _ask_all(toka, _poisoned())
    poisoned = [beside.pop(NUM_REQUESTS // 2), complete(toka.port, _poisoned())]
    outcomes = [(answer.status, answer.error_code) for answer in poisoned]
    after = _ask_all(toka)
    what = f"attention_backend={backend}"
    num_nonfinite = toka.gauge("toka_nonfinite_rows_total") - rows_before
    wanted = (500, "numerical_error")
    found = ", ".join(f"{status} {code}" for status, code in outcomes)
    rows = [
        Row(PART, f"{what}: poisoned requests", found, "500 numerical_error", all(pair == wanted for pair in outcomes)),
        Row(PART, f"{what}: rows with NaN", f"{num_nonfinite:g}", "at least 2", num_nonfinite >= 2),
    ]
    for name, answers in (("at once beside it", beside), ("after it", after)):
        num_equal = sum(_same(*pair) for pair in zip(answers, before, strict=True))
        passed = num_equal == NUM_REQUESTS
        rows.append(Row(PART, f"{what}: requests {name} that are as before", str(num_equal), str(NUM_REQUESTS), passed))
    return rows


def _body(number: int, prompt: list[int]) -> dict[str, object]:
    # The bias keeps the models from sampling the poison, whose embedding the next step would read.
    return make_body(number, prompt=prompt, max_tokens=NUM_TOKENS, logit_bias={str(POISON): -100})


def _ask_all(toka: TokaProcess, *in_the_middle: dict[str, object]) -> list[Answer]:
    """The answers to NUM_REQUESTS requests at once, and to those `in_the_middle` of them."""
    bodies = [_body(number, PREFIX + random_ids(number, 10 + number % 30)) for number in range(NUM_REQUESTS)]
    bodies[NUM_REQUESTS // 2 : NUM_REQUESTS // 2] = in_the_middle
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: complete(toka.port, body), bodies))


def _poisoned() -> dict[str, object]:
    return _body(1000, [*PREFIX, 1, 2, POISON, *range(40)])


def _same(answer: Answer, other: Answer) -> bool:
    return answer.status == other.status == 200 and answer.texts == other.texts
