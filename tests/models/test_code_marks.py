"""Marks of code say what a client's process runs and another one does not."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakaudit.models.code_differences import code_differences, in_words
from leakaudit.models.code_marks import CodeMarks, code_marks
from tests.support import tiny

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert

ROOT = Path(__file__).parents[2]

STOCK = """
import sys, json, hashlib, torch
import transformers as hf
from leakaudit.models.code_marks import code_marks
small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
made = {
    "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**small)),
    "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2)),
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small)),
    "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=32, decoder_start_token_id=0, pad_token_id=0)),
}
"""


def _elsewhere(code: str, given: str = "", **environment: str) -> Any:
    """Run code in an interpreter of its own and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", STOCK + code],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_interpreters_agree_on_stock_models() -> None:
    """One trains under a tracer and with another order of sets; the other only reads."""
    plain = _elsewhere(
        "print(json.dumps({name: code_marks(make()).model_dump() for name, make in made.items()}))", PYTHONHASHSEED="1"
    )
    trained = _elsewhere(
        """
def tracer(frame, event, arg): return tracer
sys.settrace(tracer)
found = {}
for name, make in made.items():
    model = make().train()
    words = torch.arange(6)[None] + 5
    model(input_ids=words, labels=words, output_hidden_states=True).loss.backward()
    found[name] = code_marks(model).model_dump()
print(json.dumps(found))
""",
        PYTHONHASHSEED="2",
    )
    assert list(plain) == ["BERT", "GPT-2", "Llama", "T5"]
    for name, marks in plain.items():
        assert trained[name] == marks, name
        assert len(json.dumps(marks)) < 30_000
        assert "class torch.nn.modules.normalization:LayerNorm" in marks["functions"] or name in ("Llama", "T5")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by a name that is deprecated
def test_stock_trainers_change_nothing_that_is_named() -> None:
    """Autocast, checkpointing, adapters and NEFTune are accounted for by the recipe."""
    peft = pytest.importorskip("peft")
    model: Any = tiny.bert(dropout=0.1)
    model.activation_checkpointing_enable()
    model.enable_input_require_grads()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    wrapped = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(adapted)
    wrapped(input_ids=torch.arange(6)[None] + 5, labels=torch.tensor([1])).loss.backward()
    other: Any = peft.get_peft_model(tiny.bert(), peft.LoraConfig(target_modules=["query"]))
    marks = code_marks(adapted.get_base_model())
    assert marks.layers
    assert code_differences(marks, other.get_base_model()) == ()


# ---------------------------------------------------------------------- what is named


