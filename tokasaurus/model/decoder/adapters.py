"""Adapters of a rank's model: its shares of them, and which ones are in use. Source: arXiv 2106.09685."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.checkpoint.adapters import Adapter, LowRank, fit_to_base
from tokasaurus.checkpoint.info import EMBEDDING, HEAD
from tokasaurus.model.cpu.bindings import HugePageTensors
from tokasaurus.model.cpu.low_rank import LowRankRows
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.layers import Linear, LinearAdapter, VocabAdapter
from tokasaurus.model.decoder.row_adapters import RowAdapters, TiledRows
from tokasaurus.model.staging.staging import Staging
from tokasaurus.model.triton_choice import uses_triton


@dataclass(frozen=True, slots=True)
class AdapterShare:
    """A rank's share of an adapter."""

    linears: Mapping[Linear, LinearAdapter]
    embedding: VocabAdapter | None
    head: VocabAdapter | None


class ModelAdapters:
    """The adapters that are loaded, by digest, and the numbers by which rows have them. All ranks have the same."""

    def __init__(self, model: Decoder, num_adapters: int, max_rank: int = 0, max_tokens: int = 0) -> None:
        """num_adapters: most that steps may have at a time: numbers are from 1 to it. max_rank: of an adapter.
        max_tokens: of a forward, padding included. On a CPU, both are not needed."""
        self._model = model
        tiled = None
        if uses_triton(model.device, "adapters"):
            tiled = TiledRows(num_adapters, max_rank, max_tokens, model.device)
        self.rows = RowAdapters(num_adapters, tiled)
        model.use_adapters(self.rows)
        self._loaded: dict[str, AdapterShare] = {}
        self._placed: dict[int, AdapterShare] = {}
        self._shapes = {shard.source: shard.shape for shard in model.weight_shards() if shard.linear is not None}

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def share(self, adapter: Adapter) -> AdapterShare:
        """Of this rank. Raises CheckpointError if it is an adapter of another model."""
        adapter = fit_to_base(adapter, self._shapes)
        model, memory = self._model, HugePageTensors()
        changes = {change.source: change for change in adapter.low_rank}
        whole = {weight.source: weight for weight in adapter.whole}
        parts = defaultdict[Linear, list[LowRankRows]](list)
        for shard in model.weight_shards():
            change = changes.get(shard.source)
            if change is None or shard.linear is None or shard.target is None or shard.source in (EMBEDDING, HEAD):
                continue
            linear, first_row = shard.linear
            assert isinstance(linear, Linear)
            rows, columns = shard.shard
            up = _scaled(change)[rows]
            up = up if shard.order is None else up[shard.order]
            parts[linear].append(LowRankRows(first_row, torch.from_numpy(change.a)[:, columns], up))
        embedding = head = None
        if model.is_first_stage:
            if EMBEDDING in whole:
                embedding = VocabAdapter(self._as_stored(whole[EMBEDDING].weight))
            elif EMBEDDING in changes:
                change = changes[EMBEDDING]
                embedding = VocabAdapter(factors=(_scaled(change), torch.from_numpy(change.a)))
        if model.head is not None:
            if HEAD in whole:
                head = VocabAdapter(self._as_stored(whole[HEAD].weight))
            elif HEAD in changes:
                change = changes[HEAD]
                parts[model.head].append(LowRankRows(0, torch.from_numpy(change.a), _scaled(change)[model.head.tokens]))
        linears = {linear: linear.prepare_adapter(own, memory) for linear, own in parts.items()}
        return AdapterShare(linears, embedding, head)

    def random_share(self, rank: int) -> AdapterShare:
        """Of an adapter of all linear layers that are not packed, for checks."""
        parts, linears = self._model.parts_of_linears(), dict[Linear, LinearAdapter]()
        generator = torch.Generator().manual_seed(rank)
        for layer in self._model.decoder_layers():
            for linear in layer.dense_linears():
                num_inputs = linear.weight.shape[1]
                linears[linear] = LinearAdapter(
                    tuple(
                        LowRankRows(
                            first_row,
                            torch.randn((rank, num_inputs), generator=generator) / num_inputs**0.5,
                            torch.randn((num_outputs, rank), generator=generator) / rank,
                        )
                        for first_row, num_outputs in parts[linear]
                    ),
                    packed=None,
                )
        return AdapterShare(linears, None, None)

    def _as_stored(self, weight: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(weight).to(self._model.weight_dtype)

    def load(self, digest: str, share: AdapterShare) -> None:
        self._loaded[digest] = share

    def unload(self, digest: str) -> None:
        """No step has it any more. An unknown one is ignored."""
        share = self._loaded.pop(digest, None)
        for number in [number for number, placed in self._placed.items() if placed is share]:
            self.place(number, None)

    def set_rows(self, numbers: NDArray[np.int32] | None, staging: Staging | None = None) -> None:
        """numbers: of the rows that are computed next, int32 [T]; None: no row has an adapter. staging: as in
        RowAdapters.set."""
        self.rows.set(numbers, self._model.device, staging)

    @property
    def has_rows(self) -> bool:
        """Whether any of the current rows has an adapter."""
        return self.rows.numbers is not None

    @property
    def in_graphs(self) -> bool:
        """Whether graphs and compiled layers compute adapters, apart from those of `change_ends`."""
        return self.rows.tiled is not None

    def change_ends(self, numbers: NDArray[np.int32]) -> bool:
        """Whether any of these adapters changes embeddings or logits."""
        return not self.rows.outside_layers.isdisjoint(numbers.tolist())

    def place(self, number: int, digest: str | None) -> None:
        """Rows with this number have this adapter from the next step on; None: no row has the number."""
        share = None if digest is None else self._loaded[digest]
        before = self._placed.pop(number, None)
        linears = {*(() if before is None else before.linears), *(() if share is None else share.linears)}
        for linear in linears:
            linear.place_adapter(number, None if share is None else share.linears.get(linear))
        embedding, head = (None, None) if share is None else (share.embedding, share.head)
        model, is_one = self._model, self._model.head is self._model.embedding
        if model.embedding is not None:
            model.embedding.place_vocab(number, embedding, head if is_one else None)
        if model.head is not None and not is_one:
            model.head.place_vocab(number, None, head)
        self.rows.outside_layers.discard(number)
        if share is not None:
            self._placed[number] = share
            if embedding is not None or head is not None or model.head in share.linears:
                self.rows.outside_layers.add(number)


def _scaled(change: LowRank) -> Tensor:
    """Of b, float32 [outputs, ranks]."""
    return torch.from_numpy(change.b) * change.scale
