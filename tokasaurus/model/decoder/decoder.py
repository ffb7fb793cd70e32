"""The decoder that all model families share, with its attention layer and rotary embedding; what a layer computes is
its `LayerSpec` (see checkpoint/spec)."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokasaurus.checkpoint import ModelInfo, RopeInfo
from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.checkpoint.info import EMBEDDING, HEAD, HEAD_BIAS
from tokasaurus.checkpoint.pooling import HEAD_PREFIX, PoolingInfo
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, attentions_of
from tokasaurus.checkpoint.weight_files import is_old_buffer
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.cpu.experts import PackedExperts
from tokasaurus.model.cpu.layer_executor import LayerKernels
from tokasaurus.model.cpu.packed_layers import PackedLayer, PackedLayers
from tokasaurus.model.decoder.experts import Experts, Router
from tokasaurus.model.decoder.layers import (
    MLP,
    FusedColumnLinear,
    Linear,
    Norm,
    OutputShard,
    RowLinear,
    VocabShard,
)
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.row_adapters import RowAdapters
from tokasaurus.model.decoder.score_head import ScoreHead
from tokasaurus.model.decoder.state_rows import StateRows, mixing
from tokasaurus.model.decoder.states import StateLayer, make_state_layer
from tokasaurus.model.decoder.stored_tensors import as_stored
from tokasaurus.model.decoder.weights import WeightShard, allocate_parameters
from tokasaurus.model.parallel.collectives import sum_in_float32
from tokasaurus.model.parallel.mesh import Mesh

# T tokens in this forward, R rows whose logits are wanted, E hidden size, H query heads, K key/value heads, D head size

_IN_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")


class Attention(nn.Module):
    """x [T, E] -> [T, E]: `project`, attention (see attention/row_split), then `out`.

    layer_index: counted within this pipeline stage, as in the KV cache.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int, mesh: Mesh, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.layer_index = layer_index
        self.head_dim = head_dim = spec.head_dim
        head_start, self.num_heads = mesh.shard(spec.num_heads, "attention heads")
        kv_start, self.num_kv_heads = mesh.kv_head_shard(spec.num_kv_heads)
        query_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        query_shard = (head_start * head_dim, self.num_heads * head_dim)
        kv_shard = (kv_start * head_dim, self.num_kv_heads * head_dim)
        outputs = [
            OutputShard("q_proj", query_size, *query_shard),
            OutputShard("k_proj", kv_size, *kv_shard),
            OutputShard("v_proj", kv_size, *kv_shard),
        ]
        self.qkv = FusedColumnLinear(hidden_size, outputs, spec.has_qkv_bias, dtype)
        self.out = RowLinear("o_proj", query_size, query_shard, hidden_size, mesh, dtype, spec.has_out_bias)
        self.query_norm, self.key_norm = (
            None if spec.query_key_norm is None else HeadNorm(spec, spec.query_key_norm, size, *shard, mesh, dtype)
            for size, shard in ((query_size, query_shard), (kv_size, kv_shard))
        )
        self.sinks = None
        if spec.has_sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)
        self.gate = None
        """Of what is attended."""
        if spec.has_out_gate:
            outputs = [OutputShard("gate_proj", query_size, *query_shard)]
            self.gate = FusedColumnLinear(hidden_size, outputs, spec.has_qkv_bias, dtype)
        self._head_start = head_start

    def project(self, x: Tensor, norm: Norm | None, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E], normalised by `norm` -> query [T, H, D], key and value [T, K, D]; query and key are rotated."""
        return self.split_heads(self.heads(self.qkv(x, norm)), cos_sin)

    def output(self, attended: Tensor, x: Tensor, norm: Norm | None) -> Tensor:
        """attended [T, H, D] -> [T, E]. x and norm: as of project."""
        attended = attended.flatten(1)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x, norm))
        out: Tensor = self.out(attended)
        return out

    def heads(self, features: Tensor) -> Tensor:
        """[..., (H + 2K) * D] -> [..., H + 2K, D]: the features of all heads, by head."""
        return torch.unflatten(features, -1, (-1, self.head_dim))

    def split_heads(self, heads: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """heads [T, H + 2K, D] -> query [T, H, D], key and value [T, K, D]; query and key are rotated."""
        spec = self.spec
        if spec.clip is not None:
            heads = heads.clamp(-spec.clip, spec.clip)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if not spec.norms_after_rotary:
            rotated = self._normed(rotated)
        if spec.query_rotary is not None:
            query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
            rotated = torch.cat((rotate(query, cos_sin[:, :1]), rotate(key, cos_sin[:, 1:])), dim=1)
        elif spec.rotary is not None:
            rotated = rotate(rotated, cos_sin)
        if spec.norms_after_rotary:
            rotated = self._normed(rotated)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], value

    def _normed(self, rotated: Tensor) -> Tensor:
        """[T, H + K, D] of queries and keys -> the same, normalised where the layer does so."""
        if self.query_norm is None or self.key_norm is None:
            return rotated
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        return torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        shards = self.qkv.weight_shards(prefix) + self.out.weight_shards(prefix)
        shards += [] if self.gate is None else self.gate.weight_shards(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            shards += self.query_norm.weight_shards(f"{prefix}q_norm")
            shards += self.key_norm.weight_shards(f"{prefix}k_norm")
        if self.sinks is not None:
            heads = slice(self._head_start, self._head_start + self.num_heads)
            size = (self.spec.num_heads,)
            shards.append(WeightShard(f"{prefix}sinks", size, (heads,), self.sinks, self._write_sinks))
        return shards

    def _write_sinks(self, values: Tensor) -> None:
        assert self.sinks is not None
        self.sinks.data.copy_(values)  # attention backends have its address


class HeadNorm(Norm):
    """A norm of the heads [T, heads, D] of this rank's queries or keys: of each head by itself, or of all ranks' heads
    together."""

    def __init__(
        self, spec: AttentionSpec, norm: NormSpec, size: int, start: int, length: int, mesh: Mesh, dtype: torch.dtype
    ) -> None:
        """size: numbers of all heads; this rank has `length` from `start` on."""
        is_whole = spec.norm_over == "width"
        num_heads = length // spec.head_dim if spec.norm_by_head else None
        super().__init__(norm, length if is_whole else spec.head_dim, dtype, num_heads)
        self._mesh = mesh
        self._shard = (size, slice(start, start + length)) if is_whole or spec.norm_by_head else None
        self._is_whole = is_whole

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_whole:
            return super().forward(x)
        if self._mesh.tp_size == 1:
            return super().forward(x.flatten(1)).view(x.shape)
        numbers = x.flatten(1).float()
        # Ranks may have the same key heads: each then counts equally often.
        mean = sum_in_float32(numbers.square().mean(-1, keepdim=True), self._mesh) / self._mesh.tp_size
        normed = numbers * torch.rsqrt(mean + self.eps)
        return (normed if self.weight is None else normed * self.weight.float()).to(x.dtype).view(x.shape)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        if self._shard is None:
            return super().weight_shards(prefix)
        size, part = self._shard
        return [replace(shard, shape=(size,), shard=(part,)) for shard in super().weight_shards(prefix)]


def zero_nonfinite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """key and value [T, K, D] -> the same with zeros for tokens where either is not finite; bool [T], whether both are
    finite."""
    is_finite = (key.abs().amax((1, 2)) < torch.inf) & (value.abs().amax((1, 2)) < torch.inf)
    per_head = is_finite[:, None, None]
    return torch.where(per_head, key, 0), torch.where(per_head, value, 0), is_finite


class DecoderLayer(nn.Module):
    """hidden [T, E] -> [T, E]: attention, then feed-forward, each applied to the normed input and added to it, or what
    else the spec says.

    Split into two methods: the attention backend is called between them (see execution/executors). layer_index: among
    this stage's layers with attention.
    """

    def __init__(self, spec: LayerSpec, model: ModelSpec, mesh: Mesh, layer_index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.mesh = mesh
        self.table_index = model.table_of(spec)
        """Of its rotary table."""
        self._has_tables = model.num_rotary_tables > 1
        size = model.hidden_size
        norms = spec.attention_norm, spec.mlp_norm, spec.attention_out_norm, spec.mlp_out_norm
        self.attention_norm, self.mlp_norm, self.attention_out_norm, self.mlp_out_norm = (
            None if norm is None else Norm(norm, size, dtype) for norm in norms
        )
        self.attention, self.state, own = None, None, spec.mlp
        if spec.attention is not None:
            self.attention = Attention(spec.attention, size, mesh, layer_index, dtype)
        if spec.state is not None:
            self.state = make_state_layer(spec.state, size, mesh, dtype)
        self.mlp: MLP | Experts | None = None
        if own is not None:
            self.mlp = MLP(own, size, mesh, dtype) if isinstance(own, MLPSpec) else Experts(own, size, mesh, dtype)

    @property
    def own_attention(self) -> Attention:
        """Of a layer that is known to have it."""
        assert self.attention is not None
        return self.attention

    @property
    def dense_mlp(self) -> MLP:
        """The MLP of a layer that is known to have one."""
        assert isinstance(self.mlp, MLP)
        return self.mlp

    def dense_linears(self) -> list[Linear]:
        """Those that are neither experts' nor a router."""
        attention, state, mlp = self.attention, self.state, self.mlp
        linears = [] if attention is None else [attention.qkv, attention.out, attention.gate]
        linears += [] if state is None else [state.inputs, state.out]
        linears += [mlp.gate_up, mlp.down] if isinstance(mlp, MLP) else []
        return [each for each in linears if each is not None]

    def table(self, cos_sin: Tensor) -> Tensor:
        """cos_sin [T, tables, D] -> the layer's, [T, 1, D]; or the one of queries and the one of keys, [T, 2, D]."""
        if self.spec.own_attention.query_rotary is not None:
            return cos_sin[:, [self.spec.own_attention.query_rotary, self.table_index]]
        return cos_sin[:, self.table_index : self.table_index + 1] if self._has_tables else cos_sin

    def before_attention(self, hidden: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [T, E] -> query [T, H, D], key and value [T, K, D], rotated; and hidden for after_attention.

        The KV cache stays finite, because attention multiplies values of tokens that a row does not see by 0: tokens
        whose key or value is not finite get zeros for both. Their hidden state becomes NaN and stays so to the end.
        """
        query, key, value = self.own_attention.project(hidden, self.attention_norm, self.table(cos_sin))
        key, value, is_finite = zero_nonfinite(key, value)
        return query, key, value, torch.where(is_finite[:, None], hidden, torch.nan)

    def after_attention(self, attended: Tensor | None, hidden: Tensor) -> Tensor:
        """attended [T, H, D], hidden [T, E] from before_attention -> hidden [T, E] for the next layer. attended: None
        if the layer has no attention."""
        mixed: Tensor | None = None
        if attended is not None:
            mixed = self.own_attention.output(attended, hidden, self.attention_norm)
        if self.state is not None:
            moved: Tensor = self.state(hidden, self.attention_norm)
            mixed = moved if mixed is None else mixed + moved
        added = 0 if mixed is None else self._added(mixed, self.attention_out_norm)
        if self.mlp is None:
            return hidden + added
        if self.spec.is_parallel:
            fed: Tensor = self.mlp(hidden, self.mlp_norm or self.attention_norm)
            return hidden + added + self._added(fed, self.mlp_out_norm)
        hidden = hidden + added
        fed = self.mlp(hidden, self.mlp_norm)
        return hidden + self._added(fed, self.mlp_out_norm)

    def run(self, hidden: Tensor, cos_sin: Tensor, attends: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Tensor:
        """hidden [T, E] -> [T, E], both halves. attends: as the first arguments of Attends."""
        attended: Tensor | None = None
        if self.attention is not None:
            query, key, value, hidden = self.before_attention(hidden, cos_sin)
            attended = attends(query, key, value, self.attention.layer_index)
        return self.after_attention(attended, hidden)

    def _added(self, output: Tensor, norm: Norm | None) -> Tensor:
        """What is added to the hidden states for the output of attention or MLP."""
        output = output if norm is None else norm(output)
        return output if self.spec.residual_multiplier == 1 else output * self.spec.residual_multiplier

    def packed(self) -> PackedLayer | None:
        """This layer for the kernels; None unless all its linear layers are packed for them, and they compute such a
        layer."""
        attention, state, mlp = self.attention, self.state, self.mlp
        if not PackedLayers.computes(self.spec) or mlp is None:
            return None
        if attention is not None:
            first, last, heads = attention.qkv, attention.out, (attention.query_norm, attention.key_norm)
        else:
            assert state is not None
            first, last, heads = state.inputs, state.out, (None, None)
            if state.packed is None:
                return None
        qkv, out, fed = first.packed_whole, last.packed_whole, mlp.packed
        gate = None if attention is None or attention.gate is None else attention.gate.packed_whole
        if qkv is None or out is None or fed is None or (gate is None) == self.spec.has_out_gate:
            return None
        if isinstance(fed, PackedExperts) and not fed.has_router:
            return None
        mlp_norm = self.mlp_norm or (self.attention_norm if self.spec.is_parallel else None)
        norms = self.attention_norm, mlp_norm, self.attention_out_norm, self.mlp_out_norm, *heads
        packed_norms = tuple(None if norm is None else norm.packed for norm in norms)
        has_rotary = self.spec.attention is not None and self.spec.attention.rotary is not None
        rotary = self.table_index if has_rotary else -1
        adapters = [linear.packed_adapters for linear in self.dense_linears()]
        if state is not None or gate is not None:
            adapters = []  # these take none
        packed_state = None if state is None else state.packed
        places = qkv, out, fed, packed_norms, (*adapters, None, None, None, None)[:4], packed_state, gate
        return PackedLayer(self.spec, rotary, *places)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        norms = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.mlp_norm,
            "attention_out_norm": self.attention_out_norm,
            "mlp_out_norm": self.mlp_out_norm,
        }
        parts = ("self_attn", self.attention), ("state", self.state), ("mlp", self.mlp)
        shards = [shard for name, part in parts if part is not None for shard in part.weight_shards(f"{prefix}{name}.")]
        for name, norm in norms.items():
            shards += [] if norm is None else norm.weight_shards(f"{prefix}{name}")
        return shards


class Decoder(Model):
    """This rank's stage and shard of a model of our own layers."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> None:
        mesh = mesh.for_model(info)
        super().__init__(info, mesh, dtype)
        self._rotary: RotaryTable | None = None
        self.row_adapters: RowAdapters | None = None
        """Adapters of the rows that are computed next; None if there are never any."""
        stage, spec = mesh.stage_layers(info), info.spec
        scale = torch.tensor(spec.embedding_scale, dtype=dtype)
        self.embedding_scale = float(scale)
        """Factor of embeddings, rounded to their dtype."""
        with torch.device("meta"):
            needs_embedding = mesh.is_first_stage or (mesh.is_last_stage and info.tie_embeddings)
            has_bias = spec.has_head_bias and mesh.is_last_stage
            self.embedding = (
                VocabShard(info, mesh, dtype, has_bias and info.tie_embeddings) if needs_embedding else None
            )
            own = [spec.layers[number] for number in stage]
            self.layers = nn.ModuleList(
                DecoderLayer(layer, spec, mesh, len(attentions_of(own[:index])), dtype)
                for index, layer in enumerate(own)
            )
            self.final_norm = Norm(spec.final_norm, info.hidden_size, dtype) if mesh.is_last_stage else None
            needs_head = mesh.is_last_stage and not info.tie_embeddings
            self.lm_head = VocabShard(info, mesh, dtype, has_bias) if needs_head else None
            has_scores = info.pooling is not None and info.pooling.task != "embed"
            self.score_head = ScoreHead(info) if has_scores and mesh.is_last_stage else None
        if states := [layer.state for layer in own if layer.state is not None]:
            self.states = StateRows(states, mesh.tp_size)
            for each in self.decoder_layers():
                if each.state is not None:
                    each.state.use(self.states)

    def materialize(self, device: torch.device, num_positions: int) -> None:
        allocate_parameters(self, device)
        self._rotary = RotaryTable(self._info.spec, self._info.head_dim, num_positions, device)

    def pack_module(self, module: nn.Module) -> None:
        stored = Packing(is_int8=self._packing.is_int8)  # embedding, LM head and routers stay as they are stored
        if module is self.head:
            assert isinstance(module, VocabShard)
            module.pack(self._layer_kernels, self.gemm_choice, module is self.embedding, stored)
        elif module is self.embedding:  # plain numbers stay as they are: rows of packed ones are not contiguous
            assert isinstance(module, VocabShard)
            if module.has_blocks:
                module.pack(self._layer_kernels, packing=stored)
        elif isinstance(module, StateLayer):
            if self._layer_kernels is not None:
                module.use_kernels(self._layer_kernels.states)
        elif isinstance(module, Linear) and not isinstance(module, VocabShard) and self._compiler is None:
            packing = stored if isinstance(module, Router) else self._packing
            module.pack(self._layer_kernels, self.gemm_choice, packing=packing)

    def end_packing(self) -> None:
        """Pack the layers, once every module is packed, or compile the LM head where it is not."""
        if self._compiler is not None:
            if self.head is not None:
                self.head.compile_product(self._compiler)
        elif self._layer_kernels is not None and self._mesh.tp_size == 1:
            self.packed_layers = self._pack_layers(self._layer_kernels)

    def use_adapters(self, row_adapters: RowAdapters) -> None:
        """From now on, adapters may add to the outputs of linear layers, but not those of experts, in the rows that
        row_adapters says. Call once all is packed."""
        self.row_adapters = row_adapters
        parts = {} if row_adapters.tiled is None else self.parts_of_linears()
        for layer in self.decoder_layers():
            for each in layer.dense_linears():
                each.use_adapters(row_adapters, parts.get(each, ()))
        for vocab in filter(None, (self.embedding, self.lm_head)):
            vocab.use_adapters(row_adapters)
        if self.packed_layers is not None:
            assert self._layer_kernels is not None
            self.packed_layers = self._pack_layers(self._layer_kernels)

    def parts_of_linears(self) -> dict[nn.Module, list[tuple[int, int]]]:
        """Of each linear layer here that is not packed, the first output of each of the fused layers, and how many it
        has."""
        parts = defaultdict[nn.Module, list[tuple[int, int]]](list)
        for shard in self.weight_shards():
            if shard.linear is not None and shard.target is not None:
                linear, first_row = shard.linear
                parts[linear].append((first_row, len(shard.target)))
        return parts

    @property
    def rotary(self) -> "RotaryTable":
        assert self._rotary is not None, "materialize must come first"
        return self._rotary

    def reserve(self, num_tokens: int, num_logit_rows: int) -> None:
        if self.packed_layers is not None:
            self.packed_layers.reserve(num_tokens)
        if self.head is not None:
            self.head.reserve(num_logit_rows)

    def reserve_experts(self, num_tokens: int) -> None:
        for layer in self.decoder_layers():
            if isinstance(layer.mlp, Experts) and layer.mlp.packed is not None:
                layer.mlp.packed.reserve(num_tokens, layer.mlp.router.spec.num_chosen)

    @contextmanager
    def recording_experts(self, num_tokens: int) -> Iterator[Tensor]:
        """Inside, forwards of up to num_tokens write which experts each token has to the yielded tensor, int32 [layers,
        num_tokens, K]; layers without experts leave zeros. Compiled layers and graphs write nothing."""
        shape = len(self.layers), num_tokens, self.spec.num_chosen_experts
        recorded = torch.zeros(shape, dtype=torch.int32, device=self.device)
        places = zip((layer.mlp for layer in self.decoder_layers()), recorded, strict=True)
        experts = [(mlp, chosen) for mlp, chosen in places if isinstance(mlp, Experts)]
        for mlp, chosen in experts:
            mlp.record(chosen)
        try:
            yield recorded
        finally:
            for mlp, _ in experts:
                mlp.record(None)

    def _pack_layers(self, kernels: LayerKernels) -> PackedLayers | None:
        packed = [layer.packed() for layer in self.decoder_layers()]
        whole_layers = [layer for layer in packed if layer is not None]
        if not packed or len(whole_layers) < len(packed) or all(layer.state is not None for layer in whole_layers):
            return None
        return PackedLayers(kernels, whole_layers)

    @property
    def head(self) -> VocabShard | None:
        """The LM head; None unless this is the last stage."""
        if self.final_norm is None:
            return None
        return self.embedding if self.lm_head is None else self.lm_head

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    @property
    def sinks(self) -> tuple[Tensor | None, ...]:
        return tuple(
            None if layer.attention.sinks is None else layer.attention.sinks.data
            for layer in self.decoder_layers()
            if layer.attention is not None
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> what enters the first stage, [T, E]."""
        assert self.embedding is not None, "only the first stage embeds"
        rows = self.embedding.embed(token_ids)
        if self.embedding_scale != 1:
            rows = rows * self.embedding_scale
        return rows.to(self.activation_dtype)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        executor: LayerExecutor,
        attends: Attends,
    ) -> Tensor:
        if hidden is None:
            hidden = self.embed(token_ids)
        with mixing(self.states):
            return executor.run(hidden, self.rotary.at(positions), attends)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.head
        assert head is not None, "the last stage has an LM head"
        assert self.final_norm is not None
        return head.logits(hidden, self.final_norm)

    @property
    def pooling(self) -> PoolingInfo | None:
        """How hidden states become vectors or scores; None if the model generates."""
        return self._info.pooling

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] from the last stage's `forward` -> float32 [n, E], after the final norm."""
        assert self.final_norm is not None
        normed: Tensor = self.final_norm(hidden.float())
        return normed

    def scored(self, pooled: Tensor) -> Tensor:
        """pooled: float32 [R, E], of `normed` -> the score head's outputs [R, L]; the same of an embedding model."""
        if self.score_head is None:
            return pooled
        scores: Tensor = self.score_head(pooled)
        return scores

    def weight_shards(self) -> list[WeightShard]:
        info, mesh = self._info, self._mesh
        stage, spec = mesh.stage_layers(info), info.spec
        shards: list[WeightShard] = []
        elsewhere = {spec.layers[index] for index in range(info.num_layers) if index not in stage}
        with torch.device("meta"):
            templates = {layer: DecoderLayer(layer, spec, Mesh(), 0, self._dtype) for layer in elsewhere}
        for index in range(info.num_layers):
            prefix = f"model.layers.{index}."
            if index in stage:
                layer = self.layers[index - stage.start]
                assert isinstance(layer, DecoderLayer)
                shards += layer.weight_shards(prefix)
            else:
                shards += map(_without_target, templates[spec.layers[index]].weight_shards(prefix))
        vocab_shape = (info.vocab_size, info.hidden_size)
        shards += _vocab_shards(self.embedding, info.embedding_tensor, vocab_shape)
        if not info.tie_embeddings:
            shards += _vocab_shards(self.lm_head, HEAD, vocab_shape)
        if spec.has_head_bias:
            own = [] if self.head is None else self.head.bias_shards(HEAD_BIAS)
            shards += own or [WeightShard(HEAD_BIAS, vocab_shape[:1], (), None)]
        if self.final_norm is not None:
            shards += self.final_norm.weight_shards("model.norm")
        else:
            with torch.device("meta"):
                norm = Norm(spec.final_norm, info.hidden_size, self._dtype)
            shards += map(_without_target, norm.weight_shards("model.norm"))
        if info.pooling is not None and info.pooling.task != "embed":
            with torch.device("meta"):
                head = ScoreHead(info) if self.score_head is None else self.score_head
            own = head.weight_shards(vocab_shape)
            shards += own if head is self.score_head else map(_without_target, own)
        return as_stored(shards, info)

    def ignores(self, source: str) -> bool:
        """Whether to skip this checkpoint tensor, which the model does not use.

        These are buffers of old checkpoints, an LM head or embedding that is stored beside an equal one or that gives
        no logits, a score head where vectors are wanted, and layers that draft tokens.
        """
        if self.pooling is not None and (source == HEAD_BIAS or source.startswith(HEAD_PREFIX)):
            return True
        if is_old_buffer(source) or (self._info.tie_embeddings and source in (EMBEDDING, HEAD)):
            return True
        has_draft_layers = FAMILIES[self._info.family].stored.has_draft_layers
        if has_draft_layers and source.startswith("mtp."):
            return True
        layer = _IN_LAYER.match(source) if has_draft_layers else None
        return layer is not None and int(layer[1]) >= self._info.num_layers


def _without_target(shard: WeightShard) -> WeightShard:
    """The same tensor, which another stage has."""
    return WeightShard(shard.source, shard.shape, shard.shard, None, linear=shard.linear)


def _vocab_shards(shard: VocabShard | None, source: str, shape: tuple[int, ...]) -> list[WeightShard]:
    """shard: None if another stage has the matrix."""
    return [WeightShard(source, shape, (), None)] if shard is None else shard.weight_shards(source)


def inverse_frequencies(rope: RopeInfo, head_dim: int, num_positions: int) -> Tensor:
    """float32 [D / 2]: radians per position of each pair of channels. Source: arXiv 2104.09864.

    head_dim D: channels of a head that are rotated. num_positions: tokens of the longest sequence.

    Each scaling divides frequencies by `factor`: "linear" all of them; "llama3" those whose wavelength is long relative
    to the original context, keeps the high ones, and interpolates between (source: the Llama 3.1 model card); "yarn"
    likewise, but interpolates by channel (source: arXiv 2309.00071). "longrope" has a factor for each (2402.13753).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling_type == "default":
        return frequencies
    if rope.scaling_type == "linear":
        return frequencies / rope.factor
    if rope.scaling_type == "longrope":
        factors = rope.long_factors if rope.has_long_factors(num_positions) else rope.short_factors
        return frequencies / torch.tensor(factors)
    if rope.scaling_type == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
    else:
        num_turns = rope.original_context_length * frequencies / (2 * math.pi)
        kept = (num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_ramp(rope: RopeInfo, head_dim: int) -> Tensor:
    """float32 [D / 2]: 0 for pairs that turn more than beta_fast times in the original context, 1 for pairs that turn
    less than beta_slow times, and a straight line between."""

    def pair_that_turns(num_turns: float) -> float:
        """Index of the pair of channels, with a fraction."""
        wavelength = rope.original_context_length / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0, 1)


_POSITIONS_AT_ONCE = 1 << 16
"""For which cosines and sines are made together: intermediate results take more memory than these."""


class RotaryTable:
    """Cosines and sines of every position; looked up once per forward for all layers."""

    def __init__(self, spec: ModelSpec, head_dim: int, num_positions: int, device: torch.device) -> None:
        tables = torch.empty(num_positions, spec.num_rotary_tables, head_dim)
        tables[:, len(spec.rotary) :, : head_dim // 2], tables[:, len(spec.rotary) :, head_dim // 2 :] = 1, 0
        frequencies = [inverse_frequencies(rope, rope.num_rotated(head_dim), num_positions) for rope in spec.rotary]
        for start in range(0, num_positions, _POSITIONS_AT_ONCE):
            part = tables[start : start + _POSITIONS_AT_ONCE]
            for index, rope in enumerate(spec.rotary):
                part[:, index] = _rows(rope, head_dim, frequencies[index], torch.arange(start, start + len(part)))
        self.cos_sin = tables.flatten(1).to(device)
        """float32 [num_positions, tables * D]: of each table D / 2 cosines, then D / 2 sines."""
        self._head_dim = head_dim

    def at(self, positions: Tensor) -> Tensor:
        """positions [T] -> float32 [T, tables, D]: D / 2 cosines, then D / 2 sines."""
        return self.cos_sin[positions].view(len(positions), -1, self._head_dim)


def _rows(rope: RopeInfo, head_dim: int, frequencies: Tensor, positions: Tensor) -> Tensor:
    """frequencies [rotated channels / 2], positions [n] -> float32 [n, D]. Channels that stay have the angle 0."""
    angles = torch.outer(positions.float(), frequencies)
    ones = torch.ones(len(positions), head_dim // 2 - len(frequencies))
    factor: float | Tensor = rope.attention_factor
    if rope.position_scale:
        turns = (positions.unsqueeze(1) + rope.position_offset) // rope.original_context_length
        factor = factor * (1 + rope.position_scale * (1 + turns).log())
    return torch.cat((angles.cos() * factor, ones, angles.sin() * factor, torch.zeros_like(ones)), dim=-1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, H, D], cos_sin [T, 1, D] -> [T, H, D]; computed in float32, to keep the angles precise."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def build_decoder(info: ModelInfo, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    """This rank's part of the model, on the meta device."""
    return Decoder(info, mesh, dtype)
