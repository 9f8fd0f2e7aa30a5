"""The user's own state that a forward pass may change: counters, lists, iterators.

A repeated step runs the user's code once more: forwards of modules, hooks, functions around a forward. This code may keep state in
attributes, closures, class attributes, globals and random generators of its own. The state is noted before the step and restored after
the repetition. If an object cannot be noted and restored, its type is named, and the model is not called again.
"""

from __future__ import annotations

import array
import copy
import dis
import functools
import queue
import random
import sys
import sysconfig
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DEEPEST = 8
"""Depth to which nested objects are looked into. Our choice: a hook that is a method of a helper in a list is at depth four."""

MOST_OBJECTS = 100_000
"""Most objects of one model that are looked into. Our choice: it takes a tenth of a second; a model of 1,000 modules has about 20,000."""

MOST_BYTES = 100_000_000
"""Most bytes that are copied of tensors and arrays that are neither parameters nor buffers. Our choice."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which modules keep hooks."""

TORCH_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that no code can change in place."""

NOT_LOOKED_INTO = (*PLAIN, type, types.ModuleType, torch.Size, torch.Stream, nn.Parameter)
"""Types of values that are not looked into."""

HOLDERS = (types.SimpleNamespace, UserDict, UserList, queue.Queue)
"""Classes of the standard library whose objects hold the user's state in attributes. Objects of other libraries are not looked into: a
trainer leads to every object."""

COPIED_WHOLE: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter("")),
    type(iter(range(1))),
    type(iter(range(1 << 70))),
)
"""Iterators whose copy shares no position with them. A copy of `zip` or of a loader's iterator would advance the original's parts."""

LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of installed libraries, whose objects are not the user's."""

Undo = tuple[Any, ...]
"""A function and its arguments; the call restores one object."""


@dataclass
class UsersState:
    """The user's state at one moment, as found in one walk over a model."""

    undo: list[Undo] = field(default_factory=list)
    """Calls that restore it, in this order."""
    leaves: list[Tensor] = field(default_factory=list)
    """Leaf tensors with gradients that may not be parameters of the model; `backward` adds to all that it reaches."""
    opaque: str = ""
    """Type of the first object that cannot be noted and restored; empty if there is no such object."""

    @classmethod
    def of(cls, called: nn.Module, *, iterators: bool) -> UsersState:
        """Note the state as it is now.

        Args:
            called: what the training loop calls.
            iterators: whether `put_back` replaces each iterator by a copy of its present state, for a repetition. Otherwise it restores
                the iterator itself.
        """
        walk = _Walk(cls(), iterators)
        for module in called.modules():
            walk.module(module)
        for parameter in called.parameters():
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                walk.inside(tuple((getattr(parameter, name, None) or {}).values()), 0)
        return walk.state

    def put_back(self) -> None:
        """Restore the state."""
        for function, *arguments in self.undo:
            function(*arguments)


