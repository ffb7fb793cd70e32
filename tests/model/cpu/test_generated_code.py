"""Machine code of the innermost gemm loops: a sum that is not kept in a register costs most of the speed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.examples import few
from tokasaurus.model.cpu import build
from tokasaurus.model.cpu.build import INSTRUCTION_SETS, InstructionSet, machine

X86_SETS = [level for level in INSTRUCTION_SETS if level.machine == "x86_64"]
LABEL = re.compile(r"^(\.L\w+):")
JUMP = re.compile(r"^\tj\w+\s+(\.L\w+)")
STACK_OPERAND = re.compile(r"\(%r[sb]p[,)]")


def innermost_loops(assembly: str) -> list[list[str]]:
    """Instructions of each loop without an inner loop, from the target of its backward jump to the jump."""
    lines = assembly.splitlines()
    labels = {match[1]: number for number, line in enumerate(lines) if (match := LABEL.match(line))}
    loops = []
    for end, line in enumerate(lines):
        match = JUMP.match(line)
        if match is None or labels.get(match[1], end) >= end:
            continue
        body = lines[labels[match[1]] + 1 : end]
        if not any((inner := JUMP.match(one)) and labels[match[1]] < labels.get(inner[1], -1) for one in body):
            loops.append([one.strip() for one in body if one.startswith("\t") and not one.startswith("\t.")])
    return loops


@few(1, "level", X86_SETS, ids=lambda level: level.name)
def test_gemm_sums_stay_in_registers(level: InstructionSet, tmp_path: Path) -> None:
    if shutil.which("g++") is None or machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("needs g++ for x86_64, and its assembly as it is on Linux")
    source = tmp_path / "tile.cpp"
    tile = "template void multiply_rows(int, const Activation<{0}>*, int64_t, const {0}*, int64_t, Prefetches, float*);"
    source.write_text('#include "gemm/gemm_tile.h"\n' + "\n".join(tile.format(name) for name in ("float", "bfloat16")))
    command = ["g++", *build.COMPILE_FLAGS, *build.INCLUDE_FLAGS, *level.compiler_flags, "-S", "-o", "-", str(source)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_rows = 12 if "avx512f" in level.features else 6
    multiplying = [loop for loop in innermost_loops(assembly) if sum("fmadd" in one or "dpbf16" in one for one in loop)]
    num_loops = num_rows + 1  # one for each number of rows; tiles that are full, with and without prefetches
    assert len(multiplying) == 2 * num_loops, "for each type of weights"
    for loop in multiplying:
        assert not [one for one in loop if STACK_OPERAND.search(one)]
