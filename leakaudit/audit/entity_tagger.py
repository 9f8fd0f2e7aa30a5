"""An entity tagger: a spaCy pipeline that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from leakaudit.audit.scoring.score import Tagger
from leakaudit.errors import ModelError, type_and_place

KINDS = frozenset({"PERSON", "PER", "ORG", "GPE", "LOC", "PRODUCT", "EVENT"})
"""Labels of the entities that count. Source: FILM (Gupta et al. 2022), Appendix A; `PER` is the name of persons in pipelines of other
languages than English. A pipeline that uses none of these labels counts with all of its own."""


@lru_cache(maxsize=1)
def entity_tagger(name: str) -> Tagger:
    """Load a spaCy pipeline; the latest one is kept.

    Args:
        name: an installed pipeline such as `en_core_web_sm`, or the folder of one. Nothing is downloaded.

    Raises:
        ModelError: spaCy or the pipeline is not installed, or the pipeline finds no entities.
    """
    pipeline = _pipeline(name)
    labels = {label for _, part in pipeline.pipeline for label in getattr(part, "labels", ()) or ()}
    if not any(part in ("ner", "entity_ruler") for part in pipeline.pipe_names):
        raise ModelError(
            f"entity tagger {name!r}: the pipeline finds no entities; it has {', '.join(pipeline.pipe_names) or 'no part'}, looked for ner"
        )
    counted = KINDS if labels & KINDS else labels

    def tag(texts: Sequence[str]) -> list[tuple[str, ...]]:
        return [tuple(found.text for found in doc.ents if found.label_ in counted) for doc in pipeline.pipe(texts)]

    return tag


def _pipeline(name: str) -> Any:
    try:
        import spacy  # type: ignore[import-not-found, unused-ignore]  # an extra, absent in most installations
    except ImportError:
        raise ModelError(
            f"entity tagger {name!r}: spaCy is not installed; install it with `pip install 'leakaudit[entities]'` and a pipeline "
            "with `python -m spacy download en_core_web_sm`"
        ) from None
    if not spacy.util.is_package(name) and not Path(name).is_dir():
        raise ModelError(
            f"entity tagger {name!r}: no spaCy pipeline of this name is installed, and no folder has this name; "
            "install one with `python -m spacy download en_core_web_sm`, or give the folder of one"
        )
    try:
        return spacy.load(name)
    except Exception as error:  # the library may raise anything for a folder made by hand
        raise ModelError(f"entity tagger {name!r}: it cannot be loaded ({type_and_place(error)})") from None
