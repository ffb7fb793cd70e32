"""What a fuzzer prints and returns."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Report:
    """Outcomes of the cases so far."""

    title: str
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of cases by kind of case and outcome."""
    faults: list[str] = field(default_factory=list)
    """One line for each case that ended in a traceback, a hang or another wrong answer; names the case."""

    @property
    def num_cases(self) -> int:
        return self.outcomes.total()

    def add(self, kind: str, outcome: str) -> None:
        self.outcomes[kind, outcome] += 1

    def add_fault(self, kind: str, line: str) -> None:
        self.add(kind, "FAULT")
        self.faults.append(f"{kind}: {line}")

    def show(self, seconds: float) -> None:
        print(f"{self.title}: {self.num_cases:,} cases in {seconds:.0f} s, {len(self.faults)} faults")
        for (kind, outcome), count in sorted(self.outcomes.items()):
            print(f"  {kind:<24} {outcome:<24} {count:>7,}")
        for line in self.faults[:40]:
            print(f"  {line[:240]}")


def run_from_command_line(run: Callable[[int], Report]) -> int:
    """Run as many cases as the first argument says, else 10,000, and print the report -> the exit code."""
    started = time.perf_counter()
    report = run(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    report.show(time.perf_counter() - started)
    return 1 if report.faults else 0
