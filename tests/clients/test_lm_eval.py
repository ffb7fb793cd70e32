"""lm-eval gives the same items with a real server as with transformers and the same weights, in float32.

`lm_eval --model local-completions` runs with its defaults, one request at a time and with 64 at once, at each of the
addresses that users write.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed: `make test-clients` has it", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TASK_DIRECTORY = Path(__file__).parent / "lm_eval_tasks"
TASKS = sorted(path.stem for path in TASK_DIRECTORY.glob("*.yaml"))
TIE = 1e-3
"""If the two best logprobs differ by less, either token may be chosen: float32 sums depend on the order of terms."""

Item = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Results of one run of lm-eval, by task."""

    scores: dict[str, dict[str, float]]
    """The values of the task's metrics."""
    items: dict[str, list[Item]]
    """The logged sample of each document."""


Evaluate = Callable[..., Evaluation]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    # The data come from files and the cache is temporary: nothing is downloaded or left behind.
    home = tmp_path_factory.mktemp("huggingface")
    environment = {**os.environ, "HF_HOME": str(home), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

    def run(model: str, model_args: str, *more: str) -> Evaluation:
        output = tmp_path_factory.mktemp("results")
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", model_args, *more]
        command += ["--include_path", str(TASK_DIRECTORY), "--tasks", ",".join(TASKS)]
        command += ["--log_samples", "--output_path", str(output)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        (results,) = output.glob("**/results_*.json")
        samples = {task: next(results.parent.glob(f"samples_{task}_*.jsonl")) for task in TASKS}
        return Evaluation(
            scores={task: numbers(json.loads(results.read_text())["results"][task]) for task in TASKS},
            items={
                task: [json.loads(line) for line in path.read_text().splitlines()] for task, path in samples.items()
            },
        )

    return run


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if isinstance(value, float)}


@pytest.fixture(scope="module")
def by_transformers(evaluate: Evaluate, model_directory: Path) -> Evaluation:
    return evaluate("hf", f"pretrained={model_directory},dtype=float32", "--device", "cpu", "--batch_size", "1")


@pytest.mark.parametrize(
    ("address", "more"),
    [("127.0.0.1", ""), ("0.0.0.0", ",num_concurrent=64")],
    ids=["one_by_one", "64_at_once_at_0.0.0.0"],
)
def test_scores_and_items_match_transformers(
    address: str, more: str, evaluate: Evaluate, base_url: str, by_transformers: Evaluation, model_directory: Path
) -> None:
    url = base_url.replace("127.0.0.1", address)
    by_toka = evaluate("local-completions", f"model=default,base_url={url}/completions{more}")
    oracle = Oracle(model_directory)
    for task in TASKS:
        pairs = list(zip(by_toka.items[task], by_transformers.items[task], strict=True))
        assert len(pairs) == 24
        diverged = [ours["doc_id"] for ours, theirs in pairs if not items_agree(ours, theirs, oracle)]
        assert len(diverged) <= 1, f"{task}: ties are rare"
        if not diverged:
            assert by_toka.scores[task] == pytest.approx(by_transformers.scores[task], rel=5e-5), task


def items_agree(ours: Item, theirs: Item, oracle: "Oracle") -> bool:
    """Whether the items are equal. Asserts that they differ at ties only."""
    assert ours["arguments"] == theirs["arguments"]
    gaps = []
    for arguments, (mine,), (reference,) in zip(
        ours["arguments"].values(), ours["resps"], theirs["resps"], strict=True
    ):
        context, *more = arguments.values()
        if isinstance(reference, list):  # the logprob of a continuation, and whether it is greedy
            assert float(mine[0]) == pytest.approx(float(reference[0]), abs=1e-3)
            if mine[1] != reference[1]:
                gaps.append(oracle.gap_of_continuation(context, more[0]))
        elif not more:  # the logprob of a text
            # lm-eval adds up the reference in float32, which on some processors is further from float64 than ours.
            assert float(mine) == pytest.approx(float(reference), abs=1e-3, rel=1e-5)
        elif mine != reference:
            gaps.append(oracle.gap_where_texts_diverge(context + mine, context + reference))
        else:
            assert ours["filtered_resps"] == theirs["filtered_resps"]
    assert max(gaps, default=0.0) < TIE, f"{ours['resps']} is not {theirs['resps']}"
    return not gaps


class Oracle:
    """Logprob gaps by transformers, computed only for items that differ between the two runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def gap_where_texts_diverge(self, first: str, second: str) -> float:
        """The gap between the logprobs of the two best tokens after the texts' common prefix."""
        ids, others = self._encode(first), self._encode(second)
        pairs = enumerate(zip(ids, others, strict=False))
        position = next((position for position, (left, right) in pairs if left != right), min(len(ids), len(others)))
        best = self._logprobs(ids[:position])[-1].topk(2).values
        return float(best[0] - best[1])

    def gap_of_continuation(self, context: str, continuation: str) -> float:
        """The smallest gap between a token of the continuation and the best other token at its position."""
        start, ids = len(self._encode(context)), self._encode(context + continuation)
        logprobs = self._logprobs(ids[:-1])[start - 1 :]
        chosen = [float(row[token_id]) for row, token_id in zip(logprobs, ids[start:], strict=True)]
        others = [
            max(float(value) for value, other in zip(*row.topk(2), strict=True) if other != token_id)
            for row, token_id in zip(logprobs, ids[start:], strict=True)
        ]
        return min(abs(value - other) for value, other in zip(chosen, others, strict=True))

    def _encode(self, text: str) -> list[int]:
        from transformers import AutoTokenizer

        ids: list[int] = AutoTokenizer.from_pretrained(self._directory).encode(text, add_special_tokens=False)
        return ids

    def _logprobs(self, ids: list[int]) -> Any:
        """Log-probabilities [len(ids), vocabulary]."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
