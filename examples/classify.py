"""Classification by `score`: the label that the model finds most likely after the text, with its probability.

python examples/classify.py --texts 4
"""

from __future__ import annotations

import argparse

import numpy as np

from tokasaurus import LLM, Client

LABELS = ("positive", "negative")
PROMPT = """\
Review: The food was awful.
Sentiment: negative

Review: What a lovely evening!
Sentiment: positive

Review: {}
Sentiment:"""
REVIEWS = (
    ("A wonderful film, I laughed and cried.", "positive"),
    ("The plot is dull and the actors are bored.", "negative"),
    ("The music alone is worth the ticket.", "positive"),
    ("Two hours of my life that I will never get back.", "negative"),
    ("The best thing I have seen this year.", "positive"),
    ("A waste of a good cast.", "negative"),
    ("I would watch it again tomorrow.", "positive"),
    ("It made me fall asleep.", "negative"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=len(REVIEWS))
    parser.add_argument("--model", help="as toka model=; by default the demo model")
    parser.add_argument("--url", help="of a running server, in place of a model")
    args = parser.parse_args()

    reviews = REVIEWS[: args.texts]
    # One pair of prompt and completion for each label. The server computes a prompt once for all its labels.
    prompts = [PROMPT.format(text) for text, _ in reviews for _ in LABELS]
    completions = [f" {label}" for _ in reviews for label in LABELS]
    with Client(args.url) if args.url else LLM(args.model) as llm:
        scores = llm.score(prompts, completions)
    for score in scores:
        if score.error is not None:
            raise SystemExit(f"not scored: {score.error}")

    totals = np.array([score.total for score in scores]).reshape(len(reviews), len(LABELS))
    likelihoods = np.exp(totals)
    probabilities = likelihoods / likelihoods.sum(axis=1, keepdims=True)
    num_right = 0
    for (text, expected), row in zip(reviews, probabilities, strict=True):
        label = LABELS[int(row.argmax())]
        num_right += label == expected
        print(f"{label:8} {row.max():4.0%}  {text}")
    print(f"{num_right} of {len(reviews)} as expected")


if __name__ == "__main__":
    main()
