"""A model whose layers are those of transformers' own class, with our attention and linear layers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoConfig, PreTrainedModel, logging
from transformers.modeling_outputs import MoeModelOutputWithPast

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.messages.status import first_line
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.by_transformers.attention import answering
from tokasaurus.model.by_transformers.experts import ClassExperts, has_usual_experts
from tokasaurus.model.by_transformers.parts import Leaves, divide, gathered, leave_layers
from tokasaurus.model.by_transformers.probe import NUM_TOKENS, make_model
from tokasaurus.model.by_transformers.stored import Cut, find_stored
from tokasaurus.model.decoder.decoder import zero_nonfinite
from tokasaurus.model.decoder.layers import Linear, Norm
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.mesh import Mesh

# T tokens in this forward, R rows whose logits are wanted, E hidden size, H query heads, K key/value heads, D head size


class PackedLinear(Linear):
    """In the place of nn.Linear: x [..., in] -> [..., out]."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(0, 0, plain.bias is not None, plain.weight.dtype)
        self._parameters.update(plain._parameters)  # which may be other modules', too

    def forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        product = super().forward(x.flatten(0, -2), norm)
        return product.view(*x.shape[:-1], product.shape[-1])


class _States(MoeModelOutputWithPast):  # type: ignore[misc]
    """Hidden states alone: what else a class may return of its layers is None."""

    def __getattr__(self, name: str) -> None:
        return None


