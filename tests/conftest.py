"""Settings of all tests."""

import hypothesis

# Examples may wait for a core: the time that one takes says nothing.
hypothesis.settings.register_profile("toka", deadline=None)
hypothesis.settings.load_profile("toka")
