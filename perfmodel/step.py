"""What one engine step asks of one rank: tokens, contexts, and how the network is cut.

A step carries `sequences` that each decode one token, and optionally one chunk of a prompt.
Models turn a `Step` and a `Shard` into operators with per-rank shapes.
"""

import equinox as eqx

from perfmodel.relax import Real, divide, maximum, minimum


class Chunk(eqx.Module):
    """Prompt tokens processed in a step.

    Fields: `tokens` of all its prompts; `pairs`, the mean number of (query, key) pairs of one
    prompt's part under the causal mask, cached keys included; `keys`, the mean number of keys of
    a part's last query; `ends`, how many prompts end in it, and so need logits; `prompts`, how
    many share it. For masks other than the causal one: a whole prompt's `new` tokens after
    `cached` ones, and the `share` of them in one part. `images` among the tokens, on average, whose
    encoding is part of the step; None where prompts have none.
    """

    tokens: Real
    pairs: Real
    keys: Real
    ends: Real = 1
    prompts: Real = 1
    new: Real = 0
    cached: Real = 0
    share: Real = 1
    images: Real | None = None

    @property
    def queries(self) -> Real:
        """Tokens of one prompt's part."""
        return divide(self.tokens, self.prompts)

    @property
    def encodings(self) -> tuple[Real, Real]:
        """Images encoded at once, and how often that is in a step: less than one image a step is
        one image in a share of the steps.

        >>> Chunk(2048, 0, 0, images=3).encodings, Chunk(2048, 0, 0, images=0.25).encodings
        ((3, 1), (1, 0.25))
        """
        images = 0 if self.images is None else self.images
        return maximum(images, 1), minimum(images, 1)


class Step(eqx.Module):
    """One pass through the network: `sequences` × `queries` decoding tokens and a chunk.

    `context` is the mean number of keys a decoding token attends to, itself included. All of
    that is of one attention group; `groups` of them, with equal steps, share the feed-forward
    layers (attention data parallelism; None where it is not in use).
    """

    sequences: Real
    context: Real
    queries: Real = 1
    chunk: Chunk | None = None
    groups: Real | None = None

    @property
    def phase(self) -> str:
        """Static: "decode", or "mixed" where a chunk rides along."""
        return "decode" if self.chunk is None else "mixed"

    @property
    def rows(self) -> Real:
        """Tokens of one attention group."""
        decoding = self.sequences * self.queries
        return decoding if self.chunk is None else decoding + self.chunk.tokens

    @property
    def all_rows(self) -> Real:
        """Tokens of all attention groups, as the feed-forward layers see them."""
        return self.rows if self.groups is None else self.rows * self.groups

    @property
    def logits(self) -> Real:
        """Rows that need the output head, of all attention groups."""
        decoding = self.sequences * self.queries
        ending = decoding if self.chunk is None else decoding + self.chunk.ends
        return ending if self.groups is None else ending * self.groups


def causal_pairs(new: Real, cached: Real) -> Real:
    """Returns the pairs of `new` queries after `cached` keys: new·cached + new·(new + 1)/2.

    >>> causal_pairs(3, 2)
    12
    """
    return divide(new * (2 * cached + new + 1), 2)


class Shard(eqx.Module):
    """How layers are cut over the chips of a stage.

    Fields: `ranks` of a stage; `kv_shards`, parts of one chip that must each hold a kv head (1 on
    most); `share` of a chip that a stage has (1, or less beside others); `attention_groups`, how
    many groups of ranks attend to sequences of their own (attention data parallelism);
    `context_ranks`, over how many ranks a sequence's keys are spread (context parallelism);
    `expert_ranks`, over how many ranks whole experts are spread (expert parallelism), while each
    expert is cut over the rest. None where a plan does not offer the choice; it then is 1 and
    costs no operation.
    """

    ranks: Real = 1
    kv_shards: Real = 1
    share: Real = 1
    attention_groups: Real | None = None
    context_ranks: Real | None = None
    expert_ranks: Real | None = None

    @property
    def attention_ranks(self) -> Real:
        """Ranks over which the heads of one attention group are cut."""
        if self.attention_groups is None:
            return self.ranks
        return divide(self.ranks, self.attention_groups)

    def kv_heads(self, kv_heads: Real) -> Real:
        """Returns kv heads held by one rank; past their number they are replicated.

        Context ranks hold the same heads of different keys, so they count before replication.

        >>> Shard(16).kv_heads(8), Shard(4).kv_heads(8), Shard(16, context_ranks=2).kv_heads(8)
        (1, 2, 1)
        """
        ranks = self.attention_ranks
        if self.context_ranks is not None:
            ranks = divide(ranks, self.context_ranks)
        return maximum(divide(kv_heads, ranks * self.kv_shards), 1) * self.kv_shards

    def keys(self, keys: Real) -> Real:
        """Returns the keys of a sequence that one rank holds."""
        return keys if self.context_ranks is None else divide(keys, self.context_ranks)
