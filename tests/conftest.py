"""What every test may rely on."""

import os

# Test runners may set the width of a terminal that is not there; tables then are not what a pipe
# gets.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import hypothesis  # noqa: E402

# The same examples in every run: a check that fails must fail again.
hypothesis.settings.register_profile("steady", derandomize=True)
hypothesis.settings.load_profile("steady")