class MyLinear(nn.Linear):
    """Twice as loud."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _twice(*args: Any, **kwargs: Any) -> Any:
    return None


def _output(model: Any) -> Any:
    return model.bert.encoder.layer[0].output


def _swap(model: Any, patch: pytest.MonkeyPatch) -> None:
    _output(model).dense = MyLinear(64, 32)


def _other_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    _output(model).dense.__class__ = MyLinear


def _class_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_bert.BertSelfAttention, "forward", _twice)


def _wrapped_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    plain = modeling_bert.BertSelfAttention.forward

    @functools.wraps(plain)
    def loud(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    patch.setattr(modeling_bert.BertSelfAttention, "forward", loud)


def _added_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.Linear, "__call__", _twice, raising=False)


def _module_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_bert, "eager_attention_forward", _twice)


def _functional(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(functional, "layer_norm", _twice)


def _default(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(functional.layer_norm, "__defaults__", (None, None, 1.0))


def _attention(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", _twice)


def _on_the_model(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)


def _on_a_layer(model: Any, patch: pytest.MonkeyPatch) -> None:
    _output(model).register_forward_hook(functools.partial(_twice, 1))


def _own_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    plain = _output(model).forward
    _output(model).forward = lambda *args: plain(*args)


def _global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(nn.modules.module._global_forward_hooks, 10**6, _twice)


def _compiled(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_output(model), "_compiled_call_impl", _twice)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_swap, "the layer 'bert.encoder.layer.0.output.dense' is a MyLinear instead of Linear"),
        (_other_class, "the layer 'bert.encoder.layer.0.output.dense' is a MyLinear instead of Linear"),
        (
            _class_forward,
            f"the class BertSelfAttention of {modeling_bert.__name__} runs another `forward` (defined in {__name__})",
        ),
        (
            _wrapped_forward,
            f"the class BertSelfAttention of {modeling_bert.__name__} runs another `forward` (defined in {__name__})",
        ),
        (
            _added_forward,
            f"the class Linear of torch.nn.modules.linear runs another `__call__` (defined in {__name__})",
        ),
        (
            _module_function,
            f"the function `eager_attention_forward` of {modeling_bert.__name__} was replaced (defined in {__name__})",
        ),
        (_functional, f"the function `layer_norm` of torch.nn.functional was replaced (defined in {__name__})"),
        (_default, "the function `layer_norm` of torch.nn.functional was replaced"),
        (_attention, f"'sdpa' in ALL_ATTENTION_FUNCTIONS of transformers was replaced (defined in {__name__})"),
        (_on_the_model, f"a forward pre-hook: `_on_the_model.<locals>.<lambda>` of {__name__} on the model itself"),
        (_on_a_layer, f"a forward hook: `_twice` of {__name__} on 'bert.encoder.layer.0.output'"),
        (
            _own_forward,
            f"a `forward` of its own: `_own_forward.<locals>.<lambda>` of {__name__} on 'bert.encoder.layer.0.output'",
        ),
        (_global, f"a forward hook on all modules: `_twice` of {__name__}"),
        (_compiled, "a compiled graph on 'bert.encoder.layer.0.output'"),
    ],
)
def test_what_another_process_would_not_run_is_named(
    change: Callable[[Any, pytest.MonkeyPatch], None], words: str
) -> None:
    """The most relevant difference is first."""
    model = tiny.bert()
    with pytest.MonkeyPatch.context() as patch:
        change(model, patch)
        client = CodeMarks.model_validate_json(code_marks(model).model_dump_json())
    assert code_differences(client, tiny.bert())[:1] == (words,)
    assert words in in_words(code_differences(client, tiny.bert()))


def test_a_hook_of_the_audit_is_not_named() -> None:
    """The caller says which hooks those are."""
    model = tiny.bert()
    model.register_forward_hook(_twice)
    assert code_differences(code_marks(model, lambda hook: hook is _twice), tiny.bert()) == ()


def test_a_difference_of_many_layers_is_one_sentence() -> None:
    """The first layer is named, and the others are counted."""
    model: Any = tiny.bert()
    for layer in model.bert.encoder.layer:
        layer.output.dense.__class__ = MyLinear
        layer.output.register_forward_hook(_twice)
    found = code_differences(code_marks(model), tiny.bert())
    assert len(model.bert.encoder.layer) == 2
    assert found[0] == "the layer 'bert.encoder.layer.0.output.dense' (and 1 more) is a MyLinear instead of Linear"
    assert found[1].endswith("on 'bert.encoder.layer.0.output' and 1 more layers")


def test_digests_of_another_version_are_not_compared() -> None:
    """The note names the versions in their place."""
    marks = code_marks(tiny.bert())
    other = marks.model_copy(update={"versions": {**marks.versions, "transformers": "1.0"}, "functions": {}})
    (words,) = code_differences(other, tiny.bert())
    assert words.startswith("transformers 1.0 instead of ")


def test_what_transformers_adds_to_torch_when_it_makes_a_model_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A side process loads weights and never makes new ones.

    So it lacks the function, and nothing that it runs calls it.
    """
    model = tiny.bert()
    marks = code_marks(model)
    added = [
        key
        for key, where in marks.functions["class torch.nn.modules.module:Module"].items()
        if " transformers" in where
    ]
    assert added, "transformers adds a function"
    for key in added:
        monkeypatch.delattr(nn.Module, key)
    assert code_differences(marks, model) == ()


def test_nothing_is_said_of_a_client_whose_code_is_unknown() -> None:
    """Snapshots of earlier versions have no marks."""
    assert in_words(code_differences(CodeMarks(), tiny.bert())) == ""


# ---------------------------------------------------------------------- reading runs nothing


class _Trap(nn.Module):
    """A layer whose properties, attributes and walks must not be run."""

    seen: ClassVar[list[str]] = []

    @property
    def forward(self) -> Any:  # type: ignore[override]
        self.seen.append("forward")
        return None

    def __getattribute__(self, name: str) -> Any:
        _Trap.seen.append(name)
        return super().__getattribute__(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        _Trap.seen.append("named_modules")
        yield from super().named_modules(*args, **kwargs)


def test_reading_the_marks_runs_no_code_of_the_user() -> None:
    """Tables that make objects when they are read are as they were."""
    model = tiny.bert()
    model.trap = _Trap()
    _Trap.seen.clear()
    before = dict(dict.items(ACT2FN))
    marks = code_marks(model)
    assert marks.layers["trap"].endswith("_Trap")
    assert _Trap.seen == []
    assert dict(dict.items(ACT2FN)) == before and "gelu" in marks.functions["table ACT2FN"]


def test_the_marks_hold_no_value_of_a_closure() -> None:
    """Neither the value nor a digest that depends on it."""

    def hook_with(text: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            print(text, *args)

        return hook

    found = []
    for text in ("the patient Anna", "nobody"):
        model = tiny.bert()
        model.register_forward_hook(hook_with(text))
        found.append(code_marks(model).model_dump_json())
    assert found[0] == found[1] and "Anna" not in found[0]
