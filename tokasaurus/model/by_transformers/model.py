"""A model whose layers are those of transformers' own class, with our attention and linear layers."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, logging
from transformers.modeling_outputs import MoeModelOutputWithPast

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.messages.status import first_line
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.by_transformers.attention import PagedAnswers, answering
from tokasaurus.model.by_transformers.probe import make_model
from tokasaurus.model.by_transformers.ranks import divide
from tokasaurus.model.by_transformers.stages import InPlaceOf, Leaves, leave_layers, outputs_of_modules
from tokasaurus.model.by_transformers.stored import Cut, find_stored
from tokasaurus.model.decoder.layers import Linear, Norm
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.mesh import Mesh

_NUM_TRIED = 40
"""Tokens of the run without weights."""

# T tokens in this forward, R rows whose logits are wanted, E hidden size


class PackedLinear(Linear):
    """In the place of nn.Linear: x [..., in] -> [..., out]."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, plain.weight.dtype)

    def forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        product = super().forward(x.flatten(0, -2), norm)
        return product.view(*x.shape[:-1], product.shape[-1])


class _States(MoeModelOutputWithPast):  # type: ignore[misc]
    """Hidden states alone: what else a class may return of its layers is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(InPlaceOf):
    """In the place of the layers: gives the hidden states that are set, so that the class's forward computes logits of
    them, with its own caps and scales."""

    @property
    def decoder(self) -> "_Given":
        """Some classes call this part of their layers' module."""
        return self

    def forward(self, *_: Any, **__: Any) -> _States:
        return _States(last_hidden_state=self.hidden)


