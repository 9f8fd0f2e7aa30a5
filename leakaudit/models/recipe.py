"""Models and tokenizers: loaded from a folder, described as a recipe, rebuilt from one. Never from a hub, never by pickle."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from leakaudit.errors import ModelError
from leakaudit.models.lora import LoraRecipe, adapted, rebuild_lora
from leakaudit.models.module_parts import put_parts
from leakaudit.models.module_settings import apply_settings, set_buffers, take_types, unstored_buffers

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
    digest: str = ""
    """SHA-256 of all tokens in the order of their ids: what a prior is held against. Empty where it was not kept."""

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
    """How to rebuild a model's architecture without pickle: by a class and a configuration, or by a call that makes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    class_name: str
    config: dict[str, Any] = {}
    """Of a class of transformers, as it is now: a Trainer changes it, and packed sequences attend differently for it."""
    lora: LoraRecipe | None = None
    """Adapters in it, if any."""
    parts: dict[str, str] = {}
    """Small module -> `package:class` that a user put there, such as another activation."""
    settings: dict[str, dict[str, bool | int | float]] = {}
    """Module -> attribute -> number that is not the one its class makes, such as a dropout rate that was changed."""
    made_by: str = ""
    """`package.module:name` of what makes the model, where it is no class of transformers: the model's own class, or a function
    marked with `model_factory`."""
    arguments: dict[str, Any] = {}
    """What it is called with; plain data."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelRecipe:
        """Describe a live model by how another process can make it.

        Two ways, the first that is there: what `rebuilt_by` said, be it a class or a function with its arguments; a class that
        `transformers` exports, with the live configuration.

        Raises:
            ModelError: neither, or the model's adapters are none that can be rebuilt.
        """
        name = type(model).__name__
        if said := getattr(model, MADE_BY, None):
            made_by, arguments = said
            return cls(class_name=name, made_by=made_by, arguments=arguments)
        if (exported := _exported(model)) is not None:
            # Where it was loaded from is no part of the architecture, and may name a person or a project.
            public = architecture(model.config)
            # `model.to(torch.bfloat16)` leaves the configuration behind.
            public["dtype"] = str(dtype_of(model)).removeprefix("torch.")
            return cls(class_name=exported, config=public, lora=adapted(model))
        raise ModelError(
            f"{type(model).__module__}.{name} is no model class that transformers exports, so the side process "
            "cannot rebuild it; say how with `rebuilt_by(model, 'package.module:function', ...)`, or set `schedule: inline`"
        )


PRIVATE_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "task_specific_params", "finetuning_task", "auto_map", "architectures"}
)
"""Keys of a configuration that decide nothing of a model's arithmetic and may name a person, a project, a task or code."""

MAX_LAYERS = 10_000
"""Most layers of a configuration. Our choice: the deepest public model has about a thousand; a configuration class alone takes
20 s for ten millions."""
MAX_NUMBER = 10**10
"""Largest whole number in a configuration. Our choice: a thousand times the longest context in use."""
MAX_LABELS = 1_000_000
"""Most classes of a configuration, which writes a name for each. Our choice: large label sets have tens of thousands."""
SPARE_PARAMETERS = 1_000
"""Parameters that a model may register beyond four times those in the snapshot, for those that are replaced."""
SPARE_NUMBERS = 2**28
"""Numbers that it may register beyond four times those in the snapshot. Our choice: 1 GiB in float32, for masks and tables that are not
stored."""


def architecture(config: Any) -> dict[str, Any]:
    """Return what of a configuration of transformers decides the model; label names become `LABEL_0`, `LABEL_1`...

    Keys that the configuration's class does not declare are the user's own, and so may be private: they are left out.

    Args:
        config: a `PretrainedConfig`.
    """
    return _declared(type(config), config.to_dict())


