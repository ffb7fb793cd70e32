"""Which instruction sets a processor has, and which of them is used."""

import sys
from pathlib import Path

import pytest

from tokasaurus.config_flags import SERVER_FLAGS
from tokasaurus.messages.lifecycle import UserError
from tokasaurus.model.cpu.build import machine_sets
from tokasaurus.model.cpu.isa import INSTRUCTION_SETS, PLAIN_TORCH, choose_set, machine, supported_sets

AVX2 = "avx2 fma bmi bmi2 f16c lzcnt movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"

PROCESSORS = [
    ("x86_64", "", []),
    ("x86_64", "avx2", []),  # without FMA
    ("x86_64", AVX2, ["avx2"]),
    ("x86_64", f"{AVX2} avx512f", ["avx2"]),
    ("x86_64", AVX512, ["avx512", "avx2"]),
    ("x86_64", f"{AVX512} avx512bf16", ["avx512_bf16", "avx512", "avx2"]),
    ("aarch64", "neon", ["neon"]),
    ("aarch64", "neon bf16", ["neon_bf16", "neon"]),
    ("riscv64", AVX2, []),
]


@pytest.mark.parametrize(("machine_name", "features", "expected"), PROCESSORS)
def test_a_set_is_supported_if_the_processor_has_all_its_features(
    machine_name: str, features: str, expected: list[str]
) -> None:
    assert [level.name for level in supported_sets(machine_name, features.split())] == expected


@pytest.mark.parametrize(("machine_name", "features", "names"), PROCESSORS)
def test_the_best_set_is_chosen_unless_another_is_requested(machine_name: str, features: str, names: list[str]) -> None:
    supported = supported_sets(machine_name, features.split())
    best = choose_set(None, supported)
    assert (None if best is None else best.name) == (names[0] if names else None)
    assert choose_set(PLAIN_TORCH, supported) is None
    for cpu_isa in {level.cpu_isa for level in INSTRUCTION_SETS}:
        mine = [name for name in names if name.removesuffix("_bf16" if cpu_isa == "neon" else "") == cpu_isa]
        if mine:
            chosen = choose_set(cpu_isa, supported)
            assert chosen is not None
            assert chosen.name == mine[0]
        else:
            with pytest.raises(UserError, match=f"^cpu_isa={cpu_isa}: .*allowed are .*torch$"):
                choose_set(cpu_isa, supported)


def test_the_flag_allows_all_sets() -> None:
    assert {*SERVER_FLAGS.flags["cpu_isa"].choices} == {*(level.cpu_isa for level in INSTRUCTION_SETS), PLAIN_TORCH}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_sets_of_this_machine_match_the_features_in_proc_cpuinfo() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = next(line for line in lines if line.startswith(("flags", "Features"))).split(":")[1].split()
    names = {"bmi1": "bmi", "abm": "lzcnt", "avx512_bf16": "avx512bf16", "asimd": "neon"}
    assert machine_sets() == supported_sets(machine(), [names.get(name, name) for name in found])
