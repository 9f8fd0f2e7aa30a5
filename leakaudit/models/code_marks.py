"""Digests of the code that a model runs, so that two processes can compare it.

Code is read and never called. Digests contain neither file names, line numbers nor values of closures.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict
from torch import nn

from leakaudit.models.wrappers import plain_name

ACCOUNTED = frozenset(
    {"torch", "transformers", "accelerate", "peft", "lightning", "lightning_fabric", "pytorch_lightning", "opacus"}
)
"""Packages whose hooks and wrapped `forward` a step's recipe accounts for: autocast, NEFTune, adapters, gradients of examples."""


WITHOUT_CODE = frozenset({"builtins", "abc", "typing", "collections.abc", "torch.distributed"})
"""Modules whose classes are left out; FSDP2 gives each layer a class of its own there."""


HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
"""Attribute of a module -> what it holds."""


GLOBAL_HOOKS = {f"_global{name}": f"{what} on all modules" for name, what in HOOKS.items()}
"""Variable of `torch.nn.modules.module` -> what it holds."""


FEW = 3
"""Most layers that are named one by one for the same hook."""


CALLED_FROM_PYTHON = (FunctionType, BuiltinFunctionType, MethodType, staticmethod, classmethod, property)


class CodeMarks(BaseModel):
    """Digests of the code that a model runs in one process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str] = {}
    """Python and packages -> version; digests of other versions cannot be compared."""
    layers: dict[str, str] = {}
    """Plain name of a layer -> its class, as `module:class`.

    In the name, `*` stands for all numbers for which there is no entry of their own.
    """
    own: dict[str, tuple[str, ...]] = {}
    """What layers have of their own, such as a hook -> the layers' names; "" is the model itself, or everything."""
    functions: dict[str, dict[str, str]] = {}
    """`class module:name`, `module name` or `table name` -> function -> digest.

    The digest is followed by the module that defines the function, if that is in another package.
    """


def _nothing(hook: object) -> bool:
    """Return False for every hook."""
    return hook is None


def code_marks(model: nn.Module, is_ours: Callable[[object], bool] = _nothing) -> CodeMarks:
    """Return digests of the code that a model runs in this process.

    Args:
        model: the model itself, without wrappers.
        is_ours: whether a hook belongs to the audit; such hooks are left out.
    """
    layers = dict(named_layers(model))
    kinds = {kind: None for layer in layers.values() for kind in _mro(type(layer))}
    return CodeMarks(
        versions=_versions(),
        layers=_with_patterns({name: kind_of(layer) for name, layer in layers.items()}),
        own=_own(layers, is_ours),
        functions=_functions_of(list(kinds)),
    )


def with_layers_of(marks: CodeMarks, model: nn.Module, is_ours: Callable[[object], bool]) -> CodeMarks:
    """Return earlier marks of a model with its layers and hooks as they are now.

    Functions, which take longer to read, are not read again.
    """
    layers = dict(named_layers(model))
    kinds = _with_patterns({name: kind_of(layer) for name, layer in layers.items()})
    return marks.model_copy(update={"layers": kinds, "own": _own(layers, is_ours)})


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by plain name; overridden methods are not called."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        yield plain_name(f"{name}.")[:-1] if name else "", module
        children = _attributes(module).get("_modules")
        found = list(dict.items(children)) if isinstance(children, dict) else []
        waiting += [(f"{name}.{key}" if name else str(key), child) for key, child in reversed(found)]


