"""A few cases of every Triton kernel, run by Triton's interpreter. Run as a module, which prints what was checked.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
One process, since it takes longer to start than the cases.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import dataclasses

import numpy as np
import torch

from tests.model.attention.helpers import interpreted_attention
from tests.model.decoder.helpers import interpreted_layers
from tests.model.decoder.helpers.interpreted_experts import check_experts, check_routers
from tests.model.decoder.helpers.interpreted_low_rank import check_low_rank, multiply_bfloat16
from tests.model.decoder.helpers.layer_kernels import LayerKernels
from tests.model.execution.helpers.input_checks import check_inputs
from tests.model.helpers import interpreted_sampling
from tests.model.helpers.sampling_rows import staged_masks, top_rows
from tests.model.sampling.helpers import logprobs_as_sampled
from tests.model.sampling.helpers.changed_params import draw_all, drawn_by_torch
from tokasaurus.model.execution import triton_inputs
from tokasaurus.model.sampling.sample import sample_by_triton

NUM_ROWS = 8


def check_sampling() -> None:
    """Against plain torch and the C++ kernels: limits, masks, top-k logprobs, penalties and biases, ties, NaN."""
    interpreted_sampling.check(*interpreted_sampling.random_case(1, 3, 300, is_limited=False))
    interpreted_sampling.check(*interpreted_sampling.random_case(0, 6, 50, is_limited=True))
    logits, rows = interpreted_sampling.random_case(9, 6, 70, is_limited=False)
    masks = staged_masks({1: np.arange(70) % 3 == 0, 4: np.arange(70) == 7})
    interpreted_sampling.check(logits, dataclasses.replace(rows, masks=masks, top=top_rows([1, 4], 6)))
    interpreted_sampling.check_rules(logits, rows)
    logits[2, 17] = torch.nan
    interpreted_sampling.check(logits, rows)
    interpreted_sampling.check_top()
    interpreted_sampling.check_changed_logits()
    interpreted_sampling.check_uniforms()
    interpreted_sampling.check_parts((1, 7))
    interpreted_sampling.check_finish(9, 1100, torch.float32)


def check_parameters() -> None:
    """Each sampling parameter changes tokens, to those of plain torch."""
    tokens = draw_all(sample_by_triton, NUM_ROWS)
    assert tokens == {name: drawn[:NUM_ROWS] for name, drawn in drawn_by_torch().items()}
    assert len({tuple(drawn) for drawn in tokens.values()}) == len(tokens), "no two of them do the same"


def check_logprobs_as_sampled() -> None:
    """Of drawn tokens and of the most likely ones, after each rule alone and after several."""
    for rows in (logprobs_as_sampled.ALONE, logprobs_as_sampled.mixes(1, 12)):
        case = logprobs_as_sampled.make_case(rows)
        logprobs_as_sampled.check(case, sample_by_triton(case.logits, case.rows))


def check_layers() -> None:
    kernels = LayerKernels(torch.device("cpu"), {torch.float32: 2e-6})
    kernels.check_add_norm(3, 100, torch.float32)
    kernels.check_silu_mul(3, 100, torch.float32)
    for has_norm in (False, True):
        kernels.check_rotate_heads(3, (9, 3, 80), torch.float32, has_norm)
    kernels.check_overflow()
    interpreted_layers.check_layers("qwen3")


def check_products() -> None:
    """Of adapters and of experts."""
    multiply_bfloat16()
    check_low_rank("odd sizes")
    check_experts("odd sizes, experts without rows", "no rows")
    check_routers(1)


def check_recorded_inputs() -> None:
    for seed, (num_rows, page_size) in enumerate([(1, 16), (7, 4)]):
        check_inputs(seed, torch.device("cpu"), num_rows, page_size, triton_inputs.fill_inputs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    interpreted_attention.main()
    parts = check_sampling, check_parameters, check_logprobs_as_sampled, check_layers, check_products
    for check in (*parts, check_recorded_inputs):
        check()
        print(check.__name__)
