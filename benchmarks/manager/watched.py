"""CPU time of the manager per token while nobody watches the server, and while somebody does.

`python -m benchmarks.manager.watched`: windows of both kinds take turns in one run. All who watch share a sample a
second, so one and three of them cost the manager the same.
"""

import argparse
import statistics

from benchmarks.manager.load import engine_options
from benchmarks.manager.parts import make_load, num_outstanding, num_pool_tokens
from benchmarks.manager.process import manager_under_load, measure_window
from tokasaurus.server.live import SAMPLE_SECONDS


def measure(num_sequences: int, num_warm_steps: int, num_windows: int, window_s: float) -> tuple[list[float], ...]:
    """Microseconds per token of the windows without and with samples, in turns."""
    limits = engine_options(num_pool_tokens(num_sequences)).limits
    found: tuple[list[float], list[float]] = ([], [])
    with manager_under_load(make_load(is_known=False), limits) as engine:
        engine.send_requests(num_outstanding(num_sequences))
        stats = engine.serve()[-1]
        while stats.total_generation_tokens < num_sequences * num_warm_steps:
            stats = (engine.serve() or [stats])[-1]
        for index in range(2 * num_windows):
            is_watched = index % 2 == 1
            before = engine.num_samples
            window = measure_window(engine, stats, window_s, SAMPLE_SECONDS if is_watched else float("inf"))
            found[is_watched].append(window.manager_us_per_token)
            while not (updates := engine.serve()):
                pass
            stats = updates[-1]
            assert engine.num_samples > before or not is_watched, "samples come if they are asked for"
        engine.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--warm-steps", type=int, default=400)
    parser.add_argument("--windows", type=int, default=6, help="of each kind")
    parser.add_argument("--window-seconds", type=float, default=4.0)
    args = parser.parse_args()
    for num_sequences in args.sequences:
        without, watched = measure(num_sequences, args.warm_steps, args.windows, args.window_seconds)
        more = statistics.median(watched) / statistics.median(without) - 1
        for name, values in (("nobody watches", without), ("watched", watched)):
            shown = f"{statistics.median(values):.3f} µs per token ({min(values):.3f} to {max(values):.3f})"
            print(f"{num_sequences:,} sequences, {name}: {shown}")
        print(f"{num_sequences:,} sequences: {more:+.1%}")


if __name__ == "__main__":
    main()
