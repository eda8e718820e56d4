"""What one engine step asks of one rank: tokens, contexts, and how the network is cut.

A step carries `sequences` that each decode one token, and optionally one chunk of a prompt.
Models turn a `Step` and a `Shard` into operators with per-rank shapes.
"""

import equinox as eqx

from perfmodel.relax import Real, divide, maximum


class Chunk(eqx.Module):
    """Prompt tokens processed in a step.

    Fields: `tokens` of all its prompts; `pairs`, the mean number of (query, key) pairs of one
    prompt's part under the causal mask, cached keys included; `keys`, the mean number of keys of
    a part's last query; `ends`, how many prompts end in it, and so need logits; `prompts`, how
    many share it.
    """

    tokens: Real
    pairs: Real
    keys: Real
    ends: Real = 1
    prompts: Real = 1


class Step(eqx.Module):
    """One pass through the network: `sequences` × `queries` decoding tokens and a chunk.

    `context` is the mean number of keys a decoding token attends to, itself included.
    """

    sequences: Real
    context: Real
    queries: Real = 1
    chunk: Chunk | None = None

    @property
    def phase(self) -> str:
        """Static: "decode", or "mixed" where a chunk rides along."""
        return "decode" if self.chunk is None else "mixed"

    @property
    def rows(self) -> Real:
        """Tokens in the step."""
        decoding = self.sequences * self.queries
        return decoding if self.chunk is None else decoding + self.chunk.tokens

    @property
    def logits(self) -> Real:
        """Rows that need the output head."""
        decoding = self.sequences * self.queries
        return decoding if self.chunk is None else decoding + self.chunk.ends


def causal_pairs(new: Real, cached: Real) -> Real:
    """Returns the pairs of `new` queries after `cached` keys: new·cached + new·(new + 1)/2.

    >>> causal_pairs(3, 2)
    12
    """
    return divide(new * (2 * cached + new + 1), 2)


class Shard(eqx.Module):
    """How layers are cut over chips.

    Fields: `ranks` of tensor parallelism; `kv_shards`, parts of one chip that must each hold a
    kv head (1 on most); `share` of a chip that a stage has (1, or less beside others).
    """

    ranks: Real = 1
    kv_shards: Real = 1
    share: Real = 1

    def kv_heads(self, kv_heads: Real) -> Real:
        """Returns kv heads held by one rank; past their number they are replicated.

        >>> Shard(16).kv_heads(8), Shard(4).kv_heads(8)
        (1, 2)
        """
        return maximum(divide(kv_heads, self.ranks * self.kv_shards), 1) * self.kv_shards
