"""Models and tokenizers: loaded from a folder, described as a recipe, rebuilt from one. Never from a hub, never by pickle."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from torch import Tensor, nn

from leakaudit.errors import ModelError
from leakaudit.lora import LoraRecipe, adapted, rebuild_lora

Task = Literal["classification", "causal-lm"]


class Vocabulary(BaseModel):
    """The public facts about a tokenizer that attacks need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    """Ids run from 0 to size - 1."""
    special: dict[str, int] = {}
    """Role -> id: `cls`, `sep`, `pad`, `unk`, `mask`, `bos`, `eos`, as far as the tokenizer has them."""
    starts_with: tuple[int, ...] = ()
    """Ids that the tokenizer puts before every text."""
    ends_with: tuple[int, ...] = ()
    """Ids that the tokenizer puts after every text."""
    max_length: int = 512

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of all special tokens."""
        return frozenset(self.special.values())

    @property
    def surrounding_ids(self) -> frozenset[int]:
        """Return the ids that the tokenizer puts around every text."""
        return frozenset({*self.starts_with, *self.ends_with})

    @property
    def wordless_ids(self) -> frozenset[int]:
        """Return every id that stands for no word of a text: special ones and those around every text."""
        return self.special_ids | self.surrounding_ids


class ModelRecipe(BaseModel):
    """How to rebuild a model's architecture without pickle: a class of `transformers` and its live configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    class_name: str
    config: dict[str, Any]
    lora: LoraRecipe | None = None
    """Adapters in it, if any."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelRecipe:
        """Describe a live `transformers` model by its class and its configuration as it is now.

        Raises:
            ModelError: the class is not one that `transformers` exports, or its adapters are none that can be rebuilt.
        """
        import transformers

        name = type(model).__name__
        config = getattr(model, "config", None)
        if config is None or getattr(transformers, name, None) is not type(model):
            raise ModelError(
                f"{type(model).__module__}.{name} is no model class that transformers exports, so the side process "
                "cannot rebuild it; only such classes are supported so far"
            )
        # Where it was loaded from is no part of the architecture, and may name a person or a project.
        public = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
        # `model.to(torch.bfloat16)` leaves the configuration behind.
        public["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
        return cls(class_name=name, config=public, lora=adapted(model))


WRAPPER_PARTS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_module.")
"""What DDP, torch.compile, FSDP1, checkpoint wrappers and Opacus put into the names of parameters."""

WRAPPER_CLASSES = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "AbstractGradSampleModule": "_module",
    "GradSampleModule": "_module",
    "_FabricModule": "_original_module",
}
"""Class -> attribute of the model that it wraps. By name, because most of these libraries are not imported here."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself, out of torch.compile, DDP, FSDP, Opacus, Fabric and peft, however they are nested."""
    while True:
        kinds = [kind.__name__ for kind in type(model).__mro__]
        attribute = next((WRAPPER_CLASSES[kind] for kind in kinds if kind in WRAPPER_CLASSES), None)
        if attribute is not None:
            model = getattr(model, attribute)
        elif "PeftModel" in kinds:
            model = model.get_base_model()  # type: ignore[operator]
        else:
            return model


def plain_name(name: str) -> str:
    """Return a parameter's name as the model itself gives it.

    >>> plain_name("module.encoder._checkpoint_wrapped_module.0.weight")
    'encoder.0.weight'
    """
    found = f".{name}"
    for part in WRAPPER_PARTS[1:]:
        found = found.replace(f".{part}", ".")
    return found[1:].removeprefix(WRAPPER_PARTS[0])


