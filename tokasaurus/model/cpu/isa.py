"""The instruction sets for which the kernels are compiled, and the choice among them. Does not import torch."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from tokasaurus.messages.lifecycle import FlagRefused

PLAIN_TORCH = "torch"
"""The value of cpu_isa that uses no kernels."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set with a kernel library of its own."""

    name: str
    """Name of the library."""

    cpu_isa: str
    """The value of the cpu_isa flag that selects it."""

    machine: str
    """Architecture, as returned by `machine()`."""

    compiler_flags: tuple[str, ...]
    """Flags that let the compiler use these instructions."""

    features: frozenset[str]
    """Features that the processor must have, named as in cpu_features.cpp."""

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has bfloat16 dot products; emulated ones are slower than float32 dot products."""
        return not self.features.isdisjoint(("avx512bf16", "bf16"))


_AVX2 = frozenset({"avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEON = frozenset({"neon"})

INSTRUCTION_SETS = (
    InstructionSet(
        "avx512_bf16", "avx512_bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512bf16"}
    ),
    InstructionSet("avx512", "avx512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    InstructionSet("avx2", "avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    InstructionSet("neon_bf16", "neon", "aarch64", ("-march=armv8.2-a+bf16",), _NEON | {"bf16"}),
    InstructionSet("neon", "neon", "aarch64", (), _NEON),
)
"""For each machine, the best set comes first."""


def machine() -> str:
    """The processor's architecture; the name is the same on every operating system."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def supported_sets(machine_name: str, features: Iterable[str]) -> tuple[InstructionSet, ...]:
    """The instruction sets that a processor with these features can run, the best first."""
    have = frozenset(features)
    return tuple(level for level in INSTRUCTION_SETS if level.machine == machine_name and level.features <= have)


def choose_set(cpu_isa: str | None, supported: tuple[InstructionSet, ...]) -> InstructionSet | None:
    """The best of `supported` that cpu_isa selects (None: any); None for plain torch.

    Raises FlagRefused if cpu_isa is not supported.
    """
    if cpu_isa == PLAIN_TORCH:
        return None
    if cpu_isa is None:
        return supported[0] if supported else None
    chosen = next((level for level in supported if level.cpu_isa == cpu_isa), None)
    if chosen is None:
        allowed = dict.fromkeys([*(level.cpu_isa for level in supported), PLAIN_TORCH])
        raise FlagRefused(f"cpu_isa={cpu_isa}: this processor does not have it; allowed are {', '.join(allowed)}")
    return chosen
