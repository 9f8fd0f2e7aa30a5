"""The parts of a model that attacks read, found by structure.

It may import `errors` only. There is one tracer (`trace`), and one module for each part: attention, adapters, feed-forward parts,
the layers of a decoder, embeddings, pooler and output layer.
"""

from leakaudit.models.structure.adapters import Adapter, adapter_groups
from leakaudit.models.structure.anatomy import Anatomy, anatomy_of, find_anatomy
from leakaudit.models.structure.attention import Head
from leakaudit.models.structure.chosen_layers import NAMED_LAYERS, is_layer_choice, parameters_of_layers
from leakaudit.models.structure.decoder import Tail, find_tail, prefix_readers
from leakaudit.models.structure.dropout import dropout_rates
from leakaudit.models.structure.embeddings import output_embedding, vocabulary_size, word_embedding
from leakaudit.models.structure.feed_forward import (
    FeedForward,
    features_into,
    find_down_projection,
    find_last_feed_forward,
    logit_jacobian,
    run_from,
)
from leakaudit.models.structure.first_layers import parameters_up_to_block
from leakaudit.models.structure.input_stage import InputStage, Norm, input_stage_of
from leakaudit.models.structure.layers import Projection
from leakaudit.models.structure.output_head import find_output_head, head_outputs
from leakaudit.models.structure.pooler import Pooler, find_pooler
from leakaudit.models.structure.trace import probed_inputs, run_until

__all__ = [
    "NAMED_LAYERS",
    "Adapter",
    "Anatomy",
    "FeedForward",
    "Head",
    "InputStage",
    "Norm",
    "Pooler",
    "Projection",
    "Tail",
    "adapter_groups",
    "anatomy_of",
    "dropout_rates",
    "features_into",
    "find_anatomy",
    "find_down_projection",
    "find_last_feed_forward",
    "find_output_head",
    "find_pooler",
    "find_tail",
    "head_outputs",
    "input_stage_of",
    "is_layer_choice",
    "logit_jacobian",
    "output_embedding",
    "parameters_of_layers",
    "parameters_up_to_block",
    "prefix_readers",
    "probed_inputs",
    "run_from",
    "run_until",
    "vocabulary_size",
    "word_embedding",
]
