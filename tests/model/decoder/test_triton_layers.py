"""The Triton kernels of the layers without a GPU: interpreted against slow oracles, compiled for GPUs, and counted."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.installed_triton import compile_for_gpus, needs_interpreter, needs_ptxas, needs_triton, run_python
from tests.helpers.tiny_model import FAMILIES, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.model import LayerExecutor
from tokasaurus.model.execution import executors
from tokasaurus.model.execution.executors import FusedExecutor, ModuleExecutor, choose_executor

pytestmark = pytest.mark.cuda_path

MAX_KERNELS, ATTENTION_KERNELS = 14, 3
"""In a layer, and of those in its attention by FlashInfer: write, attend, and merge where contexts are split."""

SHAPES = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HEADS": 16, "KV_HEADS": 8, "COLUMNS": 64}
ROTATE = dict.fromkeys(("features", "query_weight", "key_weight", "query", "key", "value"), "*bf16")
ROTATE |= {"cos_sin": "*fp32", "poison": "*fp32", "eps": "fp32"}
ADD_NORM = dict.fromkeys(("hidden", "addend", "weight", "normed"), "*bf16") | {"poison": "*fp32", "eps": "fp32"}
KERNELS: dict[str, tuple[str, dict[str, object], dict[str, str]]] = {
    "norm": ("_add_norm_row", {"SIZE": 4096, "HAS_ADDEND": False, "HAS_POISON": False, "BLOCK": 4096}, ADD_NORM),
    "add, norm": ("_add_norm_row", {"SIZE": 2880, "HAS_ADDEND": True, "HAS_POISON": True, "BLOCK": 4096}, ADD_NORM),
    "rotate": ("_rotate_token", SHAPES | {"HAS_NORM": False}, ROTATE),
    "norm, rotate": ("_rotate_token", SHAPES | {"HAS_NORM": True}, ROTATE),
    "activate": ("_activate_token", {"SIZE": 14336, "BLOCK": 1024}, {"gate_up": "*bf16", "activated": "*bf16"}),
}


@needs_triton
@needs_interpreter
@pytest.mark.long
def test_interpreted_kernels_equal_slow_oracles_and_whole_layers_equal_the_modules() -> None:
    assert run_python("-W", "ignore", "-m", "tests.model.decoder.helpers.interpreted_layers") == "all equal\n"


@needs_triton
@needs_ptxas
@pytest.mark.long
@pytest.mark.parametrize("kind", KERNELS)
def test_the_kernels_compile_for_each_architecture(kind: str) -> None:
    name, constants, types = KERNELS[kind]
    compile_for_gpus("tokasaurus.model.decoder.triton_layers", name, types, constants, num_warps=4)


class Launches(TorchDispatchMode):
    """Counts operations of torch that launch something on a GPU, and Triton kernels, which it does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        is_view = any(
            output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns
        )
        self.num += not (is_view or "empty" in name)
        return func(*args, **(kwargs or {}))

    def kernel(self) -> Any:
        launches = self

        @dataclasses.dataclass
        class Counted:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*_arguments: object, **_constants: object) -> None:
                    launches.num += 1

                return launch

        return Counted()


def per_layer(model: Decoder, executor: LayerExecutor, launches: Launches) -> int:
    """Launches of the second layer, beside attention: from one attention to the next."""
    at_attention: list[int] = []

    def attends(query: Tensor, _key: Tensor, _value: Tensor, _layer: int, _output: Tensor | None = None) -> Tensor:
        at_attention.append(launches.num)
        return query

    with torch.inference_mode():
        hidden, cos_sin = torch.zeros(3, model.hidden_size), torch.zeros(3, 1, model.head_dim)
        with launches:
            executor.run(hidden, cos_sin, attends)
    return at_attention[1] - at_attention[0]


@needs_triton
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_has_eight_launches_beside_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokasaurus.model.decoder import triton_layers

    save_tiny_model(tmp_path, family)
    model, _ = load(tmp_path)
    launches = Launches()
    for name in ("_add_norm_row", "_rotate_token", "_activate_token"):
        monkeypatch.setattr(triton_layers, name, launches.kernel())
    fused = per_layer(model, FusedExecutor(model), launches)
    assert fused == 8
    assert fused + ATTENTION_KERNELS <= MAX_KERNELS
    assert per_layer(model, ModuleExecutor(model), launches) > 25


@needs_triton
@pytest.mark.parametrize("works", [True, False])
def test_the_kernels_run_the_layers_unless_the_start_has_switched_them_off(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice launches nothing, so ranks that agreed about the kernels cannot choose differently."""
    save_tiny_model(tmp_path, "llama")
    model, _ = load(tmp_path)
    monkeypatch.setattr(executors, "uses_triton", lambda _device, group: works and group == "layers")
    for name in ("_add_norm_row", "_rotate_token", "_activate_token"):
        monkeypatch.setattr(f"tokasaurus.model.decoder.triton_layers.{name}", None)
    chosen = choose_executor(model, None)  # type: ignore[arg-type]
    assert isinstance(chosen, FusedExecutor if works else ModuleExecutor)
