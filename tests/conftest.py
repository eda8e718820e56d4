"""What every test may rely on."""

import os
import pathlib

# Test runners may set the width of a terminal that is not there; tables then are not what a pipe
# gets.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

# Test processes share what they compile, and so do later runs: most of a test's time is compiling.
_COMPILED = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis  # noqa: E402

# The same examples in every run: a check that fails must fail again.
# A failing example is reported as found: shrinking one that compiles takes minutes.
_PHASES = tuple(p for p in hypothesis.Phase if p is not hypothesis.Phase.shrink)
hypothesis.settings.register_profile("steady", derandomize=True, phases=_PHASES)
hypothesis.settings.load_profile("steady")
