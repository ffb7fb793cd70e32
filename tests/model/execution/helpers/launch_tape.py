"""Graphs of launches on a CPU: torch's operations are recorded once, and replayed into the same memory.

As with CUDA graphs, a replay knows nothing but the addresses and numbers of the recording: what Python computes in
between happens once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tokasaurus.model.attention.row_split import _attend
from tokasaurus.model.decoder.compile import Compiler


def address(tensor: Tensor) -> int:
    """Of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def is_collective(function: Any) -> bool:
    """Whether the operation is one of torch.distributed, whose schemas do not say which tensors they change."""
    return bool(function.namespace == "c10d")


class TapedGraph:
    """Implements Graph."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any], list[Tensor]]] = []
        self.addresses: list[list[int]] = []
        """Of each operation's arguments, when it was recorded."""

    def spoil(self) -> None:
        """Overwrite all that was computed while recording: on CUDA, recorded launches do not run."""
        for _, _, _, results in self.operations:
            for result in results:
                result.fill_(torch.nan if result.is_floating_point() else 1)

    def replay(self) -> None:
        for (function, args, kwargs, results), addresses in zip(self.operations, self.addresses, strict=True):
            assert [address(tensor) for tensor in tensors_in((args, kwargs))] == addresses, "memory has moved"
            returned = function(*args, **kwargs)
            if is_collective(function):  # gloo's threads run it
                for leaf in tree_leaves(returned):
                    if isinstance(leaf, torch.ScriptObject):
                        torch.distributed.Work.unbox(leaf).wait()
            for new, result in zip(tensors_in(returned), results, strict=False):
                result.copy_(new)


_READS = torch.ops.aten._local_scalar_dense, torch.ops.aten.item, torch.ops.aten.nonzero
"""Operations whose results the host needs: CUDA raises where they are recorded."""


class _Tape(TorchDispatchMode):
    """Adds the operations that run to `graph`, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: TapedGraph | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.tokasaurus.attend.default:
            with self:  # a recording ends and begins in it, or goes on
                return _attend(*args, **kwargs)
        if self.graph is not None and function.overloadpacket in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **kwargs)
        if self.graph is None:
            return result
        known = [address(tensor) for tensor in tensors_in((args, kwargs))]
        # A view has the memory of what it shows, and an operation in place that of its argument.
        new = [tensor for tensor in tensors_in(result) if address(tensor) not in known]
        if new or function._schema.is_mutable or is_collective(function):
            self.graph.operations.append((function, args, kwargs, new))
            self.graph.addresses.append(known)
        return result


class LaunchTape:
    """Implements Recorder."""

    def __init__(self) -> None:
        self.graphs: list[TapedGraph] = []
        self.tape = _Tape()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        first = len(self.graphs)
        with self.tape:
            yield
        for graph in self.graphs[first:]:
            graph.spoil()

    def begin(self) -> None:
        assert self.tape.graph is None
        self.tape.graph = TapedGraph()
        self.graphs.append(self.tape.graph)

    def end(self) -> TapedGraph:
        graph, self.tape.graph = self.tape.graph, None
        assert graph is not None
        return graph

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor

    def outside_addresses(self) -> set[int]:
        """Addresses that recorded operations read or write, but that no recorded operation has allocated."""
        operations = [operation for graph in self.graphs for operation in graph.operations]
        made = {address(tensor) for *_, results in operations for tensor in results}
        used = {address(tensor) for _, args, kwargs, _ in operations for tensor in tensors_in((args, kwargs))}
        return used - made


class TapedCompiler(Compiler):
    """Compiles for the tape: to torch's operations, which inductor would fuse into code that no tape sees."""

    def __init__(self, tape: LaunchTape) -> None:
        super().__init__()
        self._tape = tape.tape

    def compile(self, function: Any, options: dict[str, Any] | None = None) -> Any:
        compiled = super().compile(function, options)

        def call(*args: Any) -> Any:
            with _disable_current_modes():  # dynamo refuses to run under a tape
                return compiled(*args)

        return call

    def _compile_graph(self, graph: GraphModule, inputs: list[Any], _options: Any = None) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        self.num_compilations += 1
        compiled = aot_autograd(fw_compiler=_as_operations)(graph, inputs)

        def call(*args: Any) -> Any:
            with self._tape:
                return compiled(*args)

        return call


def _as_operations(module: GraphModule, _inputs: list[Any]) -> Any:
    # Imported late: inductor takes seconds, which few of the tests need.
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized

    decompose_auto_functionalized(module.graph)  # so that the tape sees which tensors attention changes
    module.recompile()
    return make_boxed_func(module.forward)
