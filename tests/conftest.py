"""Settings of all tests."""

import os
import signal
import tempfile
import threading

import hypothesis
import torch

from tests.helpers.examples import IS_NIGHTLY

# No deadline: the time of an example includes waiting for a core. The same examples in each `make test`, since few of
# them may happen to lack what a test must see; `make test-long` draws others each time.
hypothesis.settings.register_profile(
    "toka", deadline=None, max_examples=100 if IS_NIGHTLY else 25, derandomize=not IS_NIGHTLY
)
hypothesis.settings.load_profile("toka")

# Small torch operations take 100 times as long if their threads wait for a core.
torch.set_num_threads(1)

# Servers that tests start keep their files and batches apart from the user's.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="toka-tests-")

if threading.current_thread() is threading.main_thread():
    # `nohup make test &` starts tests with these signals ignored, which processes that tests start and stop would
    # inherit. A signal with a handler is at its default in a new program. This process survives a hang-up as before.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for _number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, lambda *_: None)
