"""The NVFlare filter blocks whatever a client hides in a transmission.

The attacks find nothing in these tests: what is blocked here is blocked for what it is.
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from leakaudit.callbacks.rounds import finish
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.rounds import registry, transmission
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.client.local_steps import delta_divisor
from leakaudit.gate.verdict import Status
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.mini_trainer import config
from tests.support.nvflare_stand_in import stand_in

TEXT = "the old dog chased a cat ."
SECRET = base64.b64encode(TEXT.encode()).decode()


@pytest.fixture(autouse=True)
def _passing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every round that the audit has pass its policy; start no side process."""
    stand_in(monkeypatch)
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)
    monkeypatch.setattr(transmission, "_results_until", lambda *_: [AllSteps()])
    monkeypatch.setattr(transmission, "evaluate_step", lambda *_, **__: (Status.PASS, "nothing came back"))
    yield
    finish()


class AllSteps:
    """Results with the step that is asked for."""

    steps = (SimpleNamespace(id="st-000000", sent=None), SimpleNamespace(id="st-000001", sent=None))


class Context:
    """What a filter asks of NVFlare's context."""

    def get_identity_name(self) -> str:
        return "site-1"

    def get_job_id(self) -> str:
        return "7f3a"


@dataclass
class Round:
    """A round of a client: its weights before and after, as NumPy arrays."""

    folder: Path
    before: dict[str, Any]
    after: dict[str, Any]
    names: tuple[str, ...]
    """Of the parameters that it trained."""

    @property
    def first(self) -> str:
        return self.names[0]

    @property
    def raw(self) -> Any:
        """The difference that tells the text."""
        return self.after[self.first] - self.before[self.first]

    def differences(self) -> dict[str, Any]:
        return {name: self.after[name] - self.before[name] for name in self.after}

    def having(self, **more: Any) -> dict[str, Any]:
        return {**self.after, **more}

    def changing(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the weights, the first of them changed."""
        return {**self.after, self.first: change(self.after[self.first])}


@pytest.fixture
def made(tmp_path: Path) -> Round:
    return trained(tmp_path)


def trained(folder: Path, frozen: str = "pooler") -> Round:
    """Train one audited round of a model with a frozen part and a buffer that moves."""
    model, tokenizer = tiny.bert(), tiny.bert_tokenizer()
    seen = torch.zeros(3)
    model.register_buffer("seen", seen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    before = {n: w.clone().numpy() for n, w in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    audit = config(folder, unit="round", every_n_steps=1, out_dir=folder / "site-1")
    with watch(model, optimizer, tokenizer=tokenizer, config=audit):
        model(**tokenizer([TEXT], return_tensors="pt"), labels=torch.tensor([1])).loss.backward()
        seen += 1.0
        optimizer.step()
    after = {n: w.clone().numpy() for n, w in model.state_dict().items() if n != "seen"}
    kept = registry.open_round(folder / "site-1")
    assert kept is not None
    return Round(folder, before, after, kept.names)


def dxo(data: Any, kind: str = "WEIGHTS", meta: Any = None, headers: Any = None, **more: Any) -> Any:
    """Return a result as NVFlare makes it."""
    from nvflare.apis.dxo import DXO
    from nvflare.apis.shareable import Shareable

    result = DXO("WEIGHTS", data={}, meta=meta or {}).to_shareable()
    result["DXO"].update(kind=kind, data=data)
    for key, value in (headers or {}).items():
        result.set_header(key, value)
    result.update(more)
    assert type(result) is Shareable
    return result


def leaves(made: Round, result: Any, **options: Any) -> Any:
    """Return what leaves; None if it is blocked."""
    from nvflare.apis.filter import ContentBlockedException

    from leakaudit.integrations.nvflare import LeakAuditFilter

    try:
        return LeakAuditFilter(str(made.folder), timeout_s=20, **options).process(result, Context())
    except ContentBlockedException as error:
        said = str(error)
    assert TEXT not in said and SECRET not in said
    return None


class Array(np.ndarray[Any, Any]):
    """An array that may carry more than its numbers."""


class Weights(dict[str, Any]):
    """A dictionary that may show others what the filter does not see."""


class Number(float):
    """A number that may carry more."""


class Text(str):
    """A string that may carry more."""


def subclassed(made: Round) -> Any:
    from nvflare.apis.shareable import Shareable

    class Hidden(Shareable):  # type: ignore[misc]
        raw = made.raw

    result = dxo(made.after)
    copy = Hidden()
    copy.update(result)
    return copy


def low_digits(weights: Any) -> Any:
    """Hide a signal in digits that float32 does not have."""
    return weights.astype(np.float64) * (1 + 1e-12)


def failed(made: Round, **more: Any) -> Any:
    return dxo(made.after, headers={"__rc__": "EXECUTION_EXCEPTION"}, **more)


FORGED: dict[str, Callable[[Round], Any]] = {
    "raw difference in meta": lambda r: dxo(r.after, meta={"SCAFFOLD_CTRL_DIFF": {r.first: r.raw}}),
    "array in meta": lambda r: dxo(r.after, meta={"loss": r.raw}),
    "texts in meta": lambda r: dxo(r.after, meta={"texts": [TEXT]}),
    "base64 in meta": lambda r: dxo(r.after, meta={"loss": SECRET}),
    "bytes in meta": lambda r: dxo(r.after, meta={"loss": TEXT.encode()}),
    "base64 as a key of meta": lambda r: dxo(r.after, meta={SECRET: 1}),
    "text as a site": lambda r: dxo(r.after, meta={"site_name": SECRET}),
    "text as an algorithm": lambda r: dxo(r.after, meta={"PROCESSED_ALGORITHM": SECRET}),
    "token ids as a list": lambda r: dxo(r.after, meta={"num_steps": [3, 1, 4]}),
    "numbers in a nested dict": lambda r: dxo(r.after, meta={"step": {"a": 1}}),
    "huge number": lambda r: dxo(r.after, meta={"NUM_STEPS_CURRENT_ROUND": int.from_bytes(TEXT.encode())}),
    "too many numbers": lambda r: dxo(r.after, meta={"initial_metrics": {f"loss_{i}": 0.5 for i in range(99)}}),
    "number with an attribute": lambda r: dxo(r.after, meta={"loss": Number(1.0)}),
    "string of a class of its own": lambda r: dxo(r.after, meta={"site_name": Text("site-1")}),
    "array among the metrics": lambda r: dxo(r.after, meta={"initial_metrics": {"loss": r.raw}}),
    "state of a quantizer": lambda r: dxo(r.after, meta={"quant_state": {r.first: {"absmax": r.raw}}}),
    "types that are texts": lambda r: dxo(r.after, meta={"source_datatype": {r.first: SECRET}}),
    "array in a header": lambda r: dxo(r.after, headers={"control": r.raw}),
    "text in a header": lambda r: dxo(r.after, headers={"task_note": TEXT}),
    "cookie": lambda r: dxo(r.after, headers={"__cookie_jar__": {"a": SECRET}}),
    "text as a return code": lambda r: dxo(r.after, headers={"__rc__": SECRET}),
    "weights beside an error": failed,
    "array beside the DXO": lambda r: dxo(r.after, extra=r.raw),
    "second DXO": lambda r: dxo(r.after, DXO2={"kind": "WEIGHTS", "data": r.after}),
    "part beside the data": lambda r: (one := dxo(r.after), one["DXO"].update(more=r.raw))[0],
    "no DXO": lambda r: (one := dxo(r.after), one.pop("DXO"), one.update(weights=r.after))[0],
    "nested DXOs": lambda r: dxo({"a": dxo(r.after)["DXO"], "b": dxo(r.differences())["DXO"]}, kind="COLLECTION"),
    "app's own kind": lambda r: dxo(r.after, kind="APP_DEFINED"),
    "text as a kind": lambda r: dxo(r.after, kind=SECRET),
    "metrics with an array": lambda r: dxo({"loss": r.raw}, kind="METRICS"),
    "metrics with a text": lambda r: dxo({"loss": SECRET}, kind="METRICS"),
    "metrics with a text as a name": lambda r: dxo({TEXT: 1.0}, kind="METRICS"),
    "no weights, but meta": lambda r: dxo({}, meta={"raw": r.raw}),
    "no weights": lambda r: dxo({}),
    "alias": lambda r: dxo(r.having(**{f"base_model.model.{r.first}": r.before[r.first]})),
    "alias of a wrapper": lambda r: dxo(r.having(**{f"module.{r.first}": r.before[r.first]})),
    "renamed key": lambda r: dxo({f"x.{n}": w for n, w in r.after.items()}),
    "a server's name before some keys": lambda r: dxo({f"{'model.' * (n != r.first)}{n}": w for n, w in r.after.items()}),
    "three names before every key": lambda r: dxo({f"model.model.model.{n}": w for n, w in r.after.items()}),
    "numbered keys": lambda r: dxo({str(i): w for i, w in enumerate(r.after.values())}),
    "key that is no string": lambda r: dxo(r.having() | {3: r.raw}),
    "extra array": lambda r: dxo(r.having(control=r.raw)),
    "buffer that moved": lambda r: dxo(r.having(seen=r.before["seen"] + 1)),
    "buffer with token ids": lambda r: dxo(r.having(seen=np.array([3.0, 1.0, 4.0], dtype=np.float32))),
    "frozen weights that changed": lambda r: dxo({n: w + ("pooler" in n) for n, w in r.after.items()}),
    "frozen weights with a difference": lambda r: dxo({n: w + 1 for n, w in r.differences().items()}, kind="WEIGHT_DIFF"),
    "int8": lambda r: dxo(r.changing(lambda w: (w * 100).astype(np.int8))),
    "digits below float32": lambda r: dxo(r.changing(low_digits)),
    "complex": lambda r: dxo(r.changing(lambda w: w + 1j * w)),
    "objects": lambda r: dxo(r.changing(lambda w: w.astype(object))),
    "strings": lambda r: dxo(r.changing(lambda w: w.astype(str))),
    "undefined numbers": lambda r: dxo(r.changing(lambda w: w * np.float32("nan"))),
    "another shape": lambda r: dxo(r.changing(lambda w: w.flatten()[:4])),
    "list of numbers": lambda r: dxo(r.changing(lambda w: w.tolist())),
    "array of a class of its own": lambda r: dxo(r.changing(lambda w: w.view(Array))),
    "masked array": lambda r: dxo(r.changing(np.ma.masked_array)),
    "sparse tensor": lambda r: dxo(r.changing(lambda w: torch.as_tensor(w).to_sparse())),
    "dictionary of a class of its own": lambda r: dxo(Weights(r.after)),
    "result of a class of its own": subclassed,
    "bytes as weights": lambda r: dxo(r.changing(lambda w: w.tobytes())),
}  # fmt: skip
"""Name -> a transmission that holds something which nobody judged."""


@pytest.mark.parametrize("kind", FORGED)
def test_what_nobody_judges_does_not_leave(made: Round, kind: str) -> None:
    """Even though the attacks on the round found nothing."""
    assert leaves(made, FORGED[kind](made)) is None


CLEAN: dict[str, Callable[[Round], Any]] = {
    "weights": lambda r: dxo(r.after),
    "weights of the trained parameters alone": lambda r: dxo({n: r.after[n] for n in r.names}),
    "without one of them": lambda r: dxo({n: r.after[n] for n in r.names[1:]}),
    "tensors": lambda r: dxo({n: torch.as_tensor(w) for n, w in r.after.items()}),
    "state dict": lambda r: dxo(OrderedDict((n, torch.as_tensor(w)) for n, w in r.after.items())),
    "names of a wrapper": lambda r: dxo({f"module.{n}": w for n, w in r.after.items()}),
    "names of a server's model": lambda r: dxo({f"model.{n}": w for n, w in r.after.items()}),
    "differences": lambda r: dxo(r.differences(), kind="WEIGHT_DIFF"),
    "float64 with the digits of float32": lambda r: dxo({n: w.astype(np.float64) for n, w in r.after.items()}),
    "half precision": lambda r: dxo({n: w.astype(np.float16) for n, w in r.after.items()}),
    "bfloat16": lambda r: dxo({n: torch.as_tensor(w).bfloat16() for n, w in r.after.items()}),
    "compressed by NVFlare's float16": lambda r: dxo(
        {n: w.astype(np.float16) for n, w in r.after.items()},
        meta={
            "PROCESSED_ALGORITHM": "float16",
            "quant_state": {n: {} for n in r.after},
            "source_datatype": {n: "float32" for n in r.after},
            "quantized_flag": True,
        },
    ),
    "pruned": lambda r: dxo({n: d * (abs(d) > 1e-3) for n, d in r.differences().items()}, kind="WEIGHT_DIFF"),
    "buffer as before": lambda r: dxo(r.having(seen=r.before["seen"])),
    "NVFlare's numbers": lambda r: dxo(
        r.after,
        meta={"NUM_STEPS_CURRENT_ROUND": 12, "initial_metrics": {"val_loss": np.float32(0.25), "accuracy": 0.5}},
        headers={"__rc__": "OK", "current_round": 3, "num_rounds": 10, "start_round": 0},
    ),
    "names that NVFlare knows": lambda r: dxo(r.after, meta={"site_name": "site-1", "job_id": "7f3a"}),
    "metrics alone": lambda r: dxo({"accuracy": 0.875, "f1_macro": 0.5, "top5Accuracy": 1.0}, kind="METRICS"),
}  # fmt: skip
"""Name -> a transmission of a round that passed."""


@pytest.mark.parametrize("kind", CLEAN)
def test_what_is_judged_leaves_as_it_is(made: Round, kind: str) -> None:
    """The same numbers, as the same kind of arrays, with the same numbers beside them."""
    given = CLEAN[kind](made)
    gone = leaves(made, given)
    assert gone is not None
    assert gone["DXO"]["kind"] == given["DXO"]["kind"] and gone["DXO"]["meta"] == given["DXO"]["meta"]
    assert gone["__headers__"] == given["__headers__"] and gone["DXO"]["data"].keys() == given["DXO"]["data"].keys()
    for name, value in given["DXO"]["data"].items():
        sent = gone["DXO"]["data"][name]
        assert type(sent) is type(value)
        assert getattr(sent, "dtype", None) == getattr(value, "dtype", None)
        assert bool((torch.as_tensor(sent) == torch.as_tensor(value)).all())


def test_an_error_leaves_with_nothing_but_its_code(made: Round) -> None:
    """NVFlare's own replies to a task that failed."""
    result = failed(made)
    del result["DXO"], result["__headers__"]["__content_type__"]
    assert leaves(made, result) == {"__headers__": {"__rc__": "EXECUTION_EXCEPTION"}}


def test_the_client_may_name_more_numbers(made: Round) -> None:
    """Its own metrics, which nobody can know."""
    result = {"lipophilicity": 0.5}
    assert leaves(made, dxo(result, kind="METRICS")) is None
    assert leaves(made, dxo(result, kind="METRICS"), numbers=["lipophilicity"])["DXO"]["data"] == result


def test_numbers_have_six_digits(made: Round) -> None:
    """The last digits of a metric could spell a text."""
    assert leaves(made, dxo({"loss": 0.123456789}, kind="METRICS"))["DXO"]["data"] == {"loss": 0.123457}


def test_zeros_leave_without_their_signs(made: Round) -> None:
    """The signs of the zeros of a difference are a bit each, and no audit sees them."""
    differences = {n: d * 0 - 0.0 for n, d in made.differences().items()}
    assert any(np.signbit(d).any() for d in differences.values())
    gone = leaves(made, dxo(differences, kind="WEIGHT_DIFF"))
    assert not any(np.signbit(d).any() for d in gone["DXO"]["data"].values())


def test_a_view_leaves_without_the_memory_behind_it(made: Round) -> None:
    """Some ways to write a tensor write all of its memory."""
    hidden = torch.cat([torch.as_tensor(made.after[made.first]).flatten(), torch.ones(9)])
    view = hidden[:-9].view(made.after[made.first].shape)
    gone = leaves(made, dxo(made.changing(lambda _: view)))["DXO"]["data"][made.first]
    assert gone.untyped_storage().nbytes() == view.numel() * 4


def test_what_leaves_is_what_the_audit_has(made: Round) -> None:
    """Bit for bit; here scaled weights that change while they are judged."""
    data = {n: 3 * w if n in made.names else w for n, w in made.after.items()}
    result = dxo(data)
    gone: list[Any] = []
    thread = threading.Thread(target=lambda: gone.append(leaves(made, result)))
    thread.start()
    while not gone:
        data[made.first][:] += 1.0
    thread.join()
    snapshot = read_snapshot(next((made.folder / "site-1" / "spool").glob("0*")))
    assert snapshot.sent is not None
    rate = delta_divisor(snapshot.observation.facts)
    for name, update in snapshot.sent.update.items():
        before = torch.as_tensor(made.before[name])
        sent = gone[0]["DXO"]["data"][name]
        assert torch.equal(update, (before - torch.as_tensor(sent)) / rate)


def test_a_round_leaves_once(made: Round) -> None:
    """A second transmission has no judgement, whatever it holds."""
    assert leaves(made, dxo(made.after)) is not None
    assert leaves(made, dxo(made.after)) is None


def test_a_blocked_attempt_does_not_use_up_the_round(made: Round) -> None:
    """The client may send the same round without what nobody judges."""
    assert leaves(made, dxo(made.having(control=made.raw))) is None
    assert leaves(made, dxo(made.after)) is not None


def test_without_a_round_no_weights_leave(made: Round) -> None:
    """Such as those of a client whose audit is over."""
    finish()
    assert leaves(made, dxo(made.after)) is None


def test_a_round_that_the_worker_took_before_does_not_leave(made: Round) -> None:
    """It would be judged as it was produced, and something else would leave."""
    audit = registry.audit_in(made.folder / "site-1")
    assert audit is not None and audit.tasks.wait(20)
    held = next((made.folder / "site-1" / "spool").glob("*.held"))
    held.rename(held.with_suffix(".ready"))
    assert leaves(made, dxo(made.changing(lambda w: w + 1))) is None


def test_what_cannot_be_written_does_not_leave(made: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the round would be judged as it was produced."""
    from leakaudit.storage import held_rounds

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(held_rounds, "write_tensors", full)
    assert leaves(made, dxo(made.after)) is None
