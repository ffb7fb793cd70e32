"""What layers with states compute of a forward's segments, in plain torch: short convolutions, and recurrences of
matrices.

The recurrence of a head, with its state S [K, V], for each token: S decays; S learns the token's value for its key; the
output is what S has for the query. Gated DeltaNet learns only what S does not have yet (the delta rule), Mamba 2 adds
all. Many tokens of one sequence are computed in chunks, by products of matrices (arXiv 2412.06464, 2405.21060), the
decode rows by the plain recurrence.
"""

# T tokens, D decode rows, H heads, K size of keys and queries, V size of values, C channels, W tokens of a convolution

from typing import NamedTuple

import torch
from torch import Tensor

from tokasaurus.model.decoder.state_rows import ZEROS, Segments

CHUNK = 64
"""Tokens of a chunk."""


class Rows(NamedTuple):
    """Inputs of recurrences, all of float32."""

    query: Tensor
    """[T, H, K]."""
    key: Tensor
    """[T, H, K]."""
    value: Tensor
    """[T, H, V]."""
    decay: Tensor
    """[T, H], logarithms."""
    rate: Tensor | None
    """[T, H], of the delta rule: 0 learns nothing, 1 all; None: values are added."""


def convolve(x: Tensor, weight: Tensor, states: Tensor, segments: Segments) -> Tensor:
    """x [T, C], weight [C, W] -> [T, C]: each channel's sum over the last W tokens. states: [rows, W - 1, C], the last
    tokens before, which are replaced. 0 for tokens of no segment."""
    output = torch.zeros_like(x)
    size = weight.shape[1]
    num_decode = segments.num_decode
    if num_decode:
        window = torch.cat((_taken(states, segments), x[:num_decode].unsqueeze(1)), dim=1)
        output[:num_decode] = torch.einsum("dwc,cw->dc", window, weight)
        states[torch.from_numpy(segments.targets[:num_decode]).long()] = window[:, 1:]
    for start, count, source, target in _chained(segments):
        before = states.new_zeros(states.shape[1:]) if source == ZEROS else states[source]
        window = torch.cat((before, x[start : start + count]))
        for tap in range(size):
            output[start : start + count] += window[tap : tap + count] * weight[:, tap]
        states[target] = window[count:]
    return output


def recur(rows: Rows, states: Tensor, segments: Segments) -> Tensor:
    """-> [T, H, V]. states: [rows, H, K, V], which are replaced. 0 for tokens of no segment."""
    output = torch.zeros_like(rows.value)
    num_decode = segments.num_decode
    if num_decode:
        decoding = Rows(*(None if each is None else each[:num_decode] for each in rows))  # type: ignore[arg-type]
        output[:num_decode], after = step(decoding, _taken(states, segments))
        states[torch.from_numpy(segments.targets[:num_decode]).long()] = after
    for start, count, source, target in _chained(segments):
        state = states.new_zeros(states.shape[1:]) if source == ZEROS else states[source]
        for first in range(start, start + count, CHUNK):
            tokens = slice(first, min(first + CHUNK, start + count))
            part = Rows(*(None if each is None else each[tokens].transpose(0, 1) for each in rows))  # type: ignore[arg-type]
            attended, state = chunk(part, state)
            output[tokens] = attended.transpose(0, 1)
        states[target] = state
    return output


def step(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of D sequences, whose states are [D, H, K, V] -> output [D, H, V], states after it."""
    query, key, value, decay, rate = rows
    state = state * decay.exp()[..., None, None]
    if rate is not None:
        value = (value - torch.einsum("dhkv,dhk->dhv", state, key)) * rate.unsqueeze(-1)
    state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
    return torch.einsum("dhkv,dhk->dhv", state, query), state


def chunk(rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Adjacent tokens of one sequence, with heads first: [H, n, ...]. state: [H, K, V] -> output [H, n, V], the state
    after them."""
    query, key, value, decay, rate = rows
    total = decay.cumsum(1)  # from the beginning of the chunk
    is_later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(is_later, -torch.inf).exp()  # [H, n, n]
    if rate is not None:
        # Of what each token learns, the part that the tokens before it have taught is taken away: a triangular system.
        system = (key @ key.mT) * between * rate.unsqueeze(-1)
        known = (key * total.exp().unsqueeze(-1)) @ state
        value = torch.linalg.solve_triangular(
            system, (value - known) * rate.unsqueeze(-1), upper=False, unitriangular=True
        )
    output = (query * total.exp().unsqueeze(-1)) @ state + ((query @ key.mT) * between) @ value
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    return output, state * total[:, -1].exp()[:, None, None] + (key * left).mT @ value


def _taken(states: Tensor, segments: Segments) -> Tensor:
    """Copies of the states with which decode rows begin, [D, ...]."""
    sources = torch.from_numpy(segments.sources[: segments.num_decode]).long()
    taken = states[sources.clamp(min=0)]
    taken[sources == ZEROS] = 0
    return taken


def _chained(segments: Segments) -> list[tuple[int, int, int, int]]:
    """Start, tokens, source and target of the segments beyond the decode rows."""
    columns = segments.starts, segments.num_tokens, segments.sources, segments.targets
    return list(zip(*(column[segments.num_decode :].tolist() for column in columns), strict=True))
