"""What a step launches beside its graphs, on the pretended device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.model.helpers.pretend_device import DEVICE, DeviceTensor, PretendDevice

REPLAY = "replay"


class CountingDevice(PretendDevice):
    """Notes each operation that launches something. FlashInfer's double, which computes with what it is given, may
    read its plans; replays of graphs are noted and do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] | None = None
        """Names, once it counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.launches is not None and self._launches_something(func, (*args, *(kwargs or {}).values()), result):
            self.launches.append(func._schema.name.removeprefix("aten::"))
        return result

    def _problem(self, func: Any, *others: Any) -> str | None:
        problem = super()._problem(func, *others)
        is_of_plan = self.launches is None or func is torch.ops.aten.copy_.default
        return None if problem is not None and "copies between" in problem and is_of_plan else problem

    @staticmethod
    def _launches_something(func: Any, arguments: Any, result: Any) -> bool:
        own = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, DeviceTensor)]
        if "empty" in func._schema.name or not (own or DEVICE in tree_leaves(arguments)):
            return False
        known = {_address(tensor) for tensor in own}
        new = [leaf for leaf in tree_leaves([result]) if isinstance(leaf, DeviceTensor)]
        return bool(func._schema.is_mutable) or not new or any(_address(tensor) not in known for tensor in new)

    def one_launch(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work` as a kernel that is launched once."""

        def launch(*arguments: Any) -> Any:
            launches, self.launches = self.launches, None
            try:
                return work(*arguments)
            finally:
                self.launches = launches
                if launches is not None:
                    launches.append(name)

        return launch


def _address(tensor: DeviceTensor) -> int:
    return tensor.inner.untyped_storage().data_ptr()


class NotedGraph:
    """Implements Graph."""

    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    def replay(self) -> None:
        if self._device.launches is not None:
            self._device.launches.append(REPLAY)


class NotedRecorder:
    """Implements Recorder: what it records runs at once."""

    def __init__(self, device: CountingDevice) -> None:
        self._device = device

    @contextmanager
    def preparing(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        pass

    def end(self) -> NotedGraph:
        return NotedGraph(self._device)

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor
