"""Small models with random weights, their tokenizers, and client steps on them.

They are made in code; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models import versions
from leakaudit.models.loading import Task

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXT_WORDS = (
    "a the dog cat bird fish horse saw ate chased liked found old new red blue small big house tree river road and or "
    "in on at under near today never always one two three four five"
)
WORDS = (*TEXT_WORDS.split(), ".", ",", "!", "?", "##s", "##ed", "##ing")
VOCABULARY = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}

hf: Any = transformers
"""The library builds its classes by name at run time, which a type checker cannot follow."""

HIDDEN = 32
POSITIONS = 32


def bert_tokenizer() -> Any:
    """Return a WordPiece tokenizer that puts [CLS] before and [SEP] after every text."""
    return versions.bert_tokenizer(VOCABULARY, model_max_length=POSITIONS)


def gpt2_tokenizer() -> Any:
    """Return a WordPiece tokenizer over the same words that adds nothing to a text."""
    inner = Tokenizer(models.WordPiece(dict(VOCABULARY), unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="[UNK]",
        eos_token="[SEP]",
        pad_token="[PAD]",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
    )


def bert(num_labels: int = 2, seed: int = 0, dropout: float = 0.0, **more: Any) -> nn.Module:
    """Return a BERT classifier: 2 layers, D = 32, eager attention, eval mode."""
    size = {"hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2}
    config = hf.BertConfig(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=num_labels,
        attn_implementation="eager",
        **(size | more),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = hf.BertForSequenceClassification(config).eval()
    return model


def gpt2_config(**more: Any) -> Any:
    """Return the configuration of a GPT-2 of 2 layers, D = 32, without dropout."""
    return hf.GPT2Config(
        vocab_size=len(VOCABULARY),
        n_embd=HIDDEN,
        n_layer=2,
        n_head=2,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=3,
        eos_token_id=3,
        attn_implementation="eager",
        **more,
    )


def gpt2_lm(seed: int = 0, *, tied: bool = True) -> nn.Module:
    """Return a GPT-2 language model: 2 layers, D = 32, head tied or not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = hf.GPT2LMHeadModel(gpt2_config(tie_word_embeddings=tied)).eval()
    return model


def client_step(
    model: nn.Module,
    tokenizer: Any,
    texts: list[str],
    labels: list[int] | None = None,
    *,
    task: Task = "classification",
    training: bool = False,
    frozen: frozenset[str] = frozenset(),
    max_grad_norm: float | None = None,
    **facts: Any,
) -> ClientStep:
    """Return the step of one client on `texts`.

    Args:
        model: in the mode in which the step is computed.
        tokenizer: the model's.
        texts: B texts.
        labels: B classes; 0 for all if None.
        task: what the model is trained for.
        training: whether dropout is active.
        frozen: names of parameters without an update.
        max_grad_norm: norm to which the client clips; None if it does not.
        **facts: further public facts, such as `batch_size_bound`.
    """
    if task == "classification" and labels is None:
        labels = [0] * len(texts)
    batch = make_batch(tokenizer, texts, labels, task, max_length=POSITIONS)
    public = public_facts(
        model, tokenizer, task=task, training=training, frozen=frozen, max_grad_norm=max_grad_norm, **facts
    )
    return ClientStep(model, Truth((batch,)), StepRecipe(training=training, max_grad_norm=max_grad_norm), public)
