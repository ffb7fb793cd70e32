"""torch.compile for parts of the model: each is compiled once, for any number of tokens, and never after warm-up.

Nothing of the compiler is imported before it is used: that takes a second.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from tokasaurus.checkpoint import cache_directory
from tokasaurus.messages.lifecycle import UserError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Compiler:
    """Compiles functions with inductor at their first call, which is to come before `end_warm_up`, and counts.

    num_compilations: since start. num_recompiles: those of them after `end_warm_up`; each is an error and a line in the
    log, for a step had to wait for it.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self.num_recompiles = 0
        self._is_warm = False
        # Compiled code is kept for the next start, and unpickled then: so not in /tmp, torch's default, where another
        # user could put it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "inductor"))
        # A few small kernels: processes that compile beside this one would take longer to start.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def compile(self, function: Callable[P, R]) -> Callable[P, R]:
        """The same function, for tensors whose first dimension, the same in all, counts tokens.

        A method is compiled once for all modules of the same shapes: pass the plain function and give it the module. It
        must read no number that differs between them, such as a layer's index.

        Until `end_warm_up`, a call raises UserError where this machine cannot compile.
        """
        from torch._dynamo.decorators import mark_unbacked
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

        compiled = torch.compile(function, backend=self._compile_graph)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._is_warm:
                return compiled(*args, **kwargs)
            for argument in args:
                if isinstance(argument, Tensor):
                    # Sizes that are only dynamic are compiled again for 1, and where two sizes are equal.
                    mark_unbacked(argument, 0, shape_id="tokens")
            try:
                return compiled(*args, **kwargs)
            except BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, (InvalidCxxCompiler, CppCompileError)):
                    raise
                raise UserError(f"torch_compile=T: cannot compile here, {_gist(error.inner_exception)}") from error

        return call

    def end_warm_up(self) -> None:
        """No call should compile from now on."""
        self._is_warm = True

    def _compile_graph(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        self.num_compilations += 1
        if self._is_warm:
            self.num_recompiles += 1
            shapes = ", ".join(str(tuple(value.shape)) for value in inputs if isinstance(value, Tensor))
            logger.error("compiled again after warm-up (TORCH_LOGS=recompiles says why), for inputs %s", shapes)
        compiled: Callable[..., Any] = lookup_backend("inductor")(graph, inputs)
        return compiled


def _gist(error: Exception) -> str:
    """The line of a C++ compiler's output that says what is wrong."""
    lines = str(error).splitlines()
    return next((line for line in lines if "error:" in line), lines[0]).strip()
