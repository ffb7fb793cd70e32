"""Sampling by two tensor-parallel ranks on a CPU, one thread each: milliseconds of a step's sampling alone.

python -m benchmarks.parallelism.rank_sampling [vocabulary ...]
"""

import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.noise import position_keys, sequence_keys
from tokasaurus.model.sampling.rules import has_limits, limited_rows, params_to_device
from tokasaurus.model.sampling.sample import SamplingRows, sample
from tokasaurus.model.sampling.shards import VocabularyShard
from tokasaurus.model.staging.staging import DirectStaging

CPU = torch.device("cpu")
NUM_RANKS = 2
NUM_ROWS = (1, 64, 256)
VOCABULARIES = (49_152, 128_256)
NUM_ROUNDS = 7
OPTIONS = {
    "no limits": SamplingParams(temperature=0.8),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
}


def rows_of(options: SamplingParams, num_rows: int, num_limited: int) -> SamplingRows:
    """num_limited: the first rows have these options, the others none but the temperature."""
    params = np.array([SamplingParams(temperature=options.temperature)] * num_rows, SAMPLING_DTYPE)
    params[:num_limited] = np.array([options] * num_limited, SAMPLING_DTYPE)
    keys = sequence_keys(np.arange(num_rows, dtype=np.uint64), np.zeros(num_rows, np.uint32))
    return SamplingRows(
        params=params,
        device_params=params_to_device(params, CPU),
        noise_keys=torch.from_numpy(position_keys(keys, np.full(num_rows, 9)).astype(np.int64)),
        any_logprobs=False,
        limited=limited_rows(has_limits(params), DirectStaging(CPU)),
    )


def run_rank(rank: int, rendezvous: Path, vocabularies: list[int]) -> None:
    torch.set_num_threads(1)
    kernels = load_kernels()
    if kernels is not None:
        kernels.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=NUM_RANKS), rendezvous, CPU) as mesh, torch.inference_mode():
        for vocab_size in vocabularies:
            shard = VocabularyShard.of(mesh, vocab_size)
            first, length = mesh.vocab_shard(vocab_size)
            for num_rows in NUM_ROWS:
                generator = torch.Generator().manual_seed(num_rows)
                logits = (2 * torch.randn(num_rows, vocab_size, generator=generator)).to(torch.bfloat16)
                own = logits[:, first : first + length].contiguous()
                cases = {name: rows_of(options, num_rows, num_rows) for name, options in OPTIONS.items()}
                cases["one row with top_p 0.9"] = rows_of(OPTIONS["top_p 0.9"], num_rows, 1)
                for name, rows in cases.items():
                    seconds = []
                    for _ in range(NUM_ROUNDS):
                        torch.distributed.barrier()
                        began_s = time.perf_counter()
                        sample(own, replace(rows), kernels, shard)
                        seconds.append(time.perf_counter() - began_s)
                    if rank == 0:
                        milliseconds = 1000 * statistics.median(seconds)
                        print(
                            f"{vocab_size:>8} tokens {num_rows:>4} rows  {name:<24} {milliseconds:8.1f} ms", flush=True
                        )


def main() -> None:
    vocabularies = [int(word) for word in sys.argv[1:]] or list(VOCABULARIES)
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(rank, Path(directory) / "rendezvous", vocabularies))
            for rank in range(NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
