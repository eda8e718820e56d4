"""Systolic arrays with HBM on a torus: Google TPU.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a TPU; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
