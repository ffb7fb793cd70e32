"""A group of one rank in a child process: recorded sums over ranks are replayed and dropped, then the group ends.

Not yet run on a GPU, where the group is NCCL's; on the CPU it is gloo's, and the graph is a tape. Sums through
symmetric memory are checked and measured as a start does, and recorded too. Rows that ranks divide are sampled.
"""

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed

from tests.model.execution.helpers.launch_tape import LaunchTape, is_collective
from tests.model.helpers.sampling_rows import on_device
from tests.model.parallel.helpers.symmetric_memory_on_cpu import symmetric_memory_on_cpu
from tests.model.sampling.helpers.shard_ranks import CASES, make_case
from tokasaurus.model.execution.graphs import CudaRecorder, Recorder
from tokasaurus.model.parallel.collectives import TIMEOUT, with_groups
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.sample import _executor, _sample_own_rows, sample
from tokasaurus.model.sampling.shards import VocabularyShard
from tokasaurus.model.worker import all_reduce_start

ROOT = Path(__file__).parents[2]
REPLAYED = "replayed"
"""The line after which nothing is left to do but to drop the graph and to end."""


def check_one_rank(device: str, exit_limit_s: float = 5.0) -> None:
    """device: "cuda" or "cpu". Raises AssertionError if the sum is wrong, or if the end takes longer."""
    words = [sys.executable, "-m", "tests.gpu.one_rank", device]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        try:
            lines = _lines_until_replayed(child)
            try:
                code = child.wait(timeout=exit_limit_s)
            except subprocess.TimeoutExpired:
                code = None
        finally:
            child.kill()
        assert code is not None, f"it had not ended {exit_limit_s} s after its last replay"
        assert code == 0, "\n".join([*lines, child.stdout.read()])


def _lines_until_replayed(child: subprocess.Popen[str]) -> list[str]:
    """Its output. The time limit of the test ends a child that hangs before."""
    lines: list[str] = []
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == REPLAYED:
            return lines
        lines.append(line)
    raise AssertionError("it ended early:\n" + "".join(lines))


def run_rank(device: torch.device) -> None:
    on_cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as directory:
        torch.distributed.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=0,
            world_size=1,
            timeout=TIMEOUT,
            device_id=device if on_cuda else None,
        )
        group = with_groups(Mesh(), on_cuda).tp_group
        values = torch.zeros(1024, device=device)
        recorder: Recorder = CudaRecorder(device) if on_cuda else LaunchTape()
        with recorder.preparing():
            torch.distributed.all_reduce(values, group=group)  # the first makes a communicator
            recorder.begin()
            total = values * 2
            torch.distributed.all_reduce(total, group=group)
            total += 1
            graph = recorder.end()
        if isinstance(recorder, LaunchTape):  # a sum over one rank changes nothing
            assert sum(is_collective(function) for function, *_ in recorder.graphs[0].operations) == 1
        for value in (3.0, 5.0):
            values.fill_(value)
            graph.replay()
            assert total.tolist() == [2 * value + 1] * 1024
        with nullcontext() if on_cuda else symmetric_memory_on_cpu():
            check_symmetric_sums(device, replace(Mesh(), tp_group=group))
        check_sampling(device, replace(Mesh(), tp_group=group))
        print(REPLAYED, flush=True)
        del graph, recorder, total
        torch.distributed.destroy_process_group()


def check_symmetric_sums(device: torch.device, mesh: Mesh) -> None:
    """Prints what is the fastest; then each way's sums, recorded, are replayed with two inputs."""

    def use_all_ways(sizes: list[int], seconds: list[dict[str | None, float]]) -> list[tuple[int, str]]:
        print(f"seconds of ten sums by bytes: {dict(zip(sizes, seconds, strict=True))}")
        return [(size, name) for size, name in zip(sizes, [name for name in seconds[0] if name], strict=False)]

    with patch.object(all_reduce_start, "fastest_up_to", use_all_ways):
        chosen, described = all_reduce_start.choose_all_reduce(True, mesh, device, torch.bfloat16, 1 << 20, 0)
    print(described)
    assert chosen.all_reduce is not None
    for num_bytes in (4 << 10, 16 << 10, 2 << 20):  # by the ways there are, then by NCCL
        values = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        recorder: Recorder = CudaRecorder(device) if device.type == "cuda" else LaunchTape()
        with recorder.preparing():
            chosen.all_reduce.sum(values)
            recorder.begin()
            total = values * 2
            chosen.all_reduce.sum(total)
            total += 1
            graph = recorder.end()
        for value in (3.0, 5.0):
            values.fill_(value)
            graph.replay()
            assert total.tolist() == [2 * value + 1] * values.numel()
        del graph, recorder


def check_sampling(device: torch.device, mesh: Mesh) -> None:
    """Rows with limits, rules and masks, through the exchange of ranks, are sampled as on the CPU without one."""
    for case in CASES:
        if case.is_plain:
            continue
        logits, rows = make_case(case)
        shard = VocabularyShard.of(mesh, case.vocab_size)
        on_the_device = logits.to(device)
        executor = _executor(on_the_device, None)
        found = _sample_own_rows(executor, on_the_device, on_device(rows, device), shard)
        expected = sample(logits, rows, None)
        is_equal = found.tokens.cpu() == expected.tokens
        assert is_equal.float().mean() >= 0.98, case.name
        if expected.logprobs is not None and found.logprobs is not None:
            is_compared = is_equal & (expected.tokens >= 0)
            torch.testing.assert_close(
                found.logprobs.cpu()[is_compared], expected.logprobs[is_compared], rtol=0, atol=1e-4, equal_nan=True
            )


if __name__ == "__main__":
    run_rank(torch.device("cuda", 0) if sys.argv[1] == "cuda" else torch.device(sys.argv[1]))
