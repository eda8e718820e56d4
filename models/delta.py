"""Layers with a delta rule: gated delta nets (arXiv 2412.06464), Kimi delta attention (2510.26692).

The state forgets, gives up what it said of a key, and takes the key's new value.
"""

from perfmodel.models.recurrent import Recurrent
from perfmodel.operators import Recurrence
from perfmodel.relax import Real


class GatedDelta(Recurrent):
    """A gated delta net: `heads` of values over `key_heads` of queries and keys.

    The input projections make queries, keys, values, a gate of the values' width, and a decay and
    a rate per head; queries, keys and values pass the convolution. Beside it: decay and its bias
    per head, and one norm of a head's width for all. Source: transformers, Qwen3NextGatedDeltaNet.
    """

    @property
    def kind(self) -> Recurrence:
        """Static: the recurrence."""
        return "delta"

    def _columns(self, heads: Real, keys: Real) -> Real:
        return 2 * keys * self.state + 2 * heads * self.width + 2 * heads

    def _own_vectors(self, heads: Real) -> Real:
        return 2 * heads + self.width


class KimiDelta(Recurrent):
    """Kimi delta attention with a gate of full rank: each element of a key decays on its own.

    Decays come out of a vector of `decay_rank`, on every rank. Beside the convolution: decay per
    head, its bias per element of a key, one norm of a head's width. Source: tensors of Kimi K3's
    checkpoint (f_a_proj, f_b_proj, b_proj, g_proj, A_log, dt_bias, o_norm), as public loaders list.
    """

    decay_rank: Real = 128

    @property
    def kind(self) -> Recurrence:
        """Static: the recurrence."""
        return "delta"

    def _columns(self, heads: Real, keys: Real) -> Real:
        return 2 * keys * self.state + 2 * heads * self.width + heads

    def _shared_columns(self) -> Real:
        return self.decay_rank

    def _beside(self, hidden: Real) -> tuple[tuple[str, Real, Real], ...]:
        del hidden
        return (("decay_projection", self.state, self.decay_rank),)

    def _own_vectors(self, heads: Real) -> Real:
        return heads + heads * self.state + self.width
