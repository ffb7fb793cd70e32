"""An eval: greedy answers to questions, a table of right and wrong ones, and the accuracy with its 95 % interval.

python examples/evaluate.py --questions 10
"""

from __future__ import annotations

import argparse
import math

from tokasaurus import LLM, Client, Sampling

CAPITALS = {
    "France": "Paris",
    "Turkey": "Ankara",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Australia": "Canberra",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Brazil": "Brasília",
    "Spain": "Madrid",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "India": "New Delhi",
    "Chile": "Santiago",
}


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """95 % interval of a probability; unlike mean ± 2 errors, it is right for few questions and near 0 and 1."""
    z = 1.96
    share = num_right / count
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - width) / (1 + z * z / count), (middle + width) / (1 + z * z / count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=len(CAPITALS))
    parser.add_argument("--model", help="as toka model=; by default the demo model")
    parser.add_argument("--url", help="of a running server, in place of a model")
    args = parser.parse_args()

    questions = list(CAPITALS.items())[: args.questions]
    conversations = [[{"role": "user", "content": f"What is the capital of {country}?"}] for country, _ in questions]
    with Client(args.url) if args.url else LLM(args.model) as llm:
        results = llm.chat(conversations, Sampling(temperature=0, max_tokens=24))

    num_right = 0
    print(f"{'country':10} {'expected':10} {'':6} answer")
    for (country, capital), result in zip(questions, results, strict=True):
        # A question without an answer counts as wrong, and says why.
        answer = result.text if result.text is not None else f"error: {result.error}"
        is_right = result.error is None and capital in answer
        num_right += is_right
        print(f"{country:10} {capital:10} {'right' if is_right else 'wrong':6} {' '.join(answer.split())}")
    low, high = wilson_interval(num_right, len(questions))
    share = f"{num_right} of {len(questions)}, {num_right / len(questions):.1%}"
    print(f"{share} right; 95 % interval {low:.1%} to {high:.1%}")


if __name__ == "__main__":
    main()
