"""Measures what adapters cost: repeated sampling with and without them, in turns, by one adapter and by eight.

`python -m benchmarks.server.adapters [--rows 64 512] [--rank 16] [--rounds 2] [--base-url URL --directory DIR]
[name=value ...]`, flags of `toka`

Beside one adapter, all requests without share their prompts' beginning, as with it; beside eight, those with the same
of eight salts do. A server that runs already, at
URL, must have loaded the adapters of DIR under the names of their directories; with DIR alone, they are written there,
and stay.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from benchmarks.server.own_server import running_server
from tokasaurus.checkpoint import ModelInfo, resolve_checkpoint
from tokasaurus.checkpoint.adapters import write_adapter
from tokasaurus.checkpoint.spec import MLPSpec
from tokasaurus.commands.bench.client import ClientOptions, ServerError, open_client
from tokasaurus.commands.bench.workloads import OfferedRequest, monkeys

NUM_ADAPTERS = 8
LIMITS = {1: 0.9, NUM_ADAPTERS: 0.85}
"""By the number of adapters: least tokens/s over those without."""
_MAX_TOKENS = 128
_TIMEOUT_S = 1800.0


def write_random_adapter(directory: Path, info: ModelInfo, rank: int, seed: int) -> None:
    """Of all linear layers but those of experts, in float32."""
    rng, tensors = np.random.default_rng(seed), dict[str, tuple[str, tuple[int, ...], bytes]]()
    for index, layer in enumerate(info.spec.layers):
        attention, mlp = layer.own_attention, layer.mlp
        hidden, query = info.hidden_size, attention.num_heads * attention.head_dim
        key = attention.num_kv_heads * attention.head_dim
        shapes = {"self_attn.q_proj": (query, hidden), "self_attn.o_proj": (hidden, query)}
        shapes |= {f"self_attn.{name}_proj": (key, hidden) for name in "kv"}
        if isinstance(mlp, MLPSpec):
            shapes |= {f"mlp.{name}_proj": (mlp.width, hidden) for name in ("gate", "up")}
            shapes["mlp.down_proj"] = hidden, mlp.width
        for module, (num_outputs, num_inputs) in shapes.items():
            for half, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                numbers = (0.02 * rng.standard_normal(shape)).astype(np.float32)
                name = f"base_model.model.model.layers.{index}.{module}.lora_{half}.weight"
                tensors[name] = "F32", shape, numbers.tobytes()
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    targets = sorted({module.rpartition(".")[2] for module in shapes})  # which peers read
    write_adapter(directory, config | {"target_modules": targets}, tensors)


def load_of(num_rows: int, num_adapters: int, has_adapters: bool, seed: int) -> list[OfferedRequest]:
    """num_rows sequences: eight questions, or one for each 32 samples if these are more. has_adapters: otherwise only
    the prompts are shared as if there were so many."""
    num_questions = max(NUM_ADAPTERS, num_rows // 32)
    requests = monkeys(num_questions, num_rows // num_questions, _MAX_TOKENS, 1.0, True, False, seed)
    found = []
    for index, request in enumerate(requests):
        number = index % num_adapters
        fields: dict[str, object] = {"cache_salt": f"{seed}-{number}"}
        found.append(replace(request, fields=fields | ({"model": f"a{number}"} if has_adapters else {})))
    return found


async def measure(base_url: str, requests: list[OfferedRequest]) -> float:
    """Output tokens per second. Raises ServerError."""
    options = ClientOptions(base_url, None, _TIMEOUT_S, usage_per_choice=False, extra_body={})
    async with open_client(options) as client:
        results = await client.offer(requests, await client.find_model(), None)
    if errors := [result.error for result in results if result.error is not None]:
        raise ServerError(errors[0])
    return sum(result.completion_tokens for result in results) / max(result.finished_s for result in results)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server.adapters", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512], help="sequences of a load")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--base-url", help="of a server that runs, with /v1")
    parser.add_argument("--directory", type=Path, help="of the adapters, which are written if it has none")
    parser.add_argument("--model", help="the model whose adapters they are; default: the demo model")
    args, flags = parser.parse_known_args(arguments)
    with ExitStack() as stack:
        directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = {f"a{number}": directory / f"a{number}" for number in range(NUM_ADAPTERS)}
        info = resolve_checkpoint(args.model).info
        for number, place in enumerate(places.values()):
            if not place.exists():
                write_random_adapter(place, info, args.rank, number)
        base_url = args.base_url
        if base_url is None:
            lora = orjson.dumps({name: str(place) for name, place in places.items()}).decode()
            model = [] if args.model is None else [f"model={args.model}"]
            base_url = stack.enter_context(running_server([*model, f"lora={lora}", *flags]))
        is_met = True
        print(f"output tokens/s, {args.rounds} rounds in turns; adapters of rank {args.rank}")
        print("| rows | adapters | without | with | share |\n|---|---|---|---|---|")
        for num_rows, (num_adapters, limit) in itertools.product(args.rows, LIMITS.items()):
            speeds: tuple[list[float], list[float]] = [], []
            for number in range(args.rounds + 1):
                for has_adapters, found in enumerate(speeds):
                    load = load_of(num_rows, num_adapters, bool(has_adapters), seed=2 * number + has_adapters)
                    speed = asyncio.run(measure(base_url, load))
                    if number:  # the first round warms up
                        found.append(speed)
            shares = [own / without for without, own in zip(*speeds, strict=True)]
            is_met &= median(shares) >= limit
            cells = [", ".join(f"{speed:.0f}" for speed in found) for found in speeds]
            print(f"| {num_rows} | {num_adapters} | {' | '.join(cells)} | {', '.join(map('{:.2f}'.format, shares))} |")
            sys.stdout.flush()
    limits = f"{LIMITS[1]:g} with one, {LIMITS[NUM_ADAPTERS]:g} with eight"
    print(f"limits of {limits}: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
