"""Modes of torch, overrides and transforms of the user see nothing of the audit."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.boundary import without_modes
from leakaudit.capture.context import OFF_SWITCH
from tests.support import stacks, tiny
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

SEEN: Counter[str] = Counter()


class Functions(TorchFunctionMode):
    """Counts functions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Counted(Tensor):
    """Counts the functions that a batch is given to."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        SEEN[str(function)] += 1
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call] # torch has no types here


def _trained(folder: Path, around: Callable[[], Any], kind: type[Tensor] = Tensor) -> tuple[dict[str, int], Any]:
    """Train four steps; return what the user's code saw, and the audit."""
    batches = [{name: value.as_subclass(kind) for name, value in batch.items()} for batch in stacks.classes()]
    model = tiny.bert(dropout=0.1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SEEN.clear()
    audit = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(folder))
    with without_side_process(), around(), audit:
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(SEEN), audit


@pytest.mark.parametrize(
    ("around", "kind"),
    [
        (Functions, Tensor),
        (Operations, Tensor),
        (contextlib.nullcontext, Counted),
        (lambda: torch.device("meta"), Tensor),
    ],
    ids=["functions", "operations", "a class of tensors", "a default device"],
)
def test_the_users_modes_and_overrides_see_training_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: Callable[[], Any], kind: type[Tensor]
) -> None:
    """They see as many calls as without the audit, and every step is verified."""
    with monkeypatch.context() as off:
        off.setenv(OFF_SWITCH, "1")
        without, _ = _trained(tmp_path / "off", around, kind)
    audited, audit = _trained(tmp_path / "on", around, kind)
    assert audited == without
    assert [stamp(one).status.value for one in kept(audit).values()] == ["verified"] * 4


def test_modes_are_put_back_in_their_order_whatever_happens() -> None:
    """An exception leaves them as they were."""
    with Functions() as first, Functions() as second, contextlib.suppress(ValueError):
        with without_modes():
            assert torch._C._len_torch_function_stack() == 0
            raise ValueError
        pytest.fail("the exception was lost")
    with Functions() as first, Functions() as second:
        with without_modes():
            pass
        assert [torch._C._get_function_stack_at(place) for place in (0, 1)] == [first, second]


def test_a_pass_in_a_transform_of_torch_func_does_not_end_the_audit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its step is not kept, and the next ordinary step is."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=audit_config(tmp_path))
    with without_side_process(), audit:
        for number, batch in enumerate(stacks.classes()):
            if number == 0:
                weights = {name: p.detach() for name, p in model.named_parameters()}
                found = grad(lambda given, batch=batch: functional_call(model, given, (), batch).loss)(weights)
                for name, p in model.named_parameters():
                    p.grad = found[name]
            else:
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "stops recording" not in caplog.text
    assert {step: stamp(one).status.value for step, one in kept(audit).items()} == dict.fromkeys((1, 2, 3), "verified")


def test_outputs_that_the_user_pickles_warn_of_nothing(tmp_path: Path) -> None:
    """Torch would print a hook of ours with the private batch in it."""
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = audit_config(tmp_path)
    with without_side_process(), watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config) as audit:
        outputs = model(**stacks.classes()[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.save(outputs.logits, io.BytesIO())
        outputs.loss.backward()
        optimizer.step()
    assert stamp(kept(audit)[0]).status.value == "verified"


def _state_dict_hooks(model: Any, seen: list[str]) -> Iterator[Any]:
    yield model._register_state_dict_hook(lambda *_: seen.append("after"))
    yield model.register_state_dict_pre_hook(lambda *_: seen.append("before"))


def test_no_hook_of_a_state_dict_runs(tmp_path: Path) -> None:
    """The names of stored buffers are read without `state_dict`."""
    model: nn.Module = tiny.bert().train()
    seen: list[str] = []
    list(_state_dict_hooks(model, seen))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = audit_config(tmp_path)
    with without_side_process(), watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config) as audit:
        model(**stacks.classes()[0]).loss.backward()
        optimizer.step()
    assert kept(audit) and not seen


class Strict(torch.optim.SGD):
    """Counts the hooks that are set on it."""

    def register_step_pre_hook(self, hook: Any) -> Any:
        SEEN["optimizer"] += 1
        return super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        SEEN["optimizer"] += 1
        return super().register_step_post_hook(hook)


class Hooked(type(tiny.bert())):  # type: ignore[misc] # the class is known only as the class of a model
    """Counts the hooks that are set on it."""

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        SEEN["model"] += 1
        return super().register_forward_pre_hook(*args, **options)

    def register_forward_hook(self, *args: Any, **options: Any) -> Any:
        SEEN["model"] += 1
        return super().register_forward_hook(*args, **options)


def test_an_overridden_method_that_sets_hooks_is_not_called(tmp_path: Path) -> None:
    """It is the user's code; the hooks are there nevertheless."""
    model: Any = tiny.bert().train()
    model.__class__ = Hooked
    optimizer = Strict(model.parameters(), lr=0.1)
    SEEN.clear()
    config = audit_config(tmp_path)
    audit = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config)
    with without_side_process(), audit:
        model(**stacks.classes()[0]).loss.backward()
        optimizer.step()
    assert kept(audit) and not SEEN


def _trained_in_one_graph(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Train six steps by a function that is compiled whole; return weights and graphs."""
    graphs: list[Any] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = tiny.bert(dropout=0.0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(fullgraph=True, backend=counted, dynamic=False)
    def loss_of(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        return loss

    config = audit_config(folder, every_n_steps=2)
    with without_side_process(), watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config):
        for _ in range(12):
            batch = stacks.classes()[0]
            loss_of(batch["input_ids"], batch["attention_mask"], batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, len(graphs)


def test_a_function_that_is_compiled_whole_trains_as_without_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook can be part of a graph that may not break.

    So no pass is seen, and the log says what to do.
    """
    audited, graphs = _trained_in_one_graph(tmp_path)
    assert "`fullgraph=True`" in caplog.text
    assert not list((tmp_path / "audit" / "spool").glob("*.ready"))
    monkeypatch.setenv(OFF_SWITCH, "1")
    alone, other = _trained_in_one_graph(tmp_path)
    assert graphs <= other + 1, "torch compiles at most eight times"
    assert all(torch.equal(audited[name], alone[name]) for name in alone)
