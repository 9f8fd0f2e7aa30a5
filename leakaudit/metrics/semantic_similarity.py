"""`semantic_similarity`: cosine of sentence embeddings, by a local model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leakaudit.plugins import Level, ModelError, Pair, metric

if TYPE_CHECKING:
    from torch import Tensor


@metric("semantic_similarity")
@dataclass(frozen=True)
class SemanticSimilarity:
    """Cosine of the sentence embeddings of guess and true text.

    It is 0 if the cosine is negative or nothing was guessed. An embedding is the mean of the encoder's last hidden states over the
    tokens of a text, as in Sentence-BERT. A synonym counts as right. Unrelated sentences of one kind score well above 0.

    Attempts have this score only if `AuditConfig.sentence_model` names a model. This is never the model under attack.
    """

    path: Path | None = None
    """Folder of an encoder and its tokenizer, as `save_pretrained` writes it; nothing is downloaded."""

    name: ClassVar[str]
    label: ClassVar[str] = "semantic similarity"
    meaning: ClassVar[str] = (
        "Cosine of the sentence embeddings of recovered and true text; unrelated texts are well above 0."
    )
    needs_model: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Level] = "sequence"
    source: ClassVar[str] = "Beyond Gradient and Priors (2023), Sec. 5.3, Cos_S; Reimers and Gurevych 2019"

    def __call__(self, pair: Pair) -> float | None:
        """Return the cosine, None if the true text is empty.

        Raises:
            ModelError: no folder was named, or it holds no encoder.
        """
        if self.path is None:
            raise ModelError("semantic_similarity needs the folder of a sentence model, as `sentence_model` names it")
        if not pair.true_text.strip():
            return None
        if not pair.guess_text.strip():
            return 0.0
        if pair.true_text == pair.guess_text:
            return 1.0
        one, other = _embedded(self.path, (pair.true_text, pair.guess_text))
        return min(1.0, max(0.0, float(one @ other)))


def check_sentence_model(path: Path) -> None:
    """Refuse a folder that holds no sentence model.

    Raises:
        ModelError: the folder holds no usable model. The message says why.
    """
    _encoder(path)


def _embedded(path: Path, texts: tuple[str, ...]) -> Tensor:
    """Return (N, D) embeddings of length 1."""
    import torch

    model, tokenizer = _encoder(path)
    inputs = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states: Tensor = model(**inputs).last_hidden_state  # (N, T, D)
    mask = inputs["attention_mask"][..., None].to(states)
    return torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


@lru_cache(maxsize=1)
def _encoder(path: Path) -> tuple[Any, Any]:
    """Load a model and its tokenizer, and keep the latest.

    Raises:
        ModelError: the folder holds no model that can be loaded.
    """
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: holds no sentence model; give the folder of an encoder, as `save_pretrained` writes it"
        )
    import transformers
    from transformers.utils import logging as hf_logging

    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model: Any = transformers.AutoModel.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library may raise anything for a folder made by hand
        own_code = "trust_remote_code" in str(error)
        why = "it needs code of its own (`auto_map`), and none is ever run" if own_code else type(error).__name__
        raise ModelError(f"{path}: no sentence model can be loaded from it ({why})") from None
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    return model.eval(), tokenizer
