"""Samples with a verifier: how often one of k answers is right, and which ways to choose one of n find it.

python examples/best_of_n.py --questions 20 --n 16
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter

from tokasaurus import LLM, Client, Sample, Sampling

SHOTS = "12 + 7 = 19\n25 + 31 = 56\n8 + 46 = 54\n"


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Probability that k of the n samples, drawn without replacement, contain a right one."""
    return 1 - math.comb(n - num_right, k) / math.comb(n, k)


def is_right(sample: Sample, expected: int) -> bool:
    """The verifier: here a comparison; for programs it would run their tests."""
    return sample.text.strip() == str(expected)


def mean_logprob(sample: Sample) -> float:
    return float(sample.logprobs.mean()) if sample.logprobs is not None else -math.inf


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--n", type=int, default=16, help="samples of each question")
    parser.add_argument("--model", help="as toka model=; by default the demo model")
    parser.add_argument("--url", help="of a running server, in place of a model")
    args = parser.parse_args()

    draw = random.Random(0)
    sums = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(args.questions)]
    prompts = [f"{SHOTS}{a} + {b} =" for a, b in sums]
    with Client(args.url) if args.url else LLM(args.model) as llm:
        results = llm.generate(prompts, Sampling(n=args.n, temperature=0.7, max_tokens=6, stop="\n"))

    num_right = []
    by_vote = by_logprob = 0
    for (a, b), result in zip(sums, results, strict=True):
        if result.error is not None:
            raise SystemExit(f"{a} + {b}: {result.error}")
        num_right.append(sum(is_right(sample, a + b) for sample in result.samples))
        vote, _ = Counter(sample.text.strip() for sample in result.samples).most_common(1)[0]
        by_vote += vote == str(a + b)
        by_logprob += is_right(max(result.samples, key=mean_logprob), a + b)

    k = 1
    while k <= args.n:
        values = [pass_at_k(args.n, right, k) for right in num_right]
        print(f"pass@{k:<3} {sum(values) / len(values):6.1%}")
        k *= 2
    print(f"majority {by_vote / len(sums):6.1%}")
    print(f"most likely {by_logprob / len(sums):.1%}")


if __name__ == "__main__":
    main()
