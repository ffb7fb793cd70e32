"""Counts what a compiled layer launches on CUDA, without a device: `python -m ... FAMILY` prints JSON.

The graph of a tiny model's layers is captured on the CPU, its inputs are replaced by fake tensors of a pretended H100,
and Inductor's code for it is counted, not run. Needs a build of torch for CUDA, and a process of its own.
"""

import contextlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from tests.helpers.tiny_model import family_config
from tokasaurus.checkpoint import read_model_info
from tokasaurus.model.attention.row_split import attending
from tokasaurus.model.decoder import compile as compile_module
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.weights import fill_randomly
from tokasaurus.model.execution.executors import run_layers
from tokasaurus.model.parallel.mesh import Mesh

NUM_LAYERS = 4
_H100 = types.SimpleNamespace(
    **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32},
    **{"total_memory": 85 << 30, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536},
    **{"shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472, "is_integrated": 0},
    **{"shared_memory_per_block": 49152, "max_threads_per_block": 1024, "L2_cache_size": 50 << 20, "gcnArchName": ""},
    **{"clock_rate": 1980000, "memory_clock_rate": 2619000, "memory_bus_width": 5120, "is_multi_gpu_board": 0},
)


_OF_TRITON = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}


class _Guard(contextlib.nullcontext[None]):
    def __init__(self, *_: object) -> None:
        super().__init__()


def pretend_device() -> None:
    """From now on torch believes that it has one device, which nothing reaches."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import fake_tensor
    from torch.cuda import random
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    cuda: Any = torch.cuda
    for name, value in {
        **{"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0)},
        **{"_lazy_init": None, "synchronize": None, "set_rng_state": None, "get_device_name": _H100.name},
        **{"get_device_properties": _H100, "_get_device_properties": _H100},
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }.items():
        setattr(cuda, name, lambda *_, _value=value: _value)
    cuda.device = cuda._DeviceGuard = _Guard
    any_module: Any
    for any_module, name, found in (
        (random, "_lazy_init", None),
        (fake_tensor, "init_gpu_context", None),
        (joint_graph, "lazy_init", None),
        (post_grad, "lazy_init", None),
        (torch._C, "_cuda_getDevice", 0),
        (torch._C, "_cuda_getCurrentRawStream", 0),
        (CudaInterface, "is_available", True),
        (CudaInterface, "get_compute_capability", 90),
        (CudaInterface.Worker, "get_device_properties", _H100),
        (CudaInterface.Worker, "current_device", 0),
    ):
        setattr(any_module, name, staticmethod(lambda *_, _found=found: _found))
    module: Any
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch") and "has_triton" in vars(module):
            module.has_triton = lambda *_: True
    run_node = ConstantFolder.run_node

    def on_host(self: Any, node: Any) -> Any:
        """Constants are folded by computing them."""
        given = node.kwargs
        node.kwargs = {
            name: torch.device("cpu") if isinstance(value, torch.device) else value for name, value in given.items()
        }
        try:
            return run_node(self, node)
        finally:
            node.kwargs = given

    ConstantFolder.run_node = on_host  # type: ignore[method-assign]

    class Driver:
        utils = types.SimpleNamespace(get_device_properties=lambda _: dict(_OF_TRITON))
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        get_device_interface = staticmethod(lambda: torch.cuda)

    driver.set_active(Driver())


def generated_code(family: str) -> str:
    """Inductor's Python code for NUM_LAYERS layers of a tiny model of the family."""
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    codes: list[str] = []
    any_class: Any = GraphLowering
    any_class.save_output_code = staticmethod(codes.append)
    any_class = CachingAutotuner
    any_class.precompile = lambda *_args, **_options: None  # nothing is compiled for the device

    def compile_for_cuda(graph: GraphModule, inputs: list[Any], **_: object) -> Callable[..., Any]:
        pretend_device()
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        fakes = []
        for node in graph.graph.nodes:
            fake = node.meta.pop("example_value", None)
            if node.op == "placeholder":
                if isinstance(fake, torch.Tensor):
                    with fake.fake_mode:  # type: ignore[attr-defined]
                        fake = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="cuda:0")
                node.meta["example_value"] = fake
                fakes.append(fake)
        assert len(placeholders) == len(inputs)
        uncached = torch._inductor.config.patch(fx_graph_cache=False)
        # It fails once the code is there: a device would have to load it.
        with uncached, torch._functorch.config.patch(enable_autograd_cache=False), contextlib.suppress(Exception):
            torch._inductor.compile_fx.compile_fx(graph, fakes)
        return graph.forward

    with tempfile.TemporaryDirectory() as directory:
        family_config(family, num_layers=NUM_LAYERS).save_pretrained(directory)
        info = read_model_info(Path(directory))
    model = build_decoder(info, Mesh(), torch.bfloat16)
    model.materialize(torch.device("cpu"), 4096)
    fill_randomly(iter(model.weight_shards()))
    hidden = torch.randn(48, info.hidden_size).bfloat16()
    caches = [torch.zeros(1, dtype=torch.bfloat16).as_strided((1,), (1,)) for _ in range(2)]
    compiler = compile_module.Compiler()
    compiler._compile_graph = compile_for_cuda  # type: ignore[assignment]
    with torch.inference_mode(), attending(lambda query, *_: query.zero_()):
        compiler.compile(run_layers)(list(model.decoder_layers()), hidden, model.rotary.at(torch.arange(48)), caches)
    (code,) = codes
    return code


if __name__ == "__main__":
    code = generated_code(sys.argv[1])
    found = {
        "kernels": code.count(".run("),
        "gemms": len(re.findall(r"extern_kernels\.(?:mm|addmm)\(", code)),
        "index_types": sorted(set(re.findall(r"'xnumel': '(\w+)'", code))),
    }
    print(json.dumps(found))