@dataclass
class _Walk:
    """A walk over the objects that a model's forward pass can reach."""

    state: UsersState
    iterators: bool
    known: dict[int, Any] = field(default_factory=dict)
    """Identity of an object that was looked into -> the object; held, so that no other object gets its identity."""
    bytes: int = 0
    """Size of the tensors and arrays found so far."""

    def module(self, module: nn.Module) -> None:
        """Look into a module, its hooks, and its class if it is the user's."""
        self.known[id(module)] = module
        for key, value in list(vars(module).items()):
            if key in HOOKS:
                self.inside(tuple(value.values()), 0)
            elif key not in TORCH_OWN and isinstance(value, Tensor):
                self.inside(value, 0)  # `StateBefore` has its own copy of it
            elif key not in TORCH_OWN:
                self.held(value, vars(module).__setitem__, key, depth=0)
        self._class(type(module), 0)

    def held(self, value: Any, put: Callable[..., Any], *key: Any, depth: int) -> None:
        """Note a value that `put(*key, value)` restores, and look into it."""
        if isinstance(value, Iterator) and not isinstance(value, nn.Module):
            self._iterator(value, put, *key)
            return
        self.state.undo.append((put, *key, value))
        self.inside(value, depth)

    def inside(self, value: Any, depth: int) -> None:
        """Look into an object that may change in place."""
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            self.state.leaves.append(value)
        if isinstance(value, NOT_LOOKED_INTO) or id(value) in self.known or depth > DEEPEST:
            return
        if len(self.known) > MOST_OBJECTS:
            self.state.opaque = self.state.opaque or "larger number of objects than is looked into"
            return
        self.known[id(value)] = value
        if not self._without_parts(value):
            self._with_parts(value, depth + 1)

    def _without_parts(self, value: Any) -> bool:
        """Note an object that leads to no other objects; return whether it is one."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif undo := _generator_state(value):
            self.state.undo.append(undo)
        elif _is_array(value):
            self._array(value)
        elif isinstance(value, bytearray | array.array):
            self.state.undo.append((value.__setitem__, slice(None), value[:]))
        elif isinstance(value, queue.SimpleQueue):
            self.state.opaque = self.state.opaque or "SimpleQueue"
        else:
            return False
        return True

    def _with_parts(self, value: Any, depth: int) -> None:
        """Look into the objects to which an object leads."""
        if isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType | functools.partial):
            parts = (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else ()
            for part in parts or (value.__self__, value.__func__):  # type: ignore[union-attr]
                self.inside(part, depth)
        elif isinstance(value, list | dict | set | frozenset | tuple | deque):
            self._container(value, depth)
        elif isinstance(value, nn.Module):
            for module in value.modules():  # a hook holds this module; it is no part of the model
                self.module(module)
                self.state.leaves += [p for p in module._parameters.values() if p is not None]
                for buffer in module._buffers.values():
                    self.inside(buffer, depth)
        elif isinstance(value, HOLDERS) or _is_the_users(type(value)):
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        """Look into the attributes and slots of an object, and into its class."""
        attributes = getattr(value, "__dict__", {})
        self.state.undo.append((keep_only, attributes, frozenset(attributes)))
        for key, part in list(attributes.items()):
            self.held(part, attributes.__setitem__, key, depth=depth)
        for name, slot in _slots_of(type(value)):
            if hasattr(value, name):
                self.held(getattr(value, name), slot.__set__, value, depth=depth)
        self._class(type(value), depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        """Look into a function's closure, its defaults and the globals that it uses."""
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # the cell is empty
            self.held(content, setattr, cell, "cell_contents", depth=depth)
        self.inside(function.__defaults__, depth)
        self.inside(function.__kwdefaults__, depth)
        if _is_the_users(function):
            for name in _globals_of(function.__code__):
                if name in function.__globals__:
                    self.held(function.__globals__[name], function.__globals__.__setitem__, name, depth=depth)
                    self._module_of_functions(function.__globals__[name], function.__code__, depth)

    def _module_of_functions(self, module: Any, code: types.CodeType, depth: int) -> None:
        """Look into the attributes of a user's module that a function may use."""
        if not isinstance(module, types.ModuleType) or not _in_users_module(module.__name__):
            return
        for name in _attributes_of(code) & vars(module).keys():
            self.held(vars(module)[name], vars(module).__setitem__, name, depth=depth)

    def _class(self, kind: type, depth: int) -> None:
        """Look into a class of the user's: its attributes and methods."""
        if id(kind) in self.known or not _is_the_users(kind) or isinstance(kind, EnumType):
            return
        self.known[id(kind)] = kind
        for key, value in list(vars(kind).items()):
            if key.startswith("__") and key.endswith("__") and not isinstance(value, types.FunctionType):
                continue
            if not hasattr(type(value), "__get__"):
                self.state.undo.append((setattr, kind, key, value))
            self.inside(getattr(value, "__func__", value), depth + 1)

    def _container(self, value: Any, depth: int) -> None:
        self.state.undo += content_of(value)
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, part in pairs:
            if isinstance(part, Iterator) and isinstance(value, list | dict):
                self._iterator(part, value.__setitem__, key)
            elif not isinstance(part, PLAIN):
                self.inside(part, depth)

    def _tensor(self, tensor: Tensor) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) is not Tensor or _is_read_only(tensor):
            return
        if self.bytes > MOST_BYTES:
            self.state.opaque = self.state.opaque or "tensor larger than is copied"
        else:
            self.state.undo.append((tensor.data.copy_, tensor.detach().clone()))  # `.data` does not change the version

    def _array(self, values: Any) -> None:
        """Copy an array of numpy, unless nothing can be written to it."""
        self.bytes += values.nbytes
        if not values.flags.writeable:
            return
        if self.bytes > MOST_BYTES:
            self.state.opaque = self.state.opaque or "array larger than is copied"
        else:
            self.state.undo.append((sys.modules["numpy"].copyto, values, values.copy()))

    def _iterator(self, value: Any, put: Callable[..., Any], *key: Any) -> None:
        """Replace an iterator by a copy during the repetition; put it back afterwards."""
        if not self.iterators:
            self.state.undo.append((put, *key, value))
            return
        if type(value) in COPIED_WHOLE:
            self.state.undo.append((_put_copy, put, key, copy.copy(value)))
        else:
            self.state.opaque = self.state.opaque or type(value).__name__


