"""What the differences between two log-probabilities of the same tokens are, in a few figures."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

POSITIONS_PER_PART = 16


@dataclass(frozen=True, slots=True)
class Compared:
    """The log-probabilities of one completion's tokens, both float64 [T]."""

    sampled: NDArray[np.float64]
    """The engine's, as it returned them with the tokens."""
    reference: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PartFigures:
    """Differences |d| of the tokens at some positions of all completions; d as in ModeFigures."""

    first_position: int
    num_tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """Differences of one way of sampling. d is the engine's log-probability minus the reference's."""

    mode: str
    num_sequences: int
    num_tokens: int
    mean: float
    """Mean of |d|."""
    largest: float
    """Largest |d|."""
    share_above_bound: float
    """Share of the tokens with |d| above the bound."""
    kl: float
    """KL(engine || reference) of the distribution that tokens are drawn from; at temperature 1 only.

    Estimated from the tokens as the mean of exp(-d) - 1 + d, which is never negative
    (http://joschu.net/blog/kl-approx.html, k3)."""
    longest_ratio: float
    """Largest of exp(|d|): the weight of a token in an importance ratio."""
    parts: tuple[PartFigures, ...]
    """Figures of every POSITIONS_PER_PART positions of the completions."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(mode: str, compared: Sequence[Compared], bound: float) -> ModeFigures:
    """compared: of completions with tokens, at least one."""
    differences = [one.sampled - one.reference for one in compared]
    every = np.concatenate(differences)
    sizes = np.abs(every)
    return ModeFigures(
        mode=mode,
        num_sequences=len(compared),
        num_tokens=len(every),
        mean=float(sizes.mean()),
        largest=float(sizes.max()),
        share_above_bound=float((sizes > bound).mean()),
        kl=float((np.expm1(-every) + every).mean()),
        longest_ratio=float(np.exp(sizes.max())),
        parts=tuple(_parts_of(differences)),
    )


def _parts_of(differences: Sequence[NDArray[np.float64]]) -> list[PartFigures]:
    parts = []
    for first in range(0, max(map(len, differences)), POSITIONS_PER_PART):
        sizes = np.abs(np.concatenate([one[first : first + POSITIONS_PER_PART] for one in differences]))
        parts.append(PartFigures(first, len(sizes), float(sizes.mean()), float(sizes.max())))
    return parts
