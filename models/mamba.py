"""Mamba-2: a state-space layer whose heads decay by one number a token (arXiv 2405.21060)."""

from perfmodel.models.recurrent import Recurrent
from perfmodel.operators import Recurrence
from perfmodel.relax import Real


class Mamba2(Recurrent):
    """Mamba-2 with `heads` of `width`, and `key_heads` groups that share B and C of `state` each.

    The input projection makes a gate and values of the inner width, B, C and a step per head;
    values, B and C pass the convolution. Beside it: decay, skip weight and step bias of each head,
    and a norm of the inner width. Source: transformers, NemotronHMamba2Mixer.
    """

    @property
    def kind(self) -> Recurrence:
        """Static: the recurrence."""
        return "ssd"

    def _columns(self, heads: Real, keys: Real) -> Real:
        return 2 * heads * self.width + 2 * keys * self.state + heads

    def _own_vectors(self, heads: Real) -> Real:
        return 3 * heads + heads * self.width