def outputs_of(outputs: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every floating-point tensor of a model's output with its path: `loss`, `hidden_states.3`, `output` for a bare one."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield path or "output", outputs
        return
    if isinstance(outputs, Mapping):
        items: Any = outputs.items()
    elif isinstance(outputs, tuple | list):
        items = enumerate(outputs)
    else:
        return
    for key, value in items:
        yield from outputs_of(value, f"{path}.{key}" if path else str(key))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' loading report and progress bars off the terminal: a fresh head is what we asked for."""
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


def build_model(recipe: ModelRecipe, weights: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild a model with eager attention, in eval mode, on the CPU.

    Eager, because scaled-dot-product attention has no second derivative on a CPU and gradient matching needs one.

    Args:
        recipe: class and configuration.
        weights: every parameter and persistent buffer, tied ones once.

    Raises:
        ModelError: the class is unknown, or the weights do not fit it.
    """
    import transformers
    from transformers.initialization import no_init_weights

    kind: Any = getattr(transformers, recipe.class_name, None)
    if not hasattr(kind, "_from_config"):
        raise ModelError(f"transformers {transformers.__version__} has no class {recipe.class_name!r}")
    try:
        config = kind.config_class.from_dict(recipe.config)
        # Every weight is loaded in the next line: initialising them first would take longer than all the rest.
        with _quiet_transformers(), torch.random.fork_rng(devices=[]), no_init_weights():
            model: nn.Module = kind._from_config(config, attn_implementation="eager")
        model.tie_weights()  # type: ignore[operator]
        if recipe.lora is not None:
            rebuild_lora(model, recipe.lora)
        outcome = model.load_state_dict(dict(weights), strict=False)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"cannot rebuild {recipe.class_name} from its recipe: {type(error).__name__}") from None
    aliases = {second for _, second in tied_names(model)} | {first for first, _ in tied_names(model)}
    missing = [name for name in outcome.missing_keys if name not in aliases]
    if missing or outcome.unexpected_keys:
        first = (missing or outcome.unexpected_keys)[0]
        raise ModelError(
            f"{recipe.class_name}: {len(missing)} weights are missing and {len(outcome.unexpected_keys)} are not its own, "
            f"first {first!r}"
        )
    return model.eval()


def load_model(
    folder: Path, task: Task, *, num_labels: int = 2, seed: int = 0, device: torch.device | None = None
) -> nn.Module:
    """Load a model as `save_pretrained` wrote it; a missing classification head is freshly initialised from `seed`.

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
        with _quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = kinds[task].from_pretrained(
                folder, attn_implementation="eager", local_files_only=True, dtype=torch.float32, **options
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = str(error).splitlines()[0][:200]
        if "ignore_mismatched_sizes" in reason:  # transformers points to a report above, which is switched off
            reason = (
                f"its stored weights do not fit a head of {num_labels} classes; set the number of labels to its own"
            )
        raise ModelError(f"{folder}: cannot be loaded for {task}: {reason}") from None
    return model.eval().to(device or "cpu")


TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Where the tokenizers of transformers keep their vocabulary. Without one, `AutoTokenizer` makes an empty tokenizer without a
word, and every text would be a row of unknown tokens."""


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that stands beside a model.

    Raises:
        ModelError: there is none.
    """
    _check_folder(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ModelError(f"{folder}: no tokenizer can be loaded from it: found none of {', '.join(TOKENIZER_FILES)}")
    import transformers

    try:
        with _quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ModelError(f"{folder}: no tokenizer can be loaded from it: {reason}") from None


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; give the folder that `save_pretrained` wrote (nothing is downloaded)"
        )
    if not (folder / "config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{folder}: holds no config.json, found {found}; give the folder that `save_pretrained` wrote")


def vocabulary_of(tokenizer: Any, model: nn.Module) -> Vocabulary:
    """Return the public facts about a tokenizer.

    Raises:
        ModelError: the tokenizer has ids that the model's embedding has no row for.
    """
    roles = ("cls", "sep", "pad", "unk", "mask", "bos", "eos")
    special = {role: getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's embedding only {rows} rows: "
            "they do not belong together"
        )
    # What the tokenizer adds to every text is what two different texts have in common at both ends.
    alone, wrapped = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    start = next((i for i in range(len(wrapped)) if wrapped[i : i + len(alone)] == alone), 0)
    longest = min(int(tokenizer.model_max_length), int(getattr(model.config, "max_position_embeddings", 10**6)))
    return Vocabulary(
        size=rows,
        special={role: int(found) for role, found in special.items() if found is not None},
        starts_with=tuple(wrapped[:start]),
        ends_with=tuple(wrapped[start + len(alone) :]),
        max_length=longest,
    )


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return pairs (name under which the parameter is listed, its other name) for parameters a model uses twice."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            pairs.append((first[id(parameter)], name))
        else:
            first[id(parameter)] = name
    return tuple(pairs)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, tied ones once; references, not copies."""
    persistent = set(model.state_dict().keys())
    found = dict(model.named_parameters())
    return {
        **{name: parameter.detach() for name, parameter in found.items()},
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }
