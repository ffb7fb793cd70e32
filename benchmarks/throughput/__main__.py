"""Measures the throughput of any OpenAI-compatible server: `python -m benchmarks.throughput --help`."""

import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.results import print_error
from benchmarks.throughput.client import ServerError
from benchmarks.throughput.measure import measure, parse
from benchmarks.throughput.report import print_failures, print_summary


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a request failed or no server answered."""
    args, requests = parse(argv)
    stderr = Console(stderr=True)
    try:
        report = asyncio.run(measure(args, requests))
    except ServerError as error:
        print_error(error)
        return 1
    if args.output is not None:
        report.write(args.output)
    print_summary(f"{args.workload} at {args.base_url}", report.summary, Console())
    print_failures(report.requests, stderr)
    return 1 if report.summary.num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
