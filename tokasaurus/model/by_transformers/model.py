"""A model whose layers are those of transformers' own class, with our attention and linear layers."""

from collections.abc import Callable
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
from tokasaurus.model.attention.row_split import Attends, attended_by_operation, attending
from tokasaurus.model.by_transformers.experts import ClassExperts, has_usual_experts
from tokasaurus.model.by_transformers.parts import divide, gathered, layers_with, leave_layers, replace_forward
from tokasaurus.model.by_transformers.probe import CLASS_ERRORS, NUM_TOKENS, Call, answering, calls_of, make_model
from tokasaurus.model.by_transformers.stored import Cut, find_stored
from tokasaurus.model.decoder.compile import MAX_COMPILED_TOKENS, relate_sizes
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
        self._entering: Tensor | None = None
        """What enters this stage in place of embeddings, [1, T, E]; None: the embeddings."""
        self._leaving: Tensor | None = None
        """What leaves this stage, [1, T, E], if it is not the last."""
        for name, module in list(self.whole.named_modules()):
            if type(module) is nn.Linear:
                self.whole.set_submodule(name, PackedLinear(module))
            for own_name in module._buffers.keys() - module._non_persistent_buffers_set:  # what a checkpoint has
                values = module._buffers.pop(own_name)
                module.register_parameter(own_name, nn.Parameter(values, requires_grad=False))
        self._experts = {each: ClassExperts(each) for each in self.whole.modules() if has_usual_experts(each)}
        calls = self._calls_of(None)
        self._layers = {module: (index, True) for index, module in enumerate(calls)}
        """Number of the layer that each module calls attention in, and whether with the heads of all ranks."""
        names = {parameter: name for name, parameter in self.whole.named_parameters()}
        sources = [names.get(call.options.get("s_aux")) for call in calls.values()]
        self._sources = sources[self._stage.start : self._stage.stop]
        """Parameters that the sinks of this stage's layers are copied from."""
        if mesh.num_ranks > 1:
            self._take_part(calls)
        if mesh.is_first_stage:
            replace_forward(self.whole.get_input_embeddings(), self._embedded)
        words_of_float32 = self.whole._get_dtype_plan(dtype)
        for name, parameter in self.whole.named_parameters():
            if any(word in name for word in words_of_float32):
                parameter.data = parameter.data.float()

    def _take_part(self, calls: dict[nn.Module, Call]) -> None:
        """Leave the rank's part alone. calls: of the whole class. Raises ValueError if it does not run, or is not
        known."""
        mesh, outputs = self._mesh, dict[nn.Module, Any]()
        try:
            if mesh.tp_size > 1:
                self._cuts = divide(self.whole, mesh)
            with register_module_forward_hook(lambda module, _inputs, output: outputs.update({module: output})):
                own = self._calls_of(None)
            for index, (module, call) in enumerate(own.items()):
                num, whole = call.heads, calls[module].heads
                if num != whole and [mesh.tp_size * each for each in num] != whole:
                    raise ValueError(f"its attention has {num[0]} heads and {num[1]} KV heads in each part")
                self._layers[module] = index, num == whole
            if mesh.pp_size > 1:
                hidden = torch.empty((NUM_TOKENS, self.hidden_size), dtype=torch.bfloat16, device="meta")
                leave_layers(layers_with(self.whole, [*calls]), self._stage, outputs, hidden, self._at_edge)
                self._calls_of(None if mesh.is_first_stage else hidden)
                gone = [] if mesh.is_first_stage else [self.whole.get_input_embeddings()]
                gone += [] if mesh.is_last_stage else [self.whole.get_output_embeddings()]
                for name in [name for name, module in self.whole.named_modules() if module in gone]:
                    self.whole.set_submodule(name, nn.Identity())
        except CLASS_ERRORS as error:
            sizes = f"tp_size={mesh.tp_size}, pp_size={mesh.pp_size}"
            raise ValueError(f"{sizes}: {type(self.whole).__name__} cannot be divided: {first_line(error)}") from error

    def _calls_of(self, hidden: Tensor | None) -> dict[nn.Module, Call]:
        """As calls_of, of this rank. hidden: as of `forward`."""
        return calls_of(lambda token_ids, positions: self.run(token_ids, hidden, positions))

    def _embedded(self, own: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return own(*inputs) if self._entering is None else self._entering

    def _at_edge(self, is_earlier: bool, _own: Callable[..., Tensor], states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What a layer of another stage gives, where the one before gives these states, [1, T, E]: what enters this
        stage, or what leaves it."""
        if is_earlier:
            assert self._entering is not None
            return self._entering
        if self._leaving is None:
            self._leaving = states
        return states

    @property
    def layers(self) -> PreTrainedModel:
        """The part of the class that gives hidden states."""
        base = self.whole.base_model  # itself, if base_model_prefix names none of its modules, as Llama 4's does
        layers: PreTrainedModel = self.whole.model if base is self.whole else base.get_decoder()
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
        _, num_heads = self._mesh.shard(self._info.num_heads, "heads")
        self._sinks = tuple(each and torch.zeros(num_heads, device=device) for each in self._sources)

    def pack_module(self, module: nn.Module) -> None:
        is_head = module is self.whole.get_output_embeddings()
        if self._compiler is not None and not is_head:  # it reads plain weights
            return
        if isinstance(module, PackedLinear):
            packing = Packing(is_int8=self._packing.is_int8) if is_head else self._packing
            module.pack(self._layer_kernels, self.gemm_choice, packing=packing)
        elif module in self._experts and self._layer_kernels is not None and not self.gemm_choice.always_torch:
            self._experts[module].pack(self._layer_kernels)

    @property
    def bytes_outside_linears(self) -> int:
        return super().bytes_outside_linears + sum(experts.num_bytes for experts in self._experts.values())

    def reserve_experts(self, num_tokens: int) -> None:
        for experts in self._experts.values():
            experts.reserve(num_tokens)

    def give_back(self) -> None:
        super().give_back()
        for experts in self._experts.values():
            experts.give_back()

    def end_packing(self) -> None:
        """All but the packed weights computes in the dtype of activations."""
        if self._compiler is not None:
            self._compiled = self._compiler.compile(self._with_related_sizes)
        for module in self.modules():
            for parameter in () if isinstance(module, PackedLinear) else module.parameters(recurse=False):
                if parameter.dtype == self._dtype:
                    parameter.data = parameter.data.to(self.activation_dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        self._entering = None
        rows: Tensor = self.whole.get_input_embeddings()(token_ids[None])[0]
        return rows

    def forward(
        self, token_ids: Tensor, hidden: Tensor | None, positions: Tensor, _executor: LayerExecutor, attends: Attends
    ) -> Tensor:
        for sinks, source in zip(self._sinks, self._sources, strict=True):
            if sinks is not None and source is not None:  # new weights may have changed them
                parts = self.whole.get_parameter(source).view(-1, len(sinks))  # of the rank's heads, or of all ranks'
                sinks.copy_(parts[self._mesh.tp_rank % len(parts)])
        compiler = self._compiler
        if compiler is None or compiler.has_failed or len(positions) > MAX_COMPILED_TOKENS:
            with answering(partial(self._answer, attends)):
                return self.run(token_ids, hidden, positions)
        with attending(attends):  # checks give hidden states to the first stage, too: they need no other function
            return self._compiled(token_ids, self.embed(token_ids) if hidden is None else hidden, positions)

    def _with_related_sizes(self, token_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """As `forward`, to be compiled. The compiler sees no cache: nothing else reads that."""
        relate_sizes(token_ids, hidden, positions)
        with answering(partial(self._answer, attended_by_operation)):
            return self.run(token_ids, hidden, positions)

    def _answer(
        self, attends: Attends, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any
    ) -> Tensor:
        """As Answers. The probe has looked at mask and options."""
        (layer, has_all), mesh = self._layers[module], self._mesh
        spec, value_dim, dtype = self.spec.layers[layer].own_attention, value.shape[-1], value.dtype
        own_kv = mesh.kv_head_shard(spec.num_kv_heads)
        num_kv_heads = spec.num_kv_heads if has_all else own_kv[1]
        query, key, value = (_by_token(each.to(self.activation_dtype), spec.head_dim) for each in (query, key, value))
        if key.shape[1] < num_kv_heads:  # layers with fewer have each as often as the others need
            key, value = (each.repeat_interleave(num_kv_heads // each.shape[1], dim=1) for each in (key, value))
        if has_all:
            query = query.narrow(1, *mesh.shard(spec.num_heads, "heads"))
            key, value = (each.narrow(1, *own_kv) for each in (key, value))
        key, value, is_finite = zero_nonfinite(key, value)
        attended = attends(query.contiguous(), key.contiguous(), value.contiguous(), layer - self._stage.start)
        attended = torch.where(is_finite[:, None, None], attended, torch.nan)[..., :value_dim]
        if has_all:
            attended = torch.unflatten(gathered(attended.flatten(1), mesh), 1, (-1, value_dim))
        return attended.unsqueeze(0).to(dtype)

    def run(self, token_ids: Tensor, hidden: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """As `forward`, with the class's attention. positions: None if the class counts and masks by itself."""
        inputs = self.given(token_ids, hidden)
        if positions is not None:  # with a mask of four dimensions, transformers makes no other
            mask = positions.new_ones((1, 1, 1, 1), dtype=torch.bool)
            inputs |= {"position_ids": positions[None], "attention_mask": mask}
        output = self.layers(**inputs, use_cache=False)
        states: Tensor = output.last_hidden_state if self._leaving is None else self._leaving
        return states[0].to(self.activation_dtype)

    def given(self, token_ids: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        """What the class's forward takes in this stage. Arguments as of `forward`."""
        self._entering, self._leaving = None if hidden is None else hidden[None], None
        if hidden is None or self._mesh.is_first_stage:
            return {"input_ids": token_ids[None]}
        return {"inputs_embeds": torch.full_like(hidden[None], torch.nan)}  # no layer of this stage may read them

    def logits(self, hidden: Tensor) -> Tensor:
        """By the class's own forward, with its caps and scales, for which the layers give these rows."""
        self.layers.forward = lambda *_, **__: _States(last_hidden_state=hidden[None])
        try:
            logits: Tensor = self.whole(input_ids=hidden.new_zeros((1, len(hidden)), dtype=torch.int64)).logits[0]
        finally:
            del self.layers.forward
        return logits

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
