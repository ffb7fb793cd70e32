"""Measure the memory of a checkpoint's largest forwards, on Linux.

`python -m tests.model.helpers.largest_forward DIRECTORY DTYPE [int8 | quantised]` prints JSON: the bytes reserved for
these forwards, and by how many bytes they raise the peak memory of this process. quantised: weights alone are.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from tests.model.helpers.peak_memory import peak, reset_peak
from tests.model.helpers.steps import CPU, make_runner
from tokasaurus.checkpoint import read_model_info, weight_files
from tokasaurus.messages.forward import ForwardInput, PrefixGroups, TokenMasks
from tokasaurus.model.buffer_sizes import num_mask_words
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.layers import PLAIN
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.memory import largest_forward, reserve
from tokasaurus.model.worker.warmup import (
    ForwardLimits,
    decode_after,
    longest_last_tokens,
    longest_prefill,
    warm_up_small,
    widest_prefill,
)

PAGE_SIZE = 16
NUM_THREADS = 2
NUM_TOP = 20


def main(directory: Path, dtype: torch.dtype, is_int8: bool, has_blocks: bool) -> None:
    torch.set_num_threads(NUM_THREADS)
    kernels = load_kernels()
    assert kernels is not None
    info = read_model_info(directory)
    limits = ForwardLimits(max_tokens=4096, max_seqs=512, context_length=2048, vocab_size=info.vocab_size)
    model = build_decoder(info, Mesh(), dtype)
    model.materialize(CPU, limits.context_length)
    load_weights(weight_files(directory), model.weight_shards(), model.ignores, lambda _: None)
    model.pack(kernels, packing=Packing("int8", is_int8) if has_blocks else PLAIN)
    runner = make_runner(model, info, "cpu", PAGE_SIZE, num_blocks=600, num_slots=limits.max_seqs, dtype=dtype)
    sizes = PAGE_SIZE, model.activation_dtype.itemsize, NUM_THREADS, NUM_TOP
    memory = largest_forward(info, limits, *sizes, is_int8, has_blocks, kernels.max_tiled_rows)
    warm_up_small(runner, limits, PAGE_SIZE)  # loads the code that the measured forwards run
    if model.states is not None:  # whose memory is not the forward's
        for layer in range(len(model.states)):
            model.states.memory(layer).zero_()
    before = reset_peak()
    reserve(memory, model, limits)
    reserved = peak() - before
    reset_peak()
    for step in largest_steps(limits):
        result = runner.run(step)
        assert result is not None
        result.output()
    print(json.dumps({"memory": asdict(memory), "reserved": reserved, "grown": peak() - before}))


def largest_steps(limits: ForwardLimits) -> list[ForwardInput]:
    """Steps with a mask for every sampling row, all rows in one prefix group, or all rows at the end of a context."""
    widest, last_tokens = widest_prefill(limits), longest_last_tokens(limits)
    num_rows = len(widest.slots)
    groups = PrefixGroups(np.array([num_rows], np.int32), np.array([limits.context_length // PAGE_SIZE - 1], np.int32))
    num_words = num_mask_words(limits.vocab_size)
    masks = TokenMasks(np.arange(num_rows, dtype=np.int32), np.full((num_rows, num_words), 0xFFFFFFFF, np.uint32))
    again = replace(decode_after(last_tokens), changes=last_tokens.changes, groups=groups, masks=masks)
    return [replace(widest, masks=masks), decode_after(widest), longest_prefill(limits), last_tokens, again]


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]), *("int8" in sys.argv[3:], len(sys.argv) > 3))
