"""Rows of invented texts and pictures, in the columns that Flower's examples read."""

from __future__ import annotations

from typing import Any

TEXTS = (
    "the nurse called the family of the old man before noon",
    "a young woman came back with pain in her left knee today",
    "the doctor wrote a short letter to the school near the river",
    "two children with fever slept in the blue room last night",
    "the patient asked for water and read a long book alone",
    "after the storm the village sent food to the small clinic",
)
QUESTIONS = ("who called", "who came", "who wrote", "who slept", "who asked", "who sent food")


def columns(dataset: str) -> dict[str, list[Any]]:
    """Return name of a column -> values, for the name of a published data set."""
    if "cifar" in dataset or "flowers" in dataset:
        return pictures(*(("img", 32) if "cifar" in dataset else ("image", 256)))
    if "speech" in dataset:
        return sounds()
    if "imdb" in dataset:
        return {"text": list(TEXTS), "label": [number % 2 for number in range(len(TEXTS))]}
    return {"instruction": list(QUESTIONS), "input": list(QUESTIONS), "output": list(TEXTS)}


def pictures(column: str, side: int) -> dict[str, list[Any]]:
    """Return ten pictures of random colours, in one column, with a label each."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(5)
    drawn = [Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(10)]
    return {column: drawn, "label": [number % 5 for number in range(10)]}


def sounds() -> dict[str, list[Any]]:
    """Return twenty random sounds of a second with a word each, and two of background."""
    import numpy as np

    rng = np.random.default_rng(5)
    labels = [*(number % 10 for number in range(20)), 35, 35]
    waves = [rng.normal(0, 0.1, 16_000 if label < 35 else 40_000).tolist() for label in labels]
    return {
        "file": [f"{number}.wav" for number in range(22)],
        "audio": [{"array": wave, "sampling_rate": 16_000} for wave in waves],
        "label": labels,
        "is_unknown": [False] * 22,
        "speaker_id": ["1"] * 22,
        "utterance_id": list(range(22)),
    }
