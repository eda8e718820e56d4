"""Networks that run: each layer kind in Flax, to check its operators against.

`build(model, rngs)` makes one with weights, `abstract(model)` one that holds shapes alone, so that
networks of any published size can be counted and traced on any machine. Sizes, biases, norms,
masks, routing and cache are those of the `Model`; what changes no count (activation functions,
rotary bases, scales of logits) is one common choice, so published weights do not belong here.
"""

from perfmodel.models.networks.attention import SelfAttention as SelfAttention
from perfmodel.models.networks.block_sparse import BlockSelfAttention as BlockSelfAttention
from perfmodel.models.networks.cache import Cache as Cache
from perfmodel.models.networks.compressed import CompressedSelfAttention as CompressedSelfAttention
from perfmodel.models.networks.latent import LatentSelfAttention as LatentSelfAttention
from perfmodel.models.networks.mixture import Mixture as Mixture
from perfmodel.models.networks.mlp import FeedForward as FeedForward
from perfmodel.models.networks.parallel import tensor_parallel as tensor_parallel
from perfmodel.models.networks.recurrent import RecurrentLayer as RecurrentLayer
from perfmodel.models.networks.transformer import Decoder as Decoder
from perfmodel.models.networks.transformer import abstract as abstract
from perfmodel.models.networks.transformer import build as build
from perfmodel.models.networks.transformer import chunked_prefill as chunked_prefill
from perfmodel.models.networks.transformer import decode as decode
from perfmodel.models.networks.transformer import empty_cache as empty_cache
from perfmodel.models.networks.transformer import prefill as prefill