class TransformersModel(Model):
    """Parameters have the names of the class; `stored` says which tensors of the checkpoint they are made of."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype, directory: Path) -> None:
        """directory: has config.json and, unless weights are made up, the files of weights. Raises ValueError if ranks
        cannot have parts of the class, and CheckpointError if the stored tensors are not understood."""
        super().__init__(info, mesh, dtype)
        mesh.check(info)
        logging.set_verbosity_error()
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        # In bfloat16: without weights, torch has grouped products of no other dtype.
        self.whole: PreTrainedModel = make_model(config)
        self._stored = find_stored(self.whole, directory, info)
        self._cuts = dict[str, Cut]()
        self._stage = mesh.stage_layers(info)
        self._sinks: tuple[Tensor | None, ...] = ()
        self._calls = dict[nn.Module, tuple[int, int, int]]()
        """Number of a layer, and its heads and KV heads, when it first calls: in the order of the probe, undivided."""
        self._entering = self._rows = torch.empty(0)
        """Hidden states that enter a later stage, [1, T, E], and those whose logits are computed, [1, R, E]."""
        for name, module in list(self.whole.named_modules()):
            if type(module) is nn.Linear:
                self.whole.set_submodule(name, PackedLinear(module))
            for own_name in module._buffers.keys() - module._non_persistent_buffers_set:  # what a checkpoint has
                values = module._buffers.pop(own_name)
                module.register_parameter(own_name, nn.Parameter(values, requires_grad=False))
        self._experts = {each: ClassExperts(each) for each in self.whole.modules() if has_usual_experts(each)}
        self._run_layers = self.layers.forward
        self.layers.forward = self._states
        if mesh.num_ranks > 1:
            self._take_part()
        words = {*(self.whole._keep_in_fp32_modules_strict or ())}
        if dtype == torch.float16:
            words |= {*(self.whole._keep_in_fp32_modules or ())}
        for name, parameter in self.whole.named_parameters():
            if any(word in name for word in words):
                parameter.data = parameter.data.float()

    def _take_part(self) -> None:
        """Leave the rank's part alone. Raises ValueError if it does not run, or is not known."""
        mesh = self._mesh
        try:
            outputs = self._try(None)
            if mesh.tp_size > 1:
                self._cuts = divide(self.whole, mesh)
                outputs = self._try(None)
            if mesh.pp_size > 1:
                hidden = torch.empty((NUM_TOKENS, self.hidden_size), dtype=torch.bfloat16, device="meta")
                self._entering = hidden[None]
                leave_layers(self.whole, [*self._calls], self._stage, outputs, lambda: self._entering)
                self._try(None if mesh.is_first_stage else hidden)
                gone = [] if mesh.is_first_stage else [self.whole.get_input_embeddings()]
                gone += [] if mesh.is_last_stage else [self.whole.get_output_embeddings()]
                for name in [name for name, module in self.whole.named_modules() if module in gone]:
                    self.whole.set_submodule(name, nn.Identity())
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
            sizes = f"tp_size={mesh.tp_size}, pp_size={mesh.pp_size}"
            raise ValueError(f"{sizes}: {type(self.whole).__name__} cannot be divided: {first_line(error)}") from error

    @torch.inference_mode()
    def _try(self, hidden: Tensor | None) -> dict[nn.Module, Any]:
        """Run the layers without weights: what each module gives that is called. hidden: as of `forward`."""
        outputs = dict[nn.Module, Any]()
        with (
            torch.device("meta"),
            register_module_forward_hook(lambda module, _inputs, output: outputs.update({module: output})),
        ):
            ids, positions = torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.arange(NUM_TOKENS)
            self(ids, hidden, positions, None, lambda query, *_: query)
        return outputs

    @property
    def layers(self) -> PreTrainedModel:
        """The part of the class that gives hidden states."""
        layers: PreTrainedModel = self.whole.base_model.get_decoder()
        return layers

    def materialize(self, device: torch.device, num_positions: int) -> None:  # noqa: ARG002
        """The table of positions is the class's own."""
        memory = dict[Tensor, Tensor]()  # parameters that are one become several of the same memory

        def allocated(tensor: Tensor) -> Tensor:
            dtype = self._dtype if tensor.dtype == torch.bfloat16 else tensor.dtype
            return memory.setdefault(tensor, torch.empty(tensor.shape, dtype=dtype, device=device))

        self._apply(allocated)  # type: ignore[no-untyped-call]
        for parameter in self.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # by the checkpoint
        for module in self.layers.modules():
            if list(module.buffers(recurse=False)):  # no checkpoint has them, such as rotary frequencies
                self.layers._init_weights(module)
        own = (self.spec.layers[index].attention for index in self._stage)
        self._sinks = tuple(
            torch.zeros(each.num_heads // self._mesh.tp_size, device=device) if each.has_sinks else None for each in own
        )

    def pack_module(self, module: nn.Module) -> None:
        if isinstance(module, PackedLinear):
            is_head = module is self.whole.get_output_embeddings()
            packing = Packing(is_int8=self._packing.is_int8) if is_head else self._packing
            module.pack(self._layer_kernels, self.gemm_choice, packing=packing)
        elif module in self._experts and self._layer_kernels is not None and not self.gemm_choice.always_torch:
            self._experts[module].pack(self._layer_kernels)

    @property
    def bytes_outside_linears(self) -> int:
        return super().bytes_outside_linears + sum(experts.num_bytes for experts in self._experts.values())

    def give_back(self) -> None:
        super().give_back()
        for experts in self._experts.values():
            experts.give_back()

    def end_packing(self) -> None:
        """All but the packed weights computes in the dtype of activations."""
        for module in self.modules():
            for parameter in () if isinstance(module, PackedLinear) else module.parameters(recurse=False):
                if parameter.dtype == self._dtype:
                    parameter.data = parameter.data.to(self.activation_dtype)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        executor: LayerExecutor,  # noqa: ARG002  (the class runs its layers)
        attends: Attends,
    ) -> Tensor:
        mask = positions.new_ones((1, 1, 1, 1), dtype=torch.bool)  # with four dimensions, transformers makes no other
        with answering(partial(self._answer, attends)):
            return self.run(token_ids, hidden, position_ids=positions[None], attention_mask=mask)

    def _answer(
        self,
        attends: Attends,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Any,  # the probe has looked at it
        options: Mapping[str, Any],
    ) -> Tensor:
        """As Answers. Heads are the rank's, or those of all ranks; raises ValueError if they are neither."""
        found, mesh = (query.shape[1], key.shape[1]), self._mesh
        layer, *whole = self._calls.setdefault(module, (len(self._calls), *found))
        spec, own_layer = self.spec.layers[layer].attention, layer - self._stage.start
        has_all = [*found] == whole
        if not has_all and [mesh.tp_size * num for num in found] != whole:
            raise ValueError(f"its attention has {found[0]} heads and {found[1]} KV heads in each part")
        own, own_kv = (
            slice(start, start + length)
            for start, length in (mesh.shard(spec.num_heads, "heads"), mesh.kv_head_shard(spec.num_kv_heads))
        )
        if self._sinks and (sinks := self._sinks[own_layer]) is not None:  # new weights may have changed them
            sinks.copy_(options["s_aux"][own] if has_all else options["s_aux"])
        value_dim, dtype = value.shape[-1], value.dtype
        query, key, value = (_by_token(each.to(self.activation_dtype), spec.head_dim) for each in (query, key, value))
        num_kv_heads = spec.num_kv_heads if has_all else own_kv.stop - own_kv.start
        if found[1] < num_kv_heads:  # layers with fewer have each as often as the others need
            key, value = (each.repeat_interleave(num_kv_heads // found[1], dim=1) for each in (key, value))
        if has_all:
            query, key, value = query[:, own], key[:, own_kv], value[:, own_kv]
        key, value, is_finite = zero_nonfinite(key, value)
        attended = attends(query.contiguous(), key.contiguous(), value.contiguous(), own_layer)
        attended = torch.where(is_finite[:, None, None], attended, torch.nan)[..., :value_dim]
        if has_all:
            attended = torch.unflatten(gathered(attended.flatten(1), mesh), 1, (-1, value_dim))
        return attended.unsqueeze(0).to(dtype)

    def run(self, token_ids: Tensor, hidden: Tensor | None, **options: Any) -> Tensor:
        """As `forward`, with the class's own attention, masks and positions where options do not say others."""
        try:
            output = self.layers(**self.given(token_ids, hidden), use_cache=False, **options)
        except Leaves as leaves:
            return leaves.hidden[0].to(self.activation_dtype)
        states: Tensor = output.last_hidden_state[0]
        return states

    def given(self, token_ids: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """What the class's forward takes in this stage. Arguments as of `forward`."""
        if hidden is None:
            return {"input_ids": token_ids[None]}
        self._entering = hidden[None]
        return {"inputs_embeds": torch.full_like(hidden[None], torch.nan)}  # no layer of this stage may read them

    def logits(self, hidden: Tensor) -> Tensor:
        self._rows = hidden[None]
        try:
            logits: Tensor = self.whole(input_ids=hidden.new_zeros((1, len(hidden)), dtype=torch.int64)).logits[0]
        finally:
            self._rows = torch.empty(0)
        return logits

    def _states(self, *inputs: Any, **options: Any) -> Any:
        """In the place of the layers' forward: gives the rows that are set, so that the class's forward computes logits
        of them, with its own caps and scales."""
        return _States(last_hidden_state=self._rows) if len(self._rows) else self._run_layers(*inputs, **options)

    @property
    def sinks(self) -> tuple[Tensor | None, ...]:
        return self._sinks

    def weight_shards(self) -> list[WeightShard]:
        shards, modules = list[WeightShard](), dict(self.whole.named_modules())
        for stored in self._stored.parts:
            names = stored.target, *(name for name, own in self._stored.tied.items() if own == stored.target)
            places = [(modules.get(path), name) for path, _, name in (each.rpartition(".") for each in names)]
            owners = [(owner, name) for owner, name in places if owner and owner._parameters.get(name) is not None]
            parts = list(stored.within(self._cuts.get(stored.target))) if owners else []
            for part in parts:
                each = [part.shard(owner, name, self._experts.get(owner)) for owner, name in owners]
                shards.append(each[0] if len(each) == 1 else replace(each[0], write=partial(_write_all, each)))
            if not parts:  # other ranks have it
                shards.append(WeightShard(stored.source, stored.shape, (), None))
        return shards

    def ignores(self, source: str) -> bool:
        return source in self._stored.ignored or source in self.copies

    @property
    def copies(self) -> dict[str, str]:
        return self._stored.copies


def _write_all(shards: list[WeightShard], values: Tensor) -> None:
    """Into parameters that are one, which may have layouts of their own."""
    for shard in shards:
        assert shard.write is not None
        shard.write(values)


def _by_token(heads: Tensor, head_dim: int) -> Tensor:
    """[1, heads, T, d] -> [T, heads, D]; a head that is smaller is filled with zeros, which change no score."""
    by_token = nn.functional.pad(heads[0].transpose(0, 1), (0, head_dim - heads.shape[-1]))
    return torch.unflatten(by_token.flatten(1), 1, (-1, head_dim))  # a single head has its stride, too