def content_of(value: Any) -> list[Undo]:
    """Return the calls that restore the content of a container.

    The list is empty for other objects. A container of a subclass, such as `Counter`, is restored by the methods of its base class.
    """
    if isinstance(value, list):
        return [(list.__setitem__, value, slice(None), list(value))]
    if isinstance(value, OrderedDict):
        return [(OrderedDict.clear, value), (OrderedDict.update, value, OrderedDict(value))]
    if isinstance(value, dict):
        return [(dict.clear, value), (dict.update, value, dict(value))]
    if isinstance(value, set):
        return [(set.clear, value), (set.update, value, set(value))]
    if isinstance(value, deque):
        return [(deque.clear, value), (deque.extend, value, list(value))]
    return []


def keep_only(values: dict[str, Any], names: frozenset[str]) -> None:
    """Remove the entries of a dictionary that are not among some names.

    The dictionary is never empty meanwhile, because other threads may read it.
    """
    for name in values.keys() - names:
        values.pop(name, None)


def _is_array(value: Any) -> bool:
    arrays = sys.modules.get("numpy")
    return arrays is not None and isinstance(value, arrays.ndarray)


def _is_read_only(tensor: Tensor) -> bool:
    """Return whether torch refuses to write to a tensor.

    It does if the tensor was made in inference mode, or if several entries share memory.
    """
    spread = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return spread or tensor.is_inference()


def _slots_of(kind: type) -> list[tuple[str, Any]]:
    """Return names and descriptors of the slots of a class.

    Attributes of classes written in C are not among them.
    """
    slotted = [vars(one) for one in kind.__mro__ if "__slots__" in vars(one)]
    return [(n, d) for own in slotted for n, d in own.items() if isinstance(d, types.MemberDescriptorType)]


def _put_copy(put: Callable[..., Any], key: tuple[Any, ...], noted: Any) -> None:
    """Put a copy of a noted iterator into its place, so that it does not advance."""
    put(*key, copy.copy(noted))


def _generator_state(value: Any) -> Undo | None:
    """Return what restores the state of a random generator; None for other objects."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    arrays = sys.modules.get("numpy")
    if arrays is not None and isinstance(value, arrays.random.Generator):
        return setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state)
    if arrays is not None and isinstance(value, arrays.random.RandomState):
        return value.set_state, value.get_state()
    return None


@functools.cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function and its inner functions load or store."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "LOAD_GLOBAL")}
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _globals_of(part)]
    return tuple(sorted({*names, *inner}))


@functools.cache
def _attributes_of(code: types.CodeType) -> frozenset[str]:
    """Return all global and attribute names in a function and its inner functions."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _attributes_of(part)]
    return frozenset({*code.co_names, *inner})


def _is_the_users(thing: Any) -> bool:
    """Return whether a class or function is neither a library's nor this package's."""
    return _in_users_module(getattr(thing, "__module__", None) or "")


@functools.cache
def _in_users_module(name: str) -> bool:
    if name in ("builtins", "") or name.split(".")[0] == "leakaudit":
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return name == "__main__"
    folders = {str(Path(path).parent), str(Path(path).resolve().parent)}
    return not any(folder.startswith(library) for folder in folders for library in LIBRARIES)
