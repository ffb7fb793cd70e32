"""Settings of all tests."""

import atexit
import functools
import gc
import os
import signal
import ssl
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka
from tests.helpers.changed_tests import has_changed
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.forked_python import nursing

# Modules and tests are a million objects that stay. The garbage collector would read them again and again while they
# are made, for half of the time of the collection of tests, and whenever it looks at all objects, as it does thrice at
# the end.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


# Of what is still there at the end, the last of all, Triton's extension prints a list.
atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))

# No deadline: the time of an example includes waiting for a core. The same examples in each `make test`, since few of
# them may happen to lack what a test must see; `make test-long` draws others each time.
hypothesis.settings.register_profile(
    "toka", deadline=None, max_examples=100 if IS_NIGHTLY else 25, derandomize=not IS_NIGHTLY
)
hypothesis.settings.load_profile("toka")

# Small torch operations take 100 times as long if their threads wait for a core.
torch.set_num_threads(1)

# Each client of httpx, so each call of `httpx.get`, reads the system's certificates for TLS, which takes 30 ms of CPU
# time, 15 times as long as a request: they share one context.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Servers that tests start keep their files and batches apart from the user's.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="toka-tests-")

if threading.current_thread() is threading.main_thread():
    # `nohup make test &` starts tests with these signals ignored, which processes that tests start and stop would
    # inherit. A signal with a handler is at its default in a new program. This process survives a hang-up as before.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """`toka` and the servers of `LLM` are forked with their modules, but for tests marked `spawns`."""
    if item.get_closest_marker("spawns") is not None:
        return (yield)
    with nursing():
        return (yield)


WITHOUT_CUDA_PATH = "TOKA_TEST_WITHOUT_CUDA_PATH"


def pytest_configure(config: pytest.Config) -> None:
    """A run of all tests leaves out those marked `cuda_path`, except in CI, if nothing below model/ has changed."""
    is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if is_all and "CI" not in os.environ and not has_changed("tokasaurus/model", "tests/model", "tests/gpu"):
        os.environ[WITHOUT_CUDA_PATH] = "1"  # for the processes that run tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WITHOUT_CUDA_PATH in os.environ:
        left_out = [item for item in items if item.get_closest_marker("cuda_path") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("cuda_path") is None]


NUM_SLOWEST = 100
BUDGET_S = 240
"""For the slowest tests together, on two Zen 4 cores."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    times: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                times[report.nodeid] += report.duration
    if len(times) > 10 * NUM_SLOWEST:
        slowest_s = sum(seconds for _, seconds in times.most_common(NUM_SLOWEST))
        terminalreporter.write_line(
            f"the slowest {NUM_SLOWEST} tests took {slowest_s:.0f} s; their budget is {BUDGET_S} s on two Zen 4 cores"
        )


@pytest.fixture(scope="session")
def demo_model() -> Iterator[TokaProcess]:
    """The demo model behind a server in float32, shared by all files, since its start takes many seconds.

    Steps have at most 64 tokens: longer prompts are split, and steps mix prefill and decode.
    """
    flags = ("kv_cache_num_tokens=16384", "max_tokens_per_forward=64", "max_seqs_per_forward=64")
    with running_toka("dtype=float32", *flags) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny Llama's checkpoint, shared by all files: no test changes it."""
    from tests.helpers.tiny_model import save_tiny_model  # imports transformers

    directory = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    save_tiny_model(directory, "llama")
    return directory
