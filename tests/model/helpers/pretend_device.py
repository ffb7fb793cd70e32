"""A device that is only pretended: its tensors are on the host, but whatever would make the host wait for a real one is
refused.

Refused are reading a value, results whose size depends on values, and copies between host and device, except those of
PretendTransfers. A tensor of the device has `device` DEVICE; `on_device` and `on_host` move one outside of a step.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokasaurus.model.staging.staging import Event, HostMark, Mark

DEVICE = torch.device("meta", 1)
"""No tensor is ever allocated there: the mode answers every call that names it."""

_OF_VALUES = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "allclose"),
}
"""Operations that need values of tensors on the host."""

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


class Refused(AssertionError):
    """A step made the host wait for the device, or copied outside of the staging."""


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device; `inner` has its contents."""

    inner: Tensor  # type: ignore[assignment]  # the name of a function of tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> "DeviceTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        raise Refused(f"{func} outside of the pretended device's mode")


def on_device(tensor: Tensor) -> DeviceTensor:
    """A copy on the device."""
    return DeviceTensor(tensor.detach().clone())


def on_host(tensor: Tensor) -> Tensor:
    """The contents of a tensor of the device."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.inner


def with_tensors_on_device(value: Any) -> Any:
    """A tensor, or a dataclass or named tuple whose tensors, also those further inside, are replaced by copies on the
    device."""
    if isinstance(value, Tensor):
        return on_device(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(with_tensors_on_device, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [field.name for field in dataclasses.fields(value)]
    return dataclasses.replace(value, **{name: with_tensors_on_device(getattr(value, name)) for name in fields})


def contents_of(tensor: Tensor) -> Tensor:
    """A tensor of the device as one of the host, which shares its memory; any other as it is."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


def move_to_device(module: nn.Module) -> None:
    """Replace the parameters of a module and of those inside it, and tensors that they or their helpers keep."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = on_device(parameter)  # type: ignore[assignment]
        for holder in (part, *vars(part).values()):
            if not hasattr(holder, "__dict__") or (isinstance(holder, nn.Module) and holder is not part):
                continue
            for name, value in list(vars(holder).items()):
                if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                    setattr(holder, name, on_device(value))


class PretendDevice(TorchDispatchMode):
    """Computes for tensors of the device, and refuses what a step must not do."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        if not own and DEVICE not in devices:
            if any(tensor.device.type == DEVICE.type for tensor in tensors):
                raise Refused(f"{func} with a tensor made from values of the host")
            if kwargs.get("pin_memory"):
                raise Refused(f"{func} allocates pinned memory")
            return func(*args, **kwargs)
        problem = self._problem(func, args, kwargs, tensors, own, devices)
        if problem is not None:
            raise Refused(problem)
        wrappers = {id(tensor.inner): tensor for tensor in own}
        result = func(
            *_mapped(_unwrapped, args), **{name: _mapped(_unwrapped, value) for name, value in kwargs.items()}
        )
        if own and any(device != DEVICE for device in devices):
            return result
        return _mapped(lambda leaf: _wrapped(leaf, wrappers), result)

    def _problem(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], own: list[DeviceTensor], devices: list[Any]
    ) -> str | None:
        """What a step must not do; None if the call is allowed."""
        name = func._schema.name.removeprefix("aten::")
        if name in _OF_VALUES or (name == "where" and len(args) == 1):
            return f"{func} waits for values"
        if name == "repeat_interleave" and kwargs.get("output_size") is None and len(tensors) == len(args):
            return f"{func} waits for the number of its results"
        if name in _INDEXING and any(index is not None and index.dtype in _MASKS for index in args[1]):
            return f"{func} with a mask waits for the number of its results"
        others = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        # A number in an operation is passed by value; copying one is a copy.
        if any(tensor.dim() or name == "copy_" for tensor in others) or (others and not own):
            return f"{func} copies between host and device"
        if own and any(device != DEVICE for device in devices):
            return f"{func} copies to the host"
        return None


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with the function applied to what is in its lists and tuples."""
    if isinstance(value, list | tuple):
        mapped = [_mapped(function, item) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value)


def _unwrapped(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _wrapped(leaf: Any, wrappers: dict[int, DeviceTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return wrappers[id(leaf)] if id(leaf) in wrappers else DeviceTensor(leaf)


class PretendEvent:
    """The end of a copy, or a point in the computation. Waiting for a copy that is not done yet runs it."""

    def __init__(self, copy: Callable[[], object] | None = None) -> None:
        self._copy = copy

    @property
    def is_done(self) -> bool:
        return self._copy is None

    def synchronize(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class PretendTransfers:
    """Transfers of the pretended device.

    is_late: a copy runs only when the host waits for its end, later than on any real device; otherwise at once.
    """

    def __init__(self, is_late: bool = False) -> None:
        self._is_late = is_late
        self.buffers: list[Tensor] = []
        """All pinned memory and device memory."""
        self.uploads: list[tuple[int, PretendEvent]] = []
        """Address of each upload's source, and the event that it waits for."""
        self.num_downloads = 0

    def pinned(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def on_device(self, num_bytes: int) -> Tensor:
        return DeviceTensor(self.pinned(num_bytes))

    def upload(self, source: Tensor, target: Tensor, after: Event) -> Event:
        assert isinstance(after, PretendEvent)
        self.uploads.append((source.data_ptr(), after))
        return self._start(lambda: contents_of(target).copy_(source))

    def download(self, source: Tensor, target: Tensor) -> Event:
        self.num_downloads += 1
        return self._start(lambda: target.copy_(contents_of(source)))

    def record(self) -> Event:
        return PretendEvent()

    def mark(self) -> Mark:
        return HostMark()

    def _start(self, copy: Callable[[], object]) -> PretendEvent:
        event = PretendEvent(copy)
        if not self._is_late:
            event.synchronize()
        return event


class HostTransfers(PretendTransfers):
    """Transfers of a device whose memory is the host's."""

    def on_device(self, num_bytes: int) -> Tensor:
        return self.pinned(num_bytes)


@contextmanager
def pretended() -> Iterator[None]:
    """Steps inside run on the pretended device."""
    with torch.inference_mode(), PretendDevice():
        yield
