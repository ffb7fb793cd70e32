"""Tokens that each sampler draws with one changed parameter at a time. Run as a module, it prints those of Triton's.

Triton's interpreter has a process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.model.helpers.rule_contexts import Contexts, Rule, make_rules
from tests.model.helpers.sampling_rows import make_rows, noise_keys, with_params
from tests.model.helpers.steps import CPU, int32
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, SamplingParams
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, sample, sample_by_triton
from tokasaurus.model.sampling.shards import VocabularyShard

NUM_ROWS, VOCAB_SIZE = 64, 41
DEFAULTS = "none"

Tokens = dict[str, list[int]]
"""By the changed parameter, and DEFAULTS: the token of each row."""


def draw_all(draw: Callable[[Tensor, SamplingRows], Sampled], num_rows: int = NUM_ROWS) -> Tokens:
    """Draws with the defaults, and with each changed parameter. The first rows are the same, however many there are."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.5, (num_rows, VOCAB_SIZE)).astype(np.float32))
    defaults = SamplingParams()
    changes = {DEFAULTS: defaults}
    for name, values in CLIENT_PARAMETERS.items():
        changed: dict[str, Any] = defaults._asdict() | {name: values.strong}
        changes[name] = SamplingParams(**changed)
    return {
        name: draw(logits.clone(), make_changed_rows(params, num_rows)).tokens.tolist()
        for name, params in changes.items()
    }


def make_changed_rows(params: SamplingParams, num_rows: int) -> SamplingRows:
    """Each row has tokens of a prompt and as many generated ones, which penalties count."""
    rng = np.random.default_rng(1)
    slots = list(range(1, num_rows + 1))
    contexts = Contexts({slot: rng.integers(0, VOCAB_SIZE, 40).tolist() for slot in slots}, num_rows + 1)
    contexts.sampling[:] = params
    rules = make_rules(dict.fromkeys(slots, Rule(20))) if params.has_penalties else None
    contexts.rules.open(int32(slots), rules, contexts.sampling)
    keys = noise_keys([5] * num_rows, [0] * num_rows, [*range(num_rows)])
    rows = make_rows([1.0] * num_rows, [1.0] * num_rows, keys)
    columns = {name: np.full(num_rows, value) for name, value in params._asdict().items()}
    return dataclasses.replace(with_params(rows, **columns), rules=contexts.select(slots))


def drawn_by_torch() -> Tokens:
    return draw_all(lambda logits, rows: sample(logits, rows, None))


def drawn_by_kernels() -> Tokens:
    kernels = load_kernels()
    return draw_all(lambda logits, rows: sample(logits, rows, kernels))


def draw_on_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends what the ranks together draw without kernels, and then with them."""
    torch.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        first, count = mesh.vocab_shard(VOCAB_SIZE)
        shard = VocabularyShard.of(mesh, VOCAB_SIZE)
        for kernels in (None, load_kernels()):

            def draw(logits: Tensor, rows: SamplingRows, kernels: Kernels | None = kernels) -> Sampled:
                return sample(logits[:, first : first + count].contiguous(), rows, kernels, shard)

            answers.send(draw_all(draw))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    print(json.dumps(draw_all(sample_by_triton, num_rows=24)))
