"""torch.compile for the model: each function is compiled once, for any number of tokens, and never after warm-up.

The compiler is imported only when it is used, because the import takes a second.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from tokasaurus.checkpoint import cache_directory
from tokasaurus.messages.lifecycle import UserError

logger = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
"""Modules whose errors are those of a compiler; Triton may find only at the first launch that it cannot go on."""

P = ParamSpec("P")
R = TypeVar("R")


class Compiler:
    """Compiles functions with inductor at their first call, which must precede `end_warm_up`; counts compilations."""

    def __init__(self) -> None:
        self.num_compilations = 0
        """Since start."""
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

        Until `end_warm_up`, a call raises UserError if this machine cannot compile.
        """
        from torch._dynamo.decorators import mark_unbacked
        from torch._dynamo.exc import BackendCompilerFailed

        backend = partial(self._compile_graph, options=options) if options else self._compile_graph
        compiled = torch.compile(function, backend=backend, fullgraph=True)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._is_warm:
                return compiled(*args, **kwargs)
            for argument in args:
                if isinstance(argument, Tensor):
                    # Sizes that are merely marked dynamic trigger recompilation for size 1 and for equal sizes.
                    mark_unbacked(argument, 0)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                if not type(error).__module__.startswith(_COMPILERS):
                    raise
                logger.debug("compilation failed", exc_info=error)
                reason = _gist(error.inner_exception if isinstance(error, BackendCompilerFailed) else error)
                raise UserError(
                    f"torch_compile=T: cannot compile here, {reason}; torch_compile=F needs none"
                ) from error

        return call

    def end_warm_up(self) -> None:
        """From now on, every compilation counts as an error."""
        self._is_warm = True

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


def _gist(error: Exception) -> str:
    """The line of a compiler's output that says what is wrong; else the error's first line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0]).strip()
