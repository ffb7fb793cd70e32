"""llama.cpp beside this project: its quantiser, and its log-probabilities.

`answer` runs in an interpreter that has llama-cpp-python and NumPy, and need not have this project."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE_TYPES = {"Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
"""Mixtures of types that its quantiser makes, by their names; llama.h: LLAMA_FTYPE_MOSTLY_*."""
_TYPE_F32 = 0  # ggml.h: GGML_TYPE_F32
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); import peer; peer.answer()"


def quantize(python: str, source: Path, destination: Path, mixture: str) -> None:
    """source: a GGUF file in F32."""
    request = {"source": str(source), "destination": str(destination), "file_type": FILE_TYPES[mixture]}
    assert _run(python, {"do": "quantize"} | request) == 0, f"llama.cpp could not write {destination}"


def score(python: str, path: Path, token_ids: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """The log-probability of each token after the first, of each sequence. Keys and values are cached in float32."""
    found = _run(python, {"do": "score", "path": str(path), "token_ids": [list(map(int, ids)) for ids in token_ids]})
    return [np.array(logprobs, np.float32) for logprobs in found]


def versions(python: str) -> dict[str, str]:
    found: dict[str, str] = _run(python, {"do": "versions"})
    return found


def _run(python: str, request: dict[str, object]) -> Any:
    command = [python, "-c", _PROGRAM, str(Path(__file__).parent)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"llama.cpp in {python} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def answer() -> None:
    """Reads a request from standard input, and prints what it asks for."""
    print(json.dumps(_answer(json.load(sys.stdin))))


def _answer(request: dict[str, Any]) -> object:
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    if request["do"] == "versions":
        features = llama_cpp.llama_print_system_info().decode()
        return {"llama-cpp-python": llama_cpp.__version__, "llama.cpp runs on": features}
    if request["do"] == "quantize":
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = request["file_type"]
        files = (request["source"].encode(), request["destination"].encode())
        return int(llama_cpp.llama_model_quantize(*files, parameters))
    sequences: list[list[int]] = request["token_ids"]
    model = llama_cpp.Llama(
        request["path"],
        n_ctx=max(map(len, sequences)) + 1,
        n_threads=os.cpu_count(),
        n_threads_batch=os.cpu_count(),
        logits_all=True,
        type_k=_TYPE_F32,
        type_v=_TYPE_F32,
        verbose=False,
    )
    found: list[list[float]] = []
    for ids in sequences:
        model.reset()
        model.eval(ids)
        logits = np.array(model.scores[: len(ids) - 1], np.float64)
        most = logits.max(1, keepdims=True)
        logprobs = logits - most - np.log(np.exp(logits - most).sum(1, keepdims=True))
        found.append(logprobs[np.arange(len(ids) - 1), ids[1:]].tolist())
    return found