class TransformersModel(Model):
    """Parameters have the names of the class; `stored` says which tensors of the checkpoint they are made of."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype, directory: Path) -> None:
        """directory: has config.json and, unless weights are made up, the files of weights. Raises ValueError if ranks
        cannot have parts of the class, and CheckpointError if the stored tensors are not understood."""
        super().__init__(info, mesh, dtype)
        mesh.check(info)
        logging.set_verbosity_error()
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        whole = make_model(config)  # in bfloat16: without weights, torch has grouped products of no other dtype
        self._stored = find_stored(whole, directory, info)
        in_float32 = {*(whole._keep_in_fp32_modules_strict or ())}
        if dtype == torch.float16:
            in_float32 |= {*(whole._keep_in_fp32_modules or ())}
        self._in_float32 = re.compile("|".join(in_float32 or {"^$"}))
        for name, module in list(whole.named_modules()):
            if type(module) is nn.Linear:
                with torch.device("meta"):
                    _set(whole, name, PackedLinear(module))
        self._ends = whole.get_input_embeddings(), whole.get_output_embeddings()  # which other stages may not have
        assert isinstance(self._ends[1], PackedLinear)
        self.layers: PreTrainedModel = whole.base_model
        self.whole = whole
        """With _Given in the place of `layers`."""
        self._cuts = dict[str, Cut]()
        self._elsewhere: tuple[InPlaceOf, ...] = ()
        """In the place of other stages' layers."""
        self._answers: PagedAnswers | None = None
        self._sinks: tuple[Tensor | None, ...] = ()
        # Transformers takes a mask of four dimensions as it is, and makes none of its own.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device="meta")
        if mesh.num_ranks > 1:
            self._take_part()
        self._given = _Given(self.layers)
        setattr(whole, whole.base_model_prefix, self._given)

    def _take_part(self) -> None:
        """Leave the rank's part alone. Raises ValueError if it does not run, or is not known."""
        mesh = self._mesh
        try:
            outputs, calls = self._try()
            if mesh.tp_size > 1:
                self._cuts = divide(self.whole, mesh)
                outputs, divided = self._try()
                for heads, whole in zip(divided.values(), calls.values(), strict=True):
                    if heads not in (whole, tuple(num / mesh.tp_size for num in whole)):
                        raise ValueError(f"its attention has {heads[0]} heads and {heads[1]} KV heads in each part")
            if mesh.pp_size == 1:
                return
            entering = torch.empty((_NUM_TRIED, self.hidden_size), dtype=torch.bfloat16, device="meta")
            kept = leave_layers(self.layers, list(calls), mesh.stage_layers(self._info), outputs, entering[None].shape)
            self._elsewhere = tuple(each for each in self.layers.modules() if isinstance(each, InPlaceOf))
            kept |= self._try(None if mesh.is_first_stage else entering)[0].keys()
        except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
            sizes = f"tp_size={mesh.tp_size}, pp_size={mesh.pp_size}"
            raise ValueError(f"{sizes}: {type(self.whole).__name__} cannot be divided: {first_line(error)}") from error
        root = self.layers if mesh.is_last_stage else self.whole
        for name, module in reversed(list(root.named_modules())):
            if name and module not in kept and list(module.parameters(recurse=False)):
                _set(root, name, nn.Identity())  # only other stages call it

    def _try(self, hidden: Tensor | None = None) -> tuple[dict[nn.Module, Any], dict[nn.Module, tuple[int, int]]]:
        """Run layers without weights: the outputs of their modules, and heads and KV heads of each that attends."""
        calls = dict[nn.Module, tuple[int, int]]()

        def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
            calls[module] = query.shape[1], key.shape[1]
            return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

        with torch.inference_mode(), torch.device("meta"), answering(look), outputs_of_modules() as outputs:
            ids, positions = torch.zeros(_NUM_TRIED, dtype=torch.int64), torch.arange(_NUM_TRIED)[None]
            self.run(ids, hidden, position_ids=positions, attention_mask=self._no_mask)
        return outputs, calls

    def materialize(self, device: torch.device, num_positions: int) -> None:  # noqa: ARG002
        """The table of positions is the class's own."""
        for path, owner in self.named_modules():
            for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
                dtype = self._dtype if tensor.dtype == torch.bfloat16 else tensor.dtype
                if self._in_float32.search(f"{path}.{name}"):
                    dtype = torch.float32
                empty = torch.empty(tensor.shape, dtype=dtype, device=device)
                if name in owner._non_persistent_buffers_set:
                    owner.register_buffer(name, empty, persistent=False)
                    continue
                owner._buffers.pop(name, None)  # what a checkpoint has is a parameter here
                parameter = nn.Parameter(empty, requires_grad=False)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # by the checkpoint
                owner.register_parameter(name, parameter)
        owners = self._owners()
        for name, own in self._stored.tied.items():
            if name in owners and own in owners:
                (owner, own_name), (of_own, tied_to) = owners[name], owners[own]
                tied = nn.Parameter(of_own.get_parameter(tied_to).data, requires_grad=False)
                owner.register_parameter(own_name, tied)
        self._compute_buffers()
        tp_size = self._mesh.tp_size
        self._sinks = tuple(
            torch.zeros(spec.num_heads // tp_size, device=device) if spec.has_sinks else None
            for spec in self._own_specs
        )
        self._no_mask = torch.ones_like(self._no_mask, device=device)

    def _compute_buffers(self) -> None:
        """Numbers that no checkpoint has, such as rotary frequencies, as the class computes them."""
        for module in self.layers.modules():
            if list(module.buffers(recurse=False)):
                self.layers._init_weights(module)

    def pack_module(self, module: nn.Module) -> None:
        if isinstance(module, PackedLinear):
            is_head = module is self._ends[1]
            packing = Packing(is_int8=self._packing.is_int8) if is_head else self._packing
            module.pack(self._layer_kernels, self.gemm_choice, packing=packing)

    def end_packing(self) -> None:
        """All but the packed weights computes in the dtype of activations."""
        dtype = self.activation_dtype
        for module in self.modules():
            if isinstance(module, PackedLinear):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == self._dtype:
                    parameter.data = parameter.data.to(dtype)
        self._answers = PagedAnswers(self._own_specs, self._sinks, dtype, self._mesh)

    @property
    def bytes_outside_linears(self) -> int:
        owners = (module for module in self.modules() if not isinstance(module, PackedLinear | nn.Embedding))
        return sum(each.nbytes for owner in owners for each in owner.parameters(recurse=False) if each.dim() > 1)

    def give_back(self) -> None:
        super().give_back()
        for parameter in self._large_parameters():
            parameter.untyped_storage().resize_(0)

    def take_again(self) -> None:
        super().take_again()
        for parameter in self._large_parameters():
            parameter.untyped_storage().resize_(parameter.nbytes)

    def _large_parameters(self) -> Iterator[nn.Parameter]:
        """Matrices that are no linear layer's: embeddings and experts."""
        for module in self.modules():
            if not isinstance(module, PackedLinear):
                yield from (each for each in module.parameters(recurse=False) if each.dim() > 1)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor | None,
        positions: Tensor,
        executor: LayerExecutor,  # noqa: ARG002  (the class runs its layers)
        attends: Attends,
    ) -> Tensor:
        assert self._answers is not None, "packing has ended"
        self._answers.attends = attends
        with answering(self._answers):
            return self.run(token_ids, hidden, position_ids=positions[None], attention_mask=self._no_mask)

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
        for module in self._elsewhere:
            module.hidden = hidden[None]
        return {"inputs_embeds": torch.full_like(hidden[None], torch.nan)}  # no layer of this stage may read them

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden.unsqueeze(0)
        logits: Tensor = self.whole(input_ids=hidden.new_zeros((1, len(hidden)), dtype=torch.int64)).logits[0]
        return logits

    @property
    def embedding(self) -> nn.Module:
        """Of token ids: only the first stage calls it."""
        embedding: nn.Module = self._ends[0]
        return embedding

    @property
    def sinks(self) -> tuple[Tensor | None, ...]:
        return self._sinks

    def weight_shards(self) -> list[WeightShard]:
        shards, names, owners = list[WeightShard](), defaultdict[str, list[str]](list), self._owners()
        for name, own in self._stored.tied.items():
            names[own].append(name)
        for stored in self._stored.parts:
            places = [owners[name] for name in (stored.target, *names[stored.target]) if name in owners]
            cut = self._cuts.get(stored.target)
            parts = [stored] if cut is None else list(stored.within(cut))
            for part in parts if places else ():
                each = [part.shard(owner, owner.get_parameter(name)) for owner, name in places]
                shards.append(each[0] if len(each) == 1 else replace(each[0], write=partial(_write_all, each)))
            if not parts or not places:  # other ranks have it
                shards.append(WeightShard(stored.source, stored.shape, (), None))
        return shards

    def _owners(self) -> dict[str, tuple[nn.Module, str]]:
        """By the class's names of the rank's parameters: the module that has it, and its name there."""
        roots = (f"{self.whole.base_model_prefix}.", self.layers), ("", self.whole)
        return {
            f"{prefix}{path}.{name}".replace("..", "."): (module, name)
            for prefix, root in roots
            for path, module in root.named_modules()
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        }

    @property
    def _own_specs(self) -> tuple[AttentionSpec, ...]:
        """Of the stage's layers."""
        return tuple(self._info.spec.layers[index].attention for index in self._mesh.stage_layers(self._info))

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


def _set(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)
