"""JAX's persistent compilation cache, for scripts and commands that start often."""

import os
import pathlib
import sys


def folder() -> pathlib.Path:
    """Returns this user's cache folder for compiled programs."""
    home = pathlib.Path.home()
    if sys.platform == "win32":
        base = pathlib.Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "perfmodel"


def enable_cache(path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Turns on JAX's compilation cache in `path`, or this user's cache folder, and returns it.

    Programs compiled once are then read back in later runs. Importing perfmodel never does this:
    call it before the first estimate of a script. A folder already chosen through
    JAX_COMPILATION_CACHE_DIR is kept where no path is given.
    """
    import jax

    already = getattr(jax.config, "jax_compilation_cache_dir", None)
    chosen = already if path is None else None
    where = pathlib.Path(chosen or path or folder())
    jax.config.update("jax_compilation_cache_dir", os.fspath(where))
    # Every program, however small and quick to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return where
