"""What the system refuses is one line that names the limit."""

import errno
import resource
import signal
import subprocess
import sys

import pytest
import torch

from tokasaurus.monitoring.shortage import describe_shortage, ends_in_one_line, hint_at_memory

FILES = f"too many open files: this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n)"


ON_GPU = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.11 GiB of which 310.12 MiB is"
    " free. Process 77 has 75.00 GiB memory in use. Including non-PyTorch memory, this process has 3.80 GiB memory in"
    " use. "
)
OF_TORCH = (
    "Of the allocated memory 3.1 GiB is allocated by PyTorch, and 7 MiB is reserved by PyTorch but unallocated. If"
    " reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation."
)


def test_a_gpu_without_memory_is_one_line_with_its_sizes() -> None:
    """The message of torch 2.11, and others of a device."""
    found = describe_shortage(torch.OutOfMemoryError(ON_GPU + OF_TORCH), "use less")
    sizes = ON_GPU.removeprefix("CUDA out of memory. ").rstrip(". ")
    assert found == f"not enough memory on the GPU ({sizes}): use less"
    for message in (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
        "NCCL error: unhandled cuda error\nFailed to CUDA calloc async 4 bytes: Cuda failure 2 'out of memory'",
    ):
        assert describe_shortage(RuntimeError(message)) == "not enough memory on the GPU"
    assert describe_shortage(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (MemoryError(), "not enough memory: use less"),
        (OSError(errno.ENOMEM, "x"), "not enough memory: use less"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (ImportError("libtorch.so: failed to map segment from shared object"), "not enough memory"),
        (OSError(errno.EMFILE, "x"), FILES),
        (OSError(errno.ENFILE, "x"), FILES),
        (BlockingIOError(errno.EAGAIN, "x"), "no more threads or processes"),
        (RuntimeError("can't start new thread"), "no more threads or processes"),
        (OSError(errno.ENOENT, "x"), None),
        (RuntimeError("shapes do not match"), None),
        (ValueError("not enough memory"), None),
        (ImportError("no module named x"), None),
        (SystemError("error return without exception set"), None),
    ],
)
def test_the_refusal_is_named(error: Exception, start: str | None) -> None:
    found = describe_shortage(error, "use less")
    assert (found is None) == (start is None)
    assert found is None or found.startswith(str(start))
    outer = KeyError("elsewhere")
    outer.__cause__ = error
    assert describe_shortage(outer, "use less") == found


def test_the_address_space_is_named_where_it_is_limited() -> None:
    """There, Python may also lose the MemoryError."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from tokasaurus.monitoring.shortage import *\n"
        "lost = 'returned NULL without setting an exception'\n"
        "for error in MemoryError(), SystemError(lost), SystemError('bad argument'): print(describe_shortage(error))\n"
        "for number in 6, None: print(hint_at_memory(number))"
    )
    lines = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    *shortages, of_signal, by_itself = lines.splitlines()
    assert shortages == ["not enough memory (ulimit -v allows 1,024 MiB)"] * 2 + ["None"]
    assert of_signal.startswith(
        "; probably for lack of memory (ulimit -v allows 1,024 MiB): a smaller kv_cache_num_tokens="
    )
    assert by_itself == of_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGINT, None])
def test_only_a_kill_suggests_memory_without_limits(number: int | None) -> None:
    assert hint_at_memory(number) == ""
    assert "kv_cache_num_tokens=" in hint_at_memory(signal.SIGKILL)


def test_a_command_that_the_user_interrupts_ends_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    @ends_in_one_line
    def command() -> int:
        raise KeyboardInterrupt

    assert command() == 128 + signal.SIGINT
    assert capfd.readouterr().err == "stopped\n"
