"""Models and tokenizers, loaded from a folder without a hub or pickle."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from leakaudit.errors import ModelError
from leakaudit.files.strict_json import read_bounded
from leakaudit.models.config_numbers import MAX_CONFIG_BYTES, check_config
from leakaudit.models.versions import dtype_option

Task = Literal["classification", "causal-lm"]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the loading report and the progress bars of transformers.

    The report would warn about a new head, which is intended here.
    """
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def load_model(
    folder: Path,
    task: Task,
    *,
    num_labels: int = 2,
    seed: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Load a model that `save_pretrained` wrote.

    A missing classification head is initialised from `seed`.

    Args:
        folder: holds config.json and the weights.
        task: decides the head.
        num_labels: number of classes of a classifier.
        seed: of a missing head.
        device: where the model is put; None is the CPU.
        dtype: of the weights; None keeps that of the checkpoint, as `from_pretrained` of a training script does.

    Raises:
        ModelError: the folder is missing, has no config.json, or holds no such model.
    """
    _check_folder(folder)
    import transformers

    kinds = {
        "classification": transformers.AutoModelForSequenceClassification,
        "causal-lm": transformers.AutoModelForCausalLM,
    }
    options: dict[str, Any] = {"num_labels": num_labels} if task == "classification" else {}
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = kinds[task].from_pretrained(
                folder,
                attn_implementation="eager",
                **dtype_option(dtype or "auto"),
                use_safetensors=True,
                **NOTHING_FOREIGN,
                **options,
            )
    except Exception as error:  # whatever a folder made by hand leads a library to
        reason = _reason(error)
        if "ignore_mismatched_sizes" in str(error):  # the message refers to a report, which is hidden here
            own = classes_of_head(folder)
            reason = f"its stored weights do not fit a head of {num_labels} classes; "
            reason += (
                f"the model has {own} classes: add --num-labels {own}" if own else "set the number of labels to its own"
            )
        raise ModelError(f"{folder}: cannot be loaded for {task}: {reason}") from None
    return model.eval().to(device or "cpu")


def classes_of_head(folder: Path) -> int | None:
    """Return the number of classes of the classifier that is stored in a folder.

    None if config.json names no classifier of sequences, cannot be read, or says one class (a regression).
    """
    try:
        config: Any = json.loads(read_bounded(folder / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or not str(config.get("architectures")).endswith("ForSequenceClassification']"):
        return None
    names = config.get("id2label")
    stated = (
        len(names) if isinstance(names, dict) else config.get("num_labels", 2)
    )  # transformers writes no names of two classes
    return stated if type(stated) is int and stated >= 2 else None


NOTHING_FOREIGN: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every `from_pretrained`: nothing is downloaded, and code in a folder never runs. Without an explicit False, transformers
asks on the terminal whether such code may run."""


TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files with the vocabulary of the tokenizers of transformers. Without such a file, `AutoTokenizer` makes a tokenizer without words, and
every text would consist of unknown tokens."""


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in a model's folder.

    Raises:
        ModelError: the folder has no tokenizer that can be loaded.
    """
    _check_folder(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ModelError(f"{folder}: no tokenizer can be loaded from it: found none of {', '.join(TOKENIZER_FILES)}")
    import transformers

    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(folder, **NOTHING_FOREIGN)
    except Exception as error:  # whatever a folder made by hand leads a library to
        raise ModelError(f"{folder}: no tokenizer can be loaded from it: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return why a library could not load a folder, in one short line."""
    if "trust_remote_code" in str(error):
        return (
            "it needs code of its own (`auto_map` in its configuration), and code in a folder is never run; give a model of a class that "
            "transformers has"
        )
    lines = str(error).splitlines() or [""]
    return lines[0][:200] if isinstance(error, OSError | ValueError) and lines[0] else type(error).__name__


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; give the folder that `save_pretrained` wrote (nothing is downloaded)"
        )
    if not (folder / "config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{folder}: holds no config.json, found {found}; give the folder that `save_pretrained` wrote")
    check_config(folder / "config.json")
