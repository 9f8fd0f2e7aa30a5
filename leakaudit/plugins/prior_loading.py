"""Loading of priors that a user names: by name with knobs, file or folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from leakaudit.config.audit import PluginSpec
from leakaudit.errors import ConfigError, DataError
from leakaudit.files.json_lines import numbered_lines, numbered_objects, text_of
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.prior_protocol import Prior, Scorer
from leakaudit.registry import priors


def choose_prior(what: str) -> Prior:
    """Return the prior that a user named.

    Args:
        what: a registered name with or without knobs (`ngram`, `victim`, `ngram(path=news.safetensors)`), a file of an n-gram model,
            or the folder of a causal language model.

    Raises:
        ConfigError: `what` is not one of these.
    """
    path = Path(what)
    if path.is_dir():
        options: dict[str, Any] = {"path": what}
        return priors.create("causal-lm", options)  # type: ignore[no-any-return]
    if path.is_file():
        return priors.create("ngram", {"path": what})  # type: ignore[no-any-return]
    try:
        spec = PluginSpec.parse(what)
    except ValueError as error:
        raise ConfigError(f"prior: {error}") from None
    if spec.name not in priors.names() and (path.suffix or path.parent != Path()):
        raise ConfigError(f"prior {what!r}: no such file or folder, and none of {', '.join(priors.names())}")
    return priors.create(spec.name, spec.options)  # type: ignore[no-any-return]


def load_prior(what: str, *, vocabulary: Vocabulary, victim: nn.Module | None = None) -> Scorer:
    """Return a scorer of sequences of the victim's tokens.

    Args:
        what: as `choose_prior` takes it.
        vocabulary: the victim's vocabulary, which is public.
        victim: the public model.

    Raises:
        ConfigError: there is no such prior.
        PriorError: it cannot be loaded, or its tokens cannot be mapped to the victim's.
    """
    return choose_prior(what).load(vocabulary, victim)


SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=\S)")


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file.

    In a JSONL file, the field `text` of each row is a text. In any other file, each sentence of each line is a text.

    Raises:
        DataError: the file is missing, is no UTF-8 text or holds no text, or a line is no object with a `text`. The message names the line.
    """
    if path.suffix == ".jsonl":
        texts = [text_of(path, number, row) for number, row in numbered_objects(path)]
    else:
        texts = [part.strip() for _, line in numbered_lines(path) for part in _sentences(line)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{path}: holds no text")
    return texts


def _sentences(line: str) -> list[str]:
    """Return the sentences of a line; any Unicode line break ends a sentence."""
    return [part for piece in line.splitlines() for part in SENTENCE_END.split(piece)]
