"""Trainings with sentence-transformers, each as a user writes it.

They use a tiny encoder and pairs of sentences.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support import tiny
from tests.support.spy import Configuration, Training
from tests.support.tiny_trainer import TEXTS
from tests.support.trl_runs import PLAIN

PLAIN_HERE = {name: value for name, value in PLAIN.items() if name != "gradient_checkpointing"}


def encoder(folder: Path, dropout: float = 0.0, adapters: bool = False) -> Any:
    """Return a tiny BERT with mean pooling, made from a folder as every user does."""
    from sentence_transformers import SentenceTransformer

    bert: Any = tiny.bert(dropout=dropout, hidden_size=96, num_attention_heads=6, initializer_range=0.2)
    bert.bert.save_pretrained(folder / "encoder")
    tiny.bert_tokenizer().save_pretrained(folder / "encoder")
    models = importlib.import_module("sentence_transformers.models")
    words = models.Transformer(str(folder / "encoder"))
    found = SentenceTransformer(modules=[words, models.Pooling(96, "mean")], device="cpu")
    if adapters:
        import peft

        torch.manual_seed(0)
        found.add_adapter(peft.LoraConfig(r=32, lora_alpha=32, target_modules=["query", "key", "value"]))
    return found


def pairs() -> list[dict[str, Any]]:
    """Return pairs of sentences."""
    return [{"anchor": one, "positive": two} for one, two in itertools.pairwise((*TEXTS, TEXTS[0]))]


def scored() -> list[dict[str, Any]]:
    """Return pairs of sentences with how alike they are."""
    rows = enumerate(itertools.pairwise((*TEXTS, TEXTS[0])))
    return [{"sentence1": one, "sentence2": two, "score": i / 8} for i, (one, two) in rows]


def triplets() -> list[dict[str, Any]]:
    """Return a sentence, one like it and one unlike it."""
    rows = zip(TEXTS, (*TEXTS[1:], TEXTS[0]), (*TEXTS[2:], *TEXTS[:2]), strict=True)
    return [{"anchor": one, "positive": two, "negative": three} for one, two, three in rows]


def sentences(
    loss: str,
    rows: Callable[[], list[dict[str, Any]]] = pairs,
    dropout: float = 0.0,
    adapters: bool = False,
    about: dict[str, Any] | None = None,
    **arguments: Any,
) -> Callable[[Training], None]:
    """Return a training with `SentenceTransformerTrainer`."""

    def train(run: Training) -> None:
        from datasets import Dataset
        from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

        model = encoder(run.folder, dropout, adapters)
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=str(run.folder / "trainer"), **{**PLAIN_HERE, **arguments}
            ),
            train_dataset=Dataset.from_list(rows()),
            loss=getattr(losses, loss)(model, **(about or {})),
        )
        run.trainer(trainer, model[0].auto_model)
        trainer.train()

    return train


ALL = (
    Configuration("sentences, MNRL", sentences("MultipleNegativesRankingLoss")),
    Configuration("sentences, MNRL, dropout", sentences("MultipleNegativesRankingLoss", dropout=0.1)),
    Configuration(
        "sentences, MNRL, accumulation", sentences("MultipleNegativesRankingLoss", gradient_accumulation_steps=2)
    ),
    Configuration("sentences, MNRL, triplets", sentences("MultipleNegativesRankingLoss", rows=triplets)),
    Configuration(
        "sentences, cached MNRL", sentences("CachedMultipleNegativesRankingLoss", about={"mini_batch_size": 1})
    ),
    Configuration("sentences, cosine", sentences("CosineSimilarityLoss", rows=scored)),
    Configuration("sentences, CoSENT", sentences("CoSENTLoss", rows=scored)),
    Configuration("sentences, triplet", sentences("TripletLoss", rows=triplets)),
    Configuration("sentences, MNRL, LoRA", sentences("MultipleNegativesRankingLoss", adapters=True, max_steps=4)),
    Configuration("sentences, MNRL, bf16", sentences("MultipleNegativesRankingLoss", bf16=True, use_cpu=True)),
)
