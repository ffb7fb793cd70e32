"""Settings of all tests."""

import os
import tempfile

import hypothesis
import torch

# No deadline: the time of an example includes waiting for a core.
hypothesis.settings.register_profile("toka", deadline=None)
hypothesis.settings.load_profile("toka")

# Small torch operations take 100 times as long if their threads wait for a core.
torch.set_num_threads(1)

# Servers that tests start keep their files and batches apart from the user's.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="toka-tests-")