def pattern_of(name: str) -> str:
    """Return the name of a layer with `*` in place of numbers.

    >>> pattern_of("encoder.layer.0.output")
    'encoder.layer.*.output'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


# ---------------------------------------------------------------------- layers


def kind_of(module: nn.Module) -> str:
    """Return the class of a module as `module:class`."""
    return _name_of(next(_mro(type(module))))


def _mro(kind: type) -> Iterator[type]:
    """Yield the classes whose functions a module runs."""
    for base in type.__dict__["__mro__"].__get__(kind):
        home = str(_class_attributes(base).get("__module__", "builtins"))
        if home not in WITHOUT_CODE and not home.startswith("torch.distributed."):
            yield base


def _class_attributes(kind: type) -> Mapping[str, Any]:
    return type.__dict__["__dict__"].__get__(kind)  # type: ignore[no-any-return]


def _attributes(thing: object) -> Mapping[str, Any]:
    """Return an object's own attributes; none where it has slots."""
    try:
        return object.__getattribute__(thing, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def _name_of(kind: type) -> str:
    return f"{_class_attributes(kind).get('__module__')}:{type.__dict__['__qualname__'].__get__(kind)}"


def _with_patterns(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return one entry for each pattern, and one for each unlike layer."""
    counts: dict[str, Counter[str]] = {}
    for name, kind in kinds.items():
        counts.setdefault(pattern_of(name), Counter())[kind] += 1
    usual = {pattern: found.most_common(1)[0][0] for pattern, found in counts.items()}
    return usual | {name: kind for name, kind in kinds.items() if usual[pattern_of(name)] != kind}


def _own(layers: Mapping[str, nn.Module], is_ours: Callable[[object], bool]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        for what in _own_of(layer, is_ours):
            found.setdefault(what, []).append(name)
    for attribute, what in GLOBAL_HOOKS.items():
        for hook in _values(getattr(nn.modules.module, attribute, {})):
            if not is_ours(hook) and (where := _defined_by_others(hook)):
                found.setdefault(f"{what}: {where}", []).append("")
    return {
        what: tuple(dict.fromkeys(names if len(names) <= FEW else map(pattern_of, names)))
        for what, names in found.items()
    }


def _own_of(layer: nn.Module, is_ours: Callable[[object], bool]) -> Iterator[str]:
    """Yield what a layer runs beside its class."""
    held = _attributes(layer)
    if held.get("_compiled_call_impl") is not None:
        yield "a compiled graph"
    forward = held.get("forward")
    if forward is not None and not _is_of_class(forward, type(layer)) and (where := _defined_by_others(forward)):
        yield f"a `forward` of its own: {where}"
    for attribute, what in HOOKS.items():
        for hook in _values(held.get(attribute)):
            if not is_ours(hook) and (where := _defined_by_others(hook)):
                yield f"{what}: {where}"


def _values(hooks: object) -> list[object]:
    return list(dict.values(hooks)) if isinstance(hooks, dict) else []


def _is_of_class(forward: object, kind: type) -> bool:
    """Return whether a function is the `forward` of a class, bound or not."""
    return (forward.__func__ if type(forward) is MethodType else forward) is _inherited(kind, "forward")


def _inherited(kind: type, name: str) -> Any:
    """Return an attribute of a class or its bases; None if there is none."""
    return next((held[name] for base in _mro(kind) if name in (held := _class_attributes(base))), None)


def _defined_by_others(callable_: object) -> str:
    """Return name and module of the first function of another package.

    Empty if packages of `ACCOUNTED` and the standard library define all.
    """
    for function in functions_in(callable_):
        if _package(_home(function)) not in ACCOUNTED | sys.stdlib_module_names:
            return f"`{function.__qualname__}` of {_home(function)}"
    return ""


# ---------------------------------------------------------------------- functions


def _functions_of(kinds: list[type]) -> dict[str, dict[str, str]]:
    """Return the digests of the functions of classes, and of their modules."""
    found: dict[str, dict[str, str]] = {}
    homes: dict[str, ModuleType] = {"torch.nn.functional": nn.functional}
    for kind in kinds:
        held, name = _class_attributes(kind), _name_of(kind)
        home = name.partition(":")[0]
        found[f"class {name}"] = _marks(held, home)
        module = sys.modules.get(home)
        if "forward" in held and home != "__main__" and type(module) is ModuleType:
            homes[home] = module
    for home, module in homes.items():
        found[f"module {home}"] = _marks(vars(module), home)
        if _package(home) == "transformers":
            found |= {f"table {name}": marks for name, marks in _tables(vars(module)) if marks}
    return found


def _marks(held: Mapping[str, Any], home: str) -> dict[str, str]:
    return {name: mark for name, value in held.items() if (mark := _mark(value, home))}


def _tables(held: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the tables of functions or classes in a module, by name.

    They are read without their own methods, because some make new objects.
    """
    for name, value in held.items():
        if name.startswith("__"):
            continue
        kind = type(value)
        if issubclass(kind, dict):
            items = dict.items(value)
        elif shared := _inherited(kind, "_global_mapping"):
            items = ({**shared} | {**_attributes(value).get("_local_mapping", {})}).items()
        else:
            continue
        yield name, {key: mark for key, item in items if isinstance(key, str) and (mark := _table_mark(item))}


def _table_mark(item: object) -> str:
    if type(item) is tuple and item:
        item = item[0]
    return _name_of(item) if isinstance(item, type) else _mark(item, "transformers")


def _mark(value: object, home: str) -> str:
    """Return the digest of a function and where it is defined.

    Empty for other objects.
    """
    if not isinstance(value, CALLED_FROM_PYTHON) and "__wrapped__" not in _attributes(value):
        return ""
    if isinstance(value, type | ModuleType):
        return ""
    functions = functions_in(value)
    if not functions:
        return ""
    pieces = [_digest_of_function(function) for function in functions]
    mark = pieces[0] if len(pieces) == 1 else _hashed("|".join(pieces))
    homes = [_home(function) for function in functions if _package(_home(function)) != _package(home)]
    foreign = next((one for one in homes if _package(one) not in sys.stdlib_module_names), "")
    return f"{mark} {foreign}" if foreign else mark


def functions_in(value: object) -> list[FunctionType | BuiltinFunctionType]:
    """Return the functions that a callable runs, the outermost first.

    They are found through methods, properties, partial functions, `__wrapped__` and closures.
    """
    found: list[FunctionType | BuiltinFunctionType] = []
    seen: set[int] = set()
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kind = type(one)
        if isinstance(one, type | ModuleType | nn.Module):
            continue
        if kind is FunctionType:
            found.append(one)  # type: ignore[arg-type]
            waiting += _enclosed(one)  # type: ignore[arg-type]
        elif kind is BuiltinFunctionType:
            found.append(one)  # type: ignore[arg-type]
        elif kind in (MethodType, staticmethod, classmethod):
            waiting.append(one.__func__)  # type: ignore[attr-defined]
        elif kind is property:
            waiting += [one.fget, one.fset]  # type: ignore[attr-defined]
        elif kind is functools.partial:
            waiting.append(one.func)  # type: ignore[attr-defined]
        elif "__wrapped__" in _attributes(one):
            waiting.append(_attributes(one)["__wrapped__"])
        else:
            waiting += _called(one)
    return found


def _enclosed(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue
    yield _attributes(function).get("__wrapped__")


def _called(thing: object) -> list[object]:
    """Return the functions of an object that can be called."""
    call = _inherited(type(thing), "__call__")
    if type(call) is not FunctionType:
        return []
    return [call, *(value for value in _attributes(thing).values() if isinstance(value, FunctionType | MethodType))]


def _home(function: FunctionType | BuiltinFunctionType) -> str:
    """Return the module that defines a function, whatever it was renamed to."""
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    return str(function.__module__)


def _package(home: str) -> str:
    return home.partition(".")[0]


_DIGESTS: WeakKeyDictionary[CodeType, str] = WeakKeyDictionary()


def _digest_of_function(function: FunctionType | BuiltinFunctionType) -> str:
    if isinstance(function, BuiltinFunctionType):
        return _hashed(f"built in {function.__module__}.{function.__qualname__}")
    digest = _digest(function.__code__)
    defaults = function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))
    return digest if defaults == (None, ()) else _hashed(digest + _in_words(defaults))


def _digest(code: CodeType) -> str:
    if (known := _DIGESTS.get(code)) is None:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x0C)
        known = _hashed(_in_words((code.co_code, names, counts, code.co_consts)))
        _DIGESTS[code] = known
    return known


def _in_words(value: object) -> str:
    """Return a constant of code in the same words in every process."""
    kind = type(value)
    if kind is CodeType:
        return _digest(value)  # type: ignore[arg-type]
    if kind is tuple:
        return f"({','.join(map(_in_words, value))})"  # type: ignore[call-overload]
    if kind is frozenset:
        return f"{{{','.join(sorted(map(_in_words, value)))}}}"  # type: ignore[call-overload]
    if kind in (int, float, complex, str, bytes, bool, type(None)):
        return repr(value)
    return f"a {kind.__name__}"


def _hashed(words: str) -> str:
    """Return 40 bits of a digest; nobody gains from two functions that share one."""
    return hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=5).hexdigest()


def _versions() -> dict[str, str]:
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for package in ("torch", "transformers", "peft"):
        if package in sys.modules:
            found[package] = str(vars(sys.modules[package]).get("__version__"))
    return found
