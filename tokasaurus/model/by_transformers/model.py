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
from tokasaurus.model.attention.row_split import Attends
from tokasaurus.model.by_transformers.attention import PagedAnswers, answering
from tokasaurus.model.by_transformers.probe import make_model
from tokasaurus.model.by_transformers.stored import find_stored
from tokasaurus.model.decoder.layers import Linear, Norm
from tokasaurus.model.decoder.model import LayerExecutor, Model
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.weights import WeightShard
from tokasaurus.model.parallel.mesh import Mesh

# T tokens in this forward, R rows whose logits are wanted, E hidden size


class PackedLinear(Linear):
    """In the place of nn.Linear: x [..., in] -> [..., out]."""

    def __init__(self, plain: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, dtype)
        self.in_features, self.out_features = plain.in_features, plain.out_features

    def forward(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        product = super().forward(x.reshape(-1, self.in_features), norm)
        return product.view(*x.shape[:-1], self.out_features)


class _States(MoeModelOutputWithPast):  # type: ignore[misc]
    """Hidden states alone: what else a class may return of its layers is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """In the place of the layers: gives the hidden states that are set, so that the class's forward computes logits of
    them, with its own caps and scales."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        self._replaced = (layers,)  # no module of this one

    def __getattr__(self, name: str) -> Any:
        """What a class asks of its layers beside calling them, such as a factor of logits."""
        return getattr(self.__dict__["_replaced"][0], name)

    @property
    def decoder(self) -> "_Given":
        """Some classes call this part of their layers' module."""
        return self

    def forward(self, *_: Any, **__: Any) -> _States:
        return _States(last_hidden_state=self.hidden)


class TransformersModel(Model):
    """Parameters have the names of the class; `stored` says which tensors of the checkpoint they are made of."""

    def __init__(self, info: ModelInfo, mesh: Mesh, dtype: torch.dtype, directory: Path) -> None:
        """directory: has config.json and, unless weights are made up, the files of weights. Raises ValueError for more
        than one rank, and CheckpointError if the stored tensors are not understood."""
        super().__init__(info, mesh, dtype)
        mesh.check(info)
        logging.set_verbosity_error()
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        whole = make_model(config, dtype)
        self._stored = find_stored(whole, directory, info)
        in_float32 = {*(whole._keep_in_fp32_modules_strict or ())}
        if dtype == torch.float16:
            in_float32 |= {*(whole._keep_in_fp32_modules or ())}
        self._in_float32 = re.compile("|".join(in_float32 or {"^$"}))
        for name, module in list(whole.named_modules()):
            if type(module) is nn.Linear:
                with torch.device("meta"):
                    _set(whole, name, PackedLinear(module, dtype))
        head, self.embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
        assert isinstance(head, PackedLinear)
        self._head = head
        self.layers: PreTrainedModel = whole.base_model
        self.whole = whole
        """With _Given in the place of `layers`."""
        self._given = _Given(self.layers)
        setattr(whole, whole.base_model_prefix, self._given)
        self._answers: PagedAnswers | None = None
        self._sinks: tuple[Tensor | None, ...] = ()
        self._no_mask = torch.empty(0)

    def materialize(self, device: torch.device, num_positions: int) -> None:  # noqa: ARG002
        """The table of positions is the class's own."""
        for path, owner in self.named_modules():
            for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
                dtype = torch.float32 if self._in_float32.search(f"{path}.{name}") else tensor.dtype
                empty = torch.empty(tensor.shape, dtype=dtype, device=device)
                if name in owner._non_persistent_buffers_set:
                    owner.register_buffer(name, empty, persistent=False)
                    continue
                owner._buffers.pop(name, None)  # what a checkpoint has is a parameter here
                parameter = nn.Parameter(empty, requires_grad=False)
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # by the checkpoint
                owner.register_parameter(name, parameter)
        for name, own in self._stored.tied.items():
            owner, own_name = self._place(name)
            of_own, tied_to = self._place(own)
            owner.register_parameter(own_name, nn.Parameter(of_own.get_parameter(tied_to).data, requires_grad=False))
        self._compute_buffers()
        specs = [layer.attention for layer in self._info.spec.layers]
        self._sinks = tuple(torch.zeros(spec.num_heads, device=device) if spec.has_sinks else None for spec in specs)
        # Transformers takes a mask of four dimensions as it is, and makes none of its own.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)

    def _compute_buffers(self) -> None:
        """Numbers that no checkpoint has, such as rotary frequencies, as the class computes them."""
        for module in self.layers.modules():
            if list(module.buffers(recurse=False)):
                self.layers._init_weights(module)

    def pack_module(self, module: nn.Module) -> None:
        if isinstance(module, PackedLinear):
            is_head = module is self._head
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
        self._answers = PagedAnswers(tuple(layer.attention for layer in self._info.spec.layers), self._sinks, dtype)

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
        assert hidden is None, "there is one stage"
        assert self._answers is not None, "packing has ended"
        self._answers.attends = attends
        with answering(self._answers):
            output = self.layers(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                attention_mask=self._no_mask,
                use_cache=False,
            )
        states: Tensor = output.last_hidden_state[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden.unsqueeze(0)
        logits: Tensor = self.whole(input_ids=hidden.new_zeros((1, len(hidden)), dtype=torch.int64)).logits[0]
        return logits

    @property
    def sinks(self) -> tuple[Tensor | None, ...]:
        return self._sinks

    def weight_shards(self) -> list[WeightShard]:
        shards, aliases = list[WeightShard](), defaultdict[str, list[str]](list)
        for name, own in self._stored.tied.items():
            aliases[own].append(name)
        for stored in self._stored.parts:
            places = [self._place(name) for name in (stored.target, *aliases[stored.target])]
            each = [stored.shard(owner, owner.get_parameter(name)) for owner, name in places]
            shards.append(each[0] if len(each) == 1 else replace(each[0], write=partial(_write_all, each)))
        return shards

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """Of a parameter with the class's name: the module that has it, and its name there."""
        prefix = f"{self.whole.base_model_prefix}."
        root: nn.Module = self.whole
        if name.startswith(prefix):
            root, name = self.layers, name.removeprefix(prefix)
        path, _, own = name.rpartition(".")
        return root.get_submodule(path), own

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
