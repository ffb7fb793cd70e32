"""Synthetic data with a schema: people who do not exist, as JSON lines. Any number of rows needs the same memory.

python examples/synthetic_data.py --rows 100 --output people.jsonl
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from tokasaurus import LLM, Client, Sampling

COUNTRIES = ("Portugal", "Kenya", "Japan", "Peru", "Norway", "India")


class Person(BaseModel, extra="forbid"):
    """The text follows the types, limits and patterns. Limits keep a small model from writing for ever."""

    name: str = Field(pattern=r"^[A-Z][a-z]{1,11} [A-Z][a-z]{1,15}$")
    age: int = Field(ge=18, le=90)
    profession: Literal["teacher", "nurse", "farmer", "engineer", "musician"]
    saying: str = Field(min_length=10, max_length=80)


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Read while results come, as there is room for them."""
    draw = random.Random(0)
    for number in range(count):
        country = draw.choice(COUNTRIES)
        # The model does not see the schema: the prompt says what is wanted.
        wish = (
            f"Invent a person from {country}. Answer with a JSON object that has the person's name, age and "
            "profession, and in 'saying' one English sentence that the person would say."
        )
        yield {"id": number, "country": country, "messages": [{"role": "user", "content": wish}]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("people.jsonl"))
    parser.add_argument("--model", help="as toka model=; by default the demo model")
    parser.add_argument("--url", help="of a running server, in place of a model")
    args = parser.parse_args()

    counts: Counter[str] = Counter()
    names: set[str] = set()
    sampling = Sampling(temperature=0.9, max_tokens=150, logprobs=False)
    with Client(args.url) if args.url else LLM(args.model) as llm, args.output.open("w") as output:
        for result in llm.stream(rows(args.rows), sampling, key="id", schema=Person):
            person: Person | None = result.parsed
            if person is None:  # an error, or a text that max_tokens cut
                reason = result.error or result.samples[0].parse_error
                print(f"row {result.key}: {reason}")
                counts["failed"] += 1
            elif person.name in names:
                counts["duplicates"] += 1
            else:
                names.add(person.name)
                counts["written"] += 1
                output.write(person.model_dump_json() + "\n")
    print(f"{counts['written']} written, {counts['duplicates']} duplicates, {counts['failed']} failed")


if __name__ == "__main__":
    main()
