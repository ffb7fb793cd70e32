"""torch.compile for the model: each function is compiled once, for any number of tokens, and never after warm-up.

The compiler is imported only when it is used, because the import takes a second.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from tokasaurus.checkpoint import cache_directory
from tokasaurus.messages.status import FlagRefused, describe_error

logger = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
"""Modules whose errors come from a compiler; Triton may find only at the first launch that it cannot go on."""

MAX_COMPILED_TOKENS = 1 << 16
"""Forwards with more tokens run uncompiled."""

_TYPICAL_SIZE = 256
"""Tokens for which the compiler chooses what to fuse, and how many elements a block of threads takes."""

P = ParamSpec("P")
R = TypeVar("R")


def relate_sizes(*tensors: Tensor) -> None:
    """Tell the compiler that all have as many rows, which it does not find by itself, and not more than are compiled:
    then 32 bits suffice to index the tensors of most models."""
    for each in tensors:
        torch._check(each.shape[0] == tensors[0].shape[0])  # type: ignore[no-untyped-call]
    torch._check(tensors[0].shape[0] <= MAX_COMPILED_TOKENS)  # type: ignore[no-untyped-call]


class Compiler:
    """Compiles functions with inductor at their first call, which must precede `end_warm_up`; counts compilations."""

    def __init__(self, is_required: bool = True) -> None:
        """is_required: the start fails where this machine cannot compile; otherwise it goes on without."""
        self._is_required = is_required
        self.has_failed = False
        """Whether a compilation that was not required failed, or what it made is wrong. Since then, every function runs
        uncompiled."""
        self.num_compilations = 0
        """Compilations since the start."""
        self.num_recompiles = 0
        """Compilations after `end_warm_up`. Each is logged as an error, because a step had to wait for it."""
        self._is_warm = False
        # The next start unpickles the compiled code from this directory. Torch's default is under /tmp, where another
        # user could place files.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "inductor"))
        # There are only a few small kernels: starting parallel compile processes would take longer.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def compile(self, function: Callable[P, R], options: dict[str, Any] | None = None) -> Callable[P, R]:
        """The compiled function. The first dimension of every tensor argument, but not of those in lists, may have any
        size. The function must say by torch._check how these sizes are related.

        options: settings of torch._inductor.config for this function alone.

        Until `end_warm_up`, a call raises FlagRefused if this machine cannot compile and it is required. If it is not,
        the call logs a warning and runs the function itself.
        """
        from torch._dynamo.decorators import mark_unbacked

        backend = partial(self._compile_graph, options=options) if options else self._compile_graph
        compiled = torch.compile(function, backend=backend, fullgraph=True)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if self.has_failed:
                return function(*args, **kwargs)
            if self._is_warm:
                return compiled(*args, **kwargs)
            for argument in args:
                if isinstance(argument, Tensor):
                    # Sizes that are merely marked dynamic trigger recompilation for size 1 and for equal sizes.
                    # Without a hint they count as 0, and nothing is fused for the memory that it saves.
                    mark_unbacked(argument, 0, hint_override=_TYPICAL_SIZE)
            try:
                return compiled(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not self._is_required:
                    result = function(*args, **kwargs)  # raises too if the compiler is not the cause
                    self._go_on_without(error)
                    return result
                if not _is_of_compiler(error):
                    raise
                logger.debug("compilation failed", exc_info=error)
                raise FlagRefused(
                    f"torch_compile=T: cannot compile here, {describe_error(error)}; torch_compile=F needs none"
                ) from error

        return call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every function runs uncompiled."""
        before, self.has_failed = self.has_failed, True
        try:
            yield
        finally:
            self.has_failed = before

    def switch_off(self) -> None:
        """Let every function run uncompiled from now on."""
        self.has_failed = True

    def end_warm_up(self) -> None:
        """Count every compilation from now on as an error."""
        self._is_warm = True

    def describe(self) -> str:
        """One line for the user, after warm-up."""
        return f"compiled functions: {'none' if self.has_failed else self.num_compilations}"

    def _go_on_without(self, error: Exception) -> None:
        self.has_failed = True
        logger.debug("compilation failed", exc_info=error)
        logger.warning(
            "the layers run uncompiled, which is slower, since torch.compile cannot compile here: %s; it needs Triton "
            "and a C compiler, and torch_compile=F does without",
            describe_error(error),
        )

    def _compile_graph(
        self, graph: GraphModule, inputs: list[Any], options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        self.num_compilations += 1
        if self._is_warm:
            self.num_recompiles += 1
            shapes = ", ".join(str(tuple(value.shape)) for value in inputs if isinstance(value, Tensor))
            logger.error("compiled again after warm-up (TORCH_LOGS=recompiles says why), for inputs %s", shapes)
        inductor: Callable[..., Callable[..., Any]] = lookup_backend("inductor")
        return inductor(graph, inputs, config_patches=options)


def _is_of_compiler(error: Exception) -> bool:
    """Whether a compiler's code raised it, or a program that the compiler ran."""
    modules = [type(error).__module__]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module != "subprocess":
            modules[1:] = [module]
    return any(module.startswith(_COMPILERS) for module in modules)
