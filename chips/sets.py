"""Constants of measured sets of kernels: one engine's kernels of one kind on one chip.

A chip of the catalogue takes one set of each kind (`fits/`). A table of measured kernels is of one
engine, and is predicted with the constants of that engine where it was fitted. The file is written
by `perfmodel.calibrate`.
"""

import functools
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from perfmodel import catalog


@functools.cache
def kernel_sets() -> Mapping[tuple[str, str, str, str], Mapping[str, Any]]:
    """Returns every set by (chip, kind, framework, detail).

    `detail` is the number format of products, the library of collectives, format and kernel of
    expert layers, and empty for attention.

    >>> found = kernel_sets()["h100_sxm", "decode", "trtllm", ""]
    >>> 0.0 < found["constants"]["floor"] < 1e-4
    True
    """
    table = catalog.read_toml(files("perfmodel.chips").joinpath("kernel_sets.toml"))
    return {
        (str(one["chip"]), str(one["kind"]), str(one["framework"]), str(one["detail"])): one
        for one in table["set"]
    }
