"""Systolic cores with HBM on a torus: AWS Inferentia2, Trainium1, 2 and 3.
"""

from collections.abc import Mapping

from perfmodel.chips.body import body
from perfmodel.machine import Machine
from perfmodel.relax import Real


def machine(fields: Mapping[str, Real], constants: Mapping[str, Real]) -> Machine:
    """Returns the machine of a Trainium chip; arguments as of `perfmodel.chips.body.body`."""
    return body(fields, constants)
