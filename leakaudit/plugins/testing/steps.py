"""Steps of a client on small models, for the checks of plugins."""

from __future__ import annotations

from leakaudit.client.step import ClientStep
from leakaudit.plugins.testing.small_models import bert, bert_tokenizer, client_step, gpt2_lm, gpt2_tokenizer

TEXT = "the old dog chased a cat."
"""All its words are in the small models' vocabulary."""


def classifier_step() -> ClientStep:
    """Return a client's step on one sentence of class 1 of 3.

    The model is a small BERT classifier in eval mode.
    """
    return client_step(bert(num_labels=3), bert_tokenizer(), [TEXT], [1], batch_size_bound=1)


def language_model_step() -> ClientStep:
    """Return a client's step on one sentence.

    The model is a small GPT-2 language model in eval mode.
    """
    return client_step(gpt2_lm(), gpt2_tokenizer(), [TEXT], task="causal-lm")
