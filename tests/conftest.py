"""Settings of all tests."""

import hypothesis
import torch

# Examples may wait for a core: the time that one takes says nothing.
hypothesis.settings.register_profile("toka", deadline=None)
hypothesis.settings.load_profile("toka")

# Small torch operations take a hundred times as long where their threads have to wait for a core.
torch.set_num_threads(1)
