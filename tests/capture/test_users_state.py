"""A user's own objects change once in a forward pass, though the step is repeated."""

from __future__ import annotations

import array
import queue
import types
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from leakaudit.capture.in_place.users_state import content_of
from tests.capture.test_in_place import _checkpointed, assert_to_the_bit
from tests.support import tiny, users_state_helper
from tests.support.in_place_cases import Training, said_to_be_plain, without_audit

TOTAL: Any = None


class _Helper:
    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.seen: list[int] = []


class _Slotted:
    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


class _Counts(nn.Module):
    """Counts its calls somewhere, and computes with the count."""

    total: Any = None

    def __init__(self, kept: Any, count: Callable[[Any], None], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept, self.count, self.read = kept, count, read

    def forward(self, states: Tensor) -> Tensor:
        self.count(self.kept)
        return torch.tanh(states / (1 + float(self.read(self.kept))))


def _set(name: str) -> Callable[[Any], None]:
    return lambda kept: setattr(kept, name, getattr(kept, name) + 1)


def _first(kept: Any) -> None:
    kept[0] += 1


def _named(kept: Any) -> None:
    kept["calls"] += 1


def _global(kept: Any) -> None:
    global TOTAL
    TOTAL = TOTAL + 1


def _of_a_module(kept: Any) -> None:
    users_state_helper.count()


def _attribute_of_a_module(kept: Any) -> None:
    users_state_helper.COUNT += 1


def _longer(kept: Any) -> None:
    kept.seen = [*kept.seen, 1]


def _new_name(kept: Any) -> None:
    setattr(kept, f"call{len(vars(kept))}", 1)


def _closure() -> tuple[Any, Callable[[Any], None], Callable[[Any], Any]]:
    total = torch.zeros(())

    def count(kept: Any) -> None:
        nonlocal total
        total = total + 1

    return None, count, lambda kept: total


def _begin_anew() -> tuple[Any, Callable[[Any], None], Callable[[Any], Any]]:
    global TOTAL
    TOTAL = torch.zeros(())
    return None, _global, lambda kept: TOTAL


def _from_zero(count: Callable[[Any], None]) -> tuple[Any, Callable[[Any], None], Callable[[Any], Any]]:
    users_state_helper.COUNT = 0
    return None, count, lambda kept: users_state_helper.COUNT


def _of_the_class() -> tuple[Any, Callable[[Any], None], Callable[[Any], Any]]:
    _Counts.total = torch.zeros(())
    return _Counts, _set("total"), lambda kept: kept.total


PLACES: dict[str, Callable[[], tuple[Any, Callable[[Any], None], Callable[[Any], Any]]]] = {
    "Counter": lambda: (Counter(), _named, lambda kept: kept["calls"]),
    "UserDict": lambda: (UserDict(calls=0), _named, lambda kept: kept["calls"]),
    "array of numpy": lambda: (numpy.zeros(2), _first, lambda kept: kept[0]),
    "arrays in a list": lambda: ([numpy.zeros(2)], lambda kept: _first(kept[0]), lambda kept: kept[0][0]),
    "array": lambda: (array.array("i", [0]), _first, lambda kept: kept[0]),
    "bytearray": lambda: (bytearray(1), _first, lambda kept: kept[0]),
    "namespace": lambda: (types.SimpleNamespace(n=0), _set("n"), lambda kept: kept.n),
    "slots": lambda: (_Slotted(), _set("total"), lambda kept: kept.total),
    "tensor of a helper": lambda: (_Helper(), _set("total"), lambda kept: kept.total),
    "list of a helper": lambda: (_Helper(), _longer, lambda kept: len(kept.seen)),
    "new attributes of a helper": lambda: (_Helper(), _new_name, lambda kept: len(vars(kept))),
    "queue": lambda: (queue.Queue(), lambda kept: kept.put(1), lambda kept: kept.qsize()),
    "tensor in a closure": _closure,
    "tensor in a global": _begin_anew,
    "class attribute": _of_the_class,
    "function of another module": lambda: _from_zero(_of_a_module),
    "attribute of another module": lambda: _from_zero(_attribute_of_a_module),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_count_is_the_one_of_a_training_without_audit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass depends on the count; a wrong one would change the weights."""
    counts = []

    def make() -> nn.Module:
        model: Any = tiny.bert(dropout=0.1)
        model.bert.pooler.activation = counting = _Counts(*PLACES[place]())
        counts.append(lambda: float(counting.read(counting.kept)))
        return said_to_be_plain(model)

    with without_audit(monkeypatch):
        _, wanted = Training(model=make).run(tmp_path / "off")
    expected = counts.pop()()
    found, left = Training(model=make).run(tmp_path / "on")
    assert_to_the_bit(found)
    assert counts.pop()() == expected >= 3
    assert [name for name in wanted if not torch.equal(left[name], wanted[name])] == []


class _Registers(nn.Module):
    """Registers a hook, a buffer and a part at each call."""

    def forward(self, states: Tensor) -> Tensor:
        number = len(self._modules)
        self.register_forward_hook(lambda *arguments: None)
        self.register_buffer(f"b{number}", torch.zeros(()), persistent=False)
        self.add_module(f"m{number}", nn.Identity())
        return torch.tanh(states)


def test_what_a_forward_registers_is_registered_once(tmp_path: Path) -> None:
    """Three steps: three hooks, three buffers, three parts."""
    registers = _Registers()

    def make() -> nn.Module:
        model: Any = tiny.bert(dropout=0.1)
        model.bert.pooler.activation = registers
        return said_to_be_plain(model)

    found, _ = Training(model=make).run(tmp_path)
    assert_to_the_bit(found)
    assert [len(one) for one in (registers._forward_hooks, registers._buffers, registers._modules)] == [3, 3, 3]


class _Shifted(nn.Module):
    """Adds a tensor of the user's that is no parameter, and has a gradient."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.shift = [nn.Parameter(torch.zeros(1)) if whole else torch.zeros(1, requires_grad=True)]

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(states + self.shift[0])


@pytest.mark.filterwarnings("ignore:.*enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_outside_the_model_is_added_once(
    reentrant: bool, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reentrant checkpoints need `backward`, which adds to every gradient it reaches."""
    found: list[Tensor] = []

    def make() -> nn.Module:
        model: Any = _checkpointed(reentrant)()
        model.bert.pooler.activation = _Shifted(whole)
        found.extend(model.bert.pooler.activation.shift)
        return said_to_be_plain(model)

    with without_audit(monkeypatch):
        Training(model=make).run(tmp_path / "off")
    assert_to_the_bit(Training(model=make).run(tmp_path / "on")[0])
    assert found[0].grad is not None and found[1].grad is not None
    assert torch.equal(found[0].grad, found[1].grad)


class _Holds(nn.Module):
    """Holds tensors that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = torch.zeros(1).expand(3)
        with torch.inference_mode():
            self.fixed = torch.zeros(3)
        self.read_only = numpy.zeros(3)
        self.read_only.flags.writeable = False

    def forward(self, states: Tensor) -> Tensor:
        return torch.tanh(states)


def test_what_nothing_can_be_written_to_needs_no_copy(tmp_path: Path) -> None:
    """The step is repeated in place all the same."""

    def make() -> nn.Module:
        model: Any = tiny.bert(dropout=0.1)
        model.bert.pooler.activation = _Holds()
        return said_to_be_plain(model)

    assert_to_the_bit(Training(model=make).run(tmp_path)[0])


@pytest.mark.parametrize(
    "value", [[1, 2], {1: 2}, {1, 2}, Counter("aab"), OrderedDict(a=1, b=2), deque([1, 2], maxlen=2)], ids=repr
)
def test_the_content_of_a_container_comes_back(value: Any) -> None:
    """Whatever its class."""
    before = list(value.items()) if isinstance(value, dict) else list(value)
    undo = content_of(value)
    value.clear()
    for function, *arguments in undo:
        function(*arguments)
    assert (list(value.items()) if isinstance(value, dict) else list(value)) == before
