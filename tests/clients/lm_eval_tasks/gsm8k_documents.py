"""Documents of the tasks in this directory, made from GSM8K's questions. lm-eval imports it in its own environment."""

import itertools
import re
from typing import Any

NUM_DOCUMENTS = 24
NUM_OPTIONS = 4


def with_solutions(dataset: Any) -> Any:
    """The first NUM_DOCUMENTS documents, with `solution`, without calculator marks, and `number`, the final answer."""
    return _first(dataset).map(_split_answer)


def with_options(dataset: Any) -> Any:
    """As `with_solutions`, with `options`, the number among the numbers of the next questions, and `gold`, its index,
    which varies."""
    numbers = [_split_answer(document)["number"] for document in dataset]

    def add_options(_document: dict[str, Any], index: int) -> dict[str, Any]:
        right, *wrong = itertools.islice(dict.fromkeys(numbers[index:]), NUM_OPTIONS)
        gold = index % NUM_OPTIONS
        return {"options": [*wrong[:gold], right, *wrong[gold:]], "gold": gold}

    return with_solutions(dataset).map(add_options, with_indices=True)


def _first(dataset: Any) -> Any:
    return dataset.select(range(min(NUM_DOCUMENTS, len(dataset))))


def _split_answer(document: dict[str, str]) -> dict[str, str]:
    solution, number = re.sub("<<.*?>>", "", document["answer"]).split("\n#### ")
    return {"solution": solution, "number": number}
