"""One line for the user when the system refuses memory, open files, threads or output, in place of a traceback."""

import errno
import functools
import itertools
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec

from tokasaurus.monitoring.log_writer import log_writer

P = ParamSpec("P")

LESS_MEMORY = "a smaller kv_cache_num_tokens= or max_tokens_per_forward= needs less"
"""What the user can do."""

# In messages of the dynamic linker, torch, and Python's threads.
_MEMORY_WORDS = (
    "cannot allocate memory",
    "can't allocate memory",
    "failed to map segment",
    "failed to allocate memory",
    "not enough memory",
    "bad_alloc",
)
# In messages about a GPU: of torch, CUDA, cuBLAS, Triton and NCCL.
_DEVICE_WORDS = ("out of memory", "alloc_failed")
_DEVICE_NAMES = ("cuda", "cublas", "gpu")
_END_OF_SIZES = ("Of the allocated memory", "If reserved")
"""Where torch's message goes on about its allocator."""
_FILE_WORDS = ("too many open files", "file descriptors")
_LOST_ERROR_WORDS = ("without exception set", "without setting an exception")
"""Words of Python's errors where it loses a MemoryError, because it has no memory left for it."""
_THREAD_WORDS = ("can't start new thread", "resource temporarily unavailable")


def describe_shortage(error: BaseException, advice: str = "") -> str | None:
    """What was refused, with the limit that may be the reason; None for any other error.

    advice: how to need less memory."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, MemoryError | OSError | RuntimeError | ImportError | SystemError):
            found = _describe(cause, advice)
            if found is not None:
                return found
        cause = cause.__cause__ or cause.__context__
    return None


def _describe(error: BaseException, advice: str) -> str | None:
    number, text = getattr(error, "errno", None), str(error).lower()
    if number in (errno.EMFILE, errno.ENFILE) or any(word in text for word in _FILE_WORDS):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files: this process may open {most} (ulimit -n); 1024 suffice for one model worker"
    is_lost = (
        isinstance(error, SystemError) and bool(_address_space()) and any(word in text for word in _LOST_ERROR_WORDS)
    )
    if (
        is_lost
        or isinstance(error, MemoryError)
        or number == errno.ENOMEM
        or any(word in text for word in _MEMORY_WORDS)
    ):
        return f"not enough memory{_address_space()}{f': {advice}' if advice else ''}"
    if any(word in text for word in _DEVICE_WORDS) and any(name in text for name in _DEVICE_NAMES):
        return f"not enough memory on the GPU{_device_sizes(str(error))}{f': {advice}' if advice else ''}"
    if number == errno.EAGAIN or any(word in text for word in _THREAD_WORDS):
        what = "no more threads or processes can be started"
        return f"{what}: memory{_address_space()}, or their number (ulimit -u), is limited"
    return None


def _device_sizes(message: str) -> str:
    """What torch says of the request, of what is free, and of other processes; in parentheses, or empty."""
    sentences = message.partition("\n")[0].rstrip(". ").split(". ")
    first = next((index for index, sentence in enumerate(sentences) if sentence.startswith("Tried to ")), None)
    if first is None:
        return ""
    known = itertools.takewhile(lambda sentence: not sentence.startswith(_END_OF_SIZES), sentences[first:])
    return f" ({'. '.join(known)})"


def _address_space() -> str:
    """The limit of the process's address space, in parentheses; empty if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f" (ulimit -v allows {limit >> 20:,} MiB)"


def hint_at_memory(signal_number: int | None) -> str:
    """Text to append to the line about a process that this signal has killed; empty if memory is not a likely reason.

    SIGKILL: of the kernel, when the machine or a control group has no memory left. SIGABRT and SIGSEGV: of libraries
    that do not check whether they got memory, where the address space is limited. None: the process has ended by itself
    without a word of ours, as such libraries do as well.
    """
    if signal_number == signal.SIGKILL:
        return f"; unless somebody did it, the system had too little memory: {LESS_MEMORY}"
    if signal_number in (None, signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV) and _address_space():
        return f"; probably for lack of memory{_address_space()}: {LESS_MEMORY}"
    return ""


def ends_in_one_line(command: Callable[P, int]) -> Callable[P, int]:
    """The command, which ends without a traceback if nobody reads its output, the user interrupts it, or the system
    refuses disk space, memory, open files or threads.

    The exit code is the code of a process that SIGPIPE (`toka --help | head -1`) or SIGINT has ended, or 1 with one
    line.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except BrokenPipeError:
            if not _is_output_unread():
                raise
            _discard_output()
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt:
            os.write(2, b"stopped\n")
            return 128 + signal.SIGINT
        except (OSError, RuntimeError, MemoryError, ImportError, SystemError) as error:
            reason = _describe_refusal(error)
            if reason is None:
                raise
            with suppress(RuntimeError, MemoryError):  # its thread does not start
                log_writer().flush_lines()  # so that the reason is the last line
            os.write(2, f"toka: {reason}\n".encode())
            _discard_output()
            return 1
        return code

    return run


def _describe_refusal(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"cannot write: {error.strerror}"
    return describe_shortage(error)


def _is_output_unread() -> bool:
    """Whether standard output or standard error is a pipe whose reader has closed it."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _discard_output() -> None:
    """Discard the rest, or exit would raise."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