def _declared(kind: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    known = _declared_keys(kind)
    kept = {key: value for key, value in found.items() if key in known and key not in PRIVATE_KEYS}
    parts = getattr(kind, "sub_configs", None) or {}
    kept |= {
        name: _declared(_part(part), kept[name]) for name, part in parts.items() if isinstance(kept.get(name), dict)
    }
    if isinstance(names := kept.get("id2label"), dict):
        kept["id2label"] = {str(number): f"LABEL_{number}" for number in range(len(names))}
        kept["label2id"] = {f"LABEL_{number}": number for number in range(len(names))}
    return kept


def _part(kind: Any) -> Any:
    """Return the class of a part of a configuration; `AutoConfig` stands for any, of which the base's keys are known."""
    import transformers

    declared = isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig)
    return kind if declared else transformers.PretrainedConfig


def _declared_keys(kind: Any) -> frozenset[str]:
    """Return the keys that a class of configurations declares: fields, defaults, and what every configuration has."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if not fields:
        fields = {*inspect.signature(kind).parameters, *kind().to_dict()}
    return frozenset(
        {*fields, *getattr(kind, "attribute_map", {}), *SPECIAL_TOKENS, "model_type", "output_attentions", "dtype"}
    )


SPECIAL_TOKENS = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
    "sep_token_id",
)
"""Token ids that models of transformers read from their configuration although not every class declares them: an encoder-decoder
(T5, BART) makes its decoder's inputs with `decoder_start_token_id`. The tokenizer makes them public."""


MADE_BY = "_leakaudit_made_by"
"""Attribute of a model that says how it is made."""

FACTORY = "_leakaudit_model_factory"


def model_factory(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Mark a function as one that makes a model, so that the side process may call it.

    The side process calls what a snapshot names. A snapshot is a file, so it may only name what was marked in the code.
    """
    setattr(function, FACTORY, True)
    return function


def rebuilt_by(model: nn.Module, made_by: str, **arguments: Any) -> nn.Module:
    """Say how another process makes this model: by calling `made_by` with `arguments`; its weights are loaded afterwards.

    Args:
        model: the live one.
        made_by: `package.module:name` of a function marked with `model_factory`, or of a class of models.
        arguments: plain data.

    Returns:
        The model.

    Raises:
        ModelError: nothing of that name can be imported, or it is neither; or the arguments are no plain data.
    """
    _maker(made_by)
    _check_plain(made_by, arguments)
    setattr(model, MADE_BY, (made_by, arguments))
    return model


def can_rebuild(model: nn.Module) -> bool:
    """Return whether a model says how it is made, or is one of transformers, apart from a module around such a model."""
    return hasattr(model, MADE_BY) or _exported(model) is not None


def _exported(model: nn.Module) -> str | None:
    """Return the name under which transformers exports the model's class, or None. FSDP2 puts a class of its own in front."""
    import transformers

    if getattr(model, "config", None) is None:
        return None
    kinds = [kind for kind in type(model).__mro__ if kind.__name__ != "FSDPModule"]
    kind = kinds[1] if len(kinds) < len(type(model).__mro__) else kinds[0]
    return kind.__name__ if getattr(transformers, kind.__name__, None) is kind else None


def _check_plain(what: str, arguments: Mapping[str, Any]) -> None:
    try:
        json.dumps(arguments)
    except (TypeError, ValueError):
        odd = [key for key, value in arguments.items() if not isinstance(value, str | int | float | bool | None)]
        raise ModelError(
            f"{what}: its arguments have to be plain data, because they travel as JSON; look at {', '.join(odd)}"
        ) from None


MOVED = {
    "leakaudit.classifiers:array_classifier": "leakaudit.models.array_classifier:array_classifier",
    "leakaudit.pooler:wide_pooler": "leakaudit.models.wide_pooler:wide_pooler",
}
"""Old `made_by` -> where the function is now. Snapshots from before the move name the old place."""


def _maker(made_by: str) -> Callable[..., nn.Module]:
    """Return what makes a model; only what was written to make models.

    Raises:
        ModelError: it cannot be imported, or it is neither a marked function nor a class of models.
    """
    module, colon, name = MOVED.get(made_by, made_by).partition(":")
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{made_by!r} cannot be imported ({type(error).__name__}); give `package.module:name` of something that a new "
            "Python process started in the same folder can import"
        ) from None
    if colon and (getattr(found, FACTORY, False) or (isinstance(found, type) and issubclass(found, nn.Module))):
        return found  # type: ignore[no-any-return]
    raise ModelError(f"{made_by!r} is neither a class of models nor a function marked with `model_factory`")


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


def version_of(tensor: Tensor) -> int:
    """Return torch's count of the writes to a tensor; 0 for one that was made in inference mode, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


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


def build_model(
    recipe: ModelRecipe,
    weights: Mapping[str, Tensor],
    fill: Callable[[nn.Module, list[str]], None] | None = None,
) -> nn.Module:
    """Rebuild a model with eager attention, in eval mode, on the CPU.

    Eager, because scaled-dot-product attention has no second derivative on a CPU and gradient matching needs one.

    Args:
        recipe: class and configuration.
        weights: every parameter and persistent buffer, tied ones once, and unstored buffers that the class makes otherwise.
        fill: gives values to those that are missing; without it none may be.

    Raises:
        ModelError: the class is unknown, or the weights do not fit it.
    """
    try:
        with _no_larger_than(weights):
            model = blank_model(recipe)
        if recipe.lora is not None:
            rebuild_lora(model, recipe.lora)
        put_parts(model, recipe.parts)
        take_types(model, weights)
        beside = {name: weights[name] for name in unstored_buffers(model) if name in weights}
        outcome = model.load_state_dict({k: v for k, v in weights.items() if k not in beside}, strict=False)
        set_buffers(model, beside)
        _check_numbers(recipe.settings)
        apply_settings(model, recipe.settings)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"cannot rebuild {recipe.class_name} from its recipe: {type(error).__name__}") from None
    aliases = {second for _, second in tied_names(model)} | {first for first, _ in tied_names(model)}
    missing = [name for name in outcome.missing_keys if name not in aliases]
    if missing and fill is not None:
        fill(model, missing)
        missing = []
    if missing or outcome.unexpected_keys:
        first = (missing or outcome.unexpected_keys)[0]
        raise ModelError(
            f"{recipe.class_name}: {len(missing)} weights are missing and {len(outcome.unexpected_keys)} are not its own, "
            f"first {first!r}"
        )
    return model.eval()


@contextmanager
def _no_larger_than(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a model with more parameters than its weights are there for, while it is built, before it fills the memory.

    Raises:
        ModelError: there are more than four times as many, beside what is spared.
    """
    most = (
        4 * len(weights) + SPARE_PARAMETERS
    )  # tied ones register twice, and so does a model that is tried without memory first
    room = 4 * sum(weight.numel() for weight in weights.values()) + SPARE_NUMBERS
    count = 0

    def watch(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal count, room
        if tensor is None:
            return
        count, room = count + 1, room - tensor.numel()
        if count > most or room < 0:
            raise ModelError(
                f"the recipe makes a model that is larger than its {len(weights)} stored weights, so they do not belong together; "
                "remove the snapshot and keep a new step"
            )

    hooks = (
        nn.modules.module.register_module_parameter_registration_hook(watch),
        nn.modules.module.register_module_buffer_registration_hook(watch),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def blank_model(recipe: ModelRecipe) -> nn.Module:
    """Return the model of a recipe, without its adapters, with weights that are still to be loaded.

    Raises:
        ModelError: what makes it cannot be found, or makes no model.
    """
    return _made(recipe) if recipe.made_by else _instantiated(recipe)


def _instantiated(recipe: ModelRecipe) -> nn.Module:
    """Return an instance of a class of transformers, with weights that are still to be loaded."""
    import transformers
    from transformers.initialization import no_init_weights

    kind: Any = getattr(transformers, recipe.class_name, None)
    if not hasattr(kind, "_from_config"):
        raise ModelError(f"transformers {transformers.__version__} has no class {recipe.class_name!r}")
    _check_numbers(recipe.config)
    # Every weight is loaded afterwards: initialising them first would take longer than all the rest.
    with _quiet_transformers(), torch.random.fork_rng(devices=[]), no_init_weights():
        config = kind.config_class.from_dict(_declared(kind.config_class, recipe.config))
        with torch.device("meta"):  # takes no memory, however large it is said to be
            kind._from_config(config, attn_implementation="eager")
        model: nn.Module = kind._from_config(config, attn_implementation="eager")
    model.tie_weights()  # type: ignore[operator]
    return model


def _check_numbers(config: Any, key: str = "") -> None:
    """Refuse a configuration that would take long before it makes a single parameter.

    Raises:
        ModelError: names the key.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            _check_numbers(value, str(name))
    elif isinstance(config, list | tuple):
        if "layer" in key and len(config) > MAX_LAYERS:
            raise ModelError(f"the configuration lists {len(config)} items in {key!r}; at most {MAX_LAYERS} are read")
        for value in config:
            _check_numbers(value, key)
    elif isinstance(config, int) and not isinstance(config, bool):
        most = MAX_LAYERS if "layer" in key else MAX_LABELS if key == "num_labels" else MAX_NUMBER
        if abs(config) > most:
            raise ModelError(
                f"the configuration asks for a {key!r} of more than {most}, which is the most that is read"
            )


def _made(recipe: ModelRecipe) -> nn.Module:
    """Return what the recipe's call makes."""
    make = _maker(recipe.made_by)
    with torch.random.fork_rng(devices=[]):
        model = make(**recipe.arguments)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{recipe.made_by!r} made a {type(model).__name__}, not a model")
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


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
                folder,
                attn_implementation="eager",
                dtype=torch.float32,
                use_safetensors=True,
                **NOTHING_FOREIGN,
                **options,
            )
    except Exception as error:  # whatever a folder made by hand leads a library to
        reason = _reason(error)
        if "ignore_mismatched_sizes" in str(error):  # transformers points to a report above, which is switched off
            reason = (
                f"its stored weights do not fit a head of {num_labels} classes; set the number of labels to its own"
            )
        raise ModelError(f"{folder}: cannot be loaded for {task}: {reason}") from None
    return model.eval().to(device or "cpu")


NOTHING_FOREIGN: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""What every `from_pretrained` is given: nothing is downloaded, no code of a folder runs, and nobody is asked whether it may.
Without an explicit False, transformers asks on the terminal."""

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


def vocabulary_of(tokenizer: Any, model: nn.Module) -> Vocabulary:
    """Return the public facts about a tokenizer.

    Raises:
        ModelError: the tokenizer has ids that the model's embedding has no row for.
    """
    roles = ("cls", "sep", "pad", "unk", "mask", "bos", "eos")
    special = {role: getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    rows = _rows_of_words(model)
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's embedding only {rows} rows: "
            "they do not belong together"
        )
    # What the tokenizer adds to every text is what two different texts have in common at both ends.
    alone, wrapped = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    start = next((i for i in range(len(wrapped)) if wrapped[i : i + len(alone)] == alone), 0)
    longest = min(
        int(tokenizer.model_max_length), int(getattr(getattr(model, "config", None), "max_position_embeddings", 10**6))
    )
    return Vocabulary(
        size=rows,
        special={role: int(found) for role, found in special.items() if found is not None},
        starts_with=tuple(wrapped[:start]),
        ends_with=tuple(wrapped[start + len(alone) :]),
        max_length=longest,
        digest=tokens_digest(tokenizer),
    )


def tokens_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's tokens in the order of their ids, so that two vocabularies can be told apart."""
    by_id = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(f"{number} {token}" for number, token in by_id).encode()).hexdigest()


def _rows_of_words(model: nn.Module) -> int:
    """Return how many tokens the word embedding has a row for; of a model that does not name it, the largest table's."""
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ModelError(
            f"{type(model).__name__} has no embedding of tokens; only models that read token ids are audited"
        )
    return max(tables)


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


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the type that a model computes in: that of its first floating-point parameter."""
    types = [parameter.dtype for parameter in model.parameters()]
    return next((found for found in types if found.is_floating_point), types[0])


def coarsest_dtype(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Return the floating-point type with the fewest digits.

    It is that of some parameters; None if there is none.
    """
    types = {parameter.dtype for parameter in parameters if parameter.dtype.is_floating_point}
    return max(types, key=lambda kind: torch.finfo(kind).eps, default=None)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, tied ones once; references, not copies."""
    persistent = set(model.state_dict().keys())
    found = dict(model.named_parameters())
    return {
        **{name: parameter.detach() for name, parameter in found.items()},
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }
