"""The Flower mod tells an audit what a client sends, and changes nothing."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.callbacks.rounds import finish
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.rounds import registry
from leakaudit.capture.worker.shared_process import SharedSideProcess
from leakaudit.results.files import load_results
from leakaudit.storage.snapshots import read_snapshot
from tests.support import tiny
from tests.support.mini_trainer import config

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_lora.py"


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start no side process, and leave no audit open."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):  # of the process that handles a message
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(SharedSideProcess, "ensure", lambda self: False)
    yield
    finish()


def exchange(folder: Path, *between: Any, audited: bool = True, step: Any = None) -> Any:
    """Send one training message through the mods to a client.

    Return the reply, the weights that the client made, the mod, and its two arguments. `step` trains and audits in place of the step here.
    """
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    from leakaudit.integrations.flower import LeakAuditMod

    mod, app, made = LeakAuditMod(folder), ClientApp(), {}

    @app.train(mods=[mod, *between, mod])  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        model, tokenizer = tiny.bert(), tiny.bert_tokenizer()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        audit = config(folder, unit="round", every_n_steps=1, out_dir=mod.folder(context))
        if step is not None:
            step(model, optimizer, tokenizer)
        elif audited:
            with watch(model, optimizer, tokenizer=tokenizer, config=audit):
                _step(model, optimizer, tokenizer)
        else:
            _step(model, optimizer, tokenizer)
        made.update(model.state_dict())
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord(tiny.bert().state_dict())})
    message = Message(content, dst_node_id=5, message_type="train")
    context = Context(run_id=1, node_id=5, node_config={"partition-id": 3}, state=RecordDict(), run_config={})
    return app(message, context), made, mod, (message, context)


def _step(model: Any, optimizer: torch.optim.Optimizer, tokenizer: Any) -> None:
    model(**tokenizer(["the old dog chased a cat ."], return_tensors="pt"), labels=torch.tensor([1])).loss.backward()
    optimizer.step()


def changed_by(change: Callable[[Any], Any]) -> Any:
    """Return a mod that changes the arrays of a reply."""

    def mod(message: Any, context: Any, call_next: Any) -> Any:
        from flwr.app import ArrayRecord

        reply = call_next(message, context)
        sent = change(reply.content["arrays"].to_torch_state_dict())
        reply.content["arrays"] = ArrayRecord(sent)
        return reply

    return mod


def kept(folder: Path) -> Any:
    audit = registry.audit_in(folder / "client-3")
    assert audit is not None and audit.tasks.wait(20)
    return read_snapshot(next((folder / "client-3" / "spool").glob("0*")))


def claimed(folder: Path, *between: Any) -> Any:
    """Return the `privacy` of the configuration that a client gets behind these mods."""
    from flwr.app import Context, RecordDict

    from leakaudit.integrations import flower

    seen: list[Any] = []
    context = Context(run_id=1, node_id=5, node_config={"partition-id": 3}, state=RecordDict(), run_config={})

    def step(model: Any, *_: Any) -> None:
        with torch.no_grad():  # Flower divides by the norm of what changed
            next(iter(model.parameters())).add_(0.01)
        handled = flower._handled.get()
        assert handled is not None
        seen.append(handled.mod.config(context).get("privacy"))

    exchange(folder, *between, step=step)
    return seen[0]


def test_the_epsilon_of_a_later_mod_is_a_claim_for_each_message(tmp_path: Path) -> None:
    """Wrong: an epsilon of the whole run, or one that no guarantee has."""
    from flwr.clientapp.mod import LocalDpMod

    stated = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=2.0, delta=1e-5)
    claim = {"epsilon": 2.0, "delta": 1e-5, "accountant": "flower localdp, per message", "covers": "message"}
    assert claimed(tmp_path, changed_by(dict), stated) == claim
    for others in ((), (stated, stated), (LocalDpMod(1.0, 1.0, 2.0, 1.5),)):
        assert claimed(tmp_path, *others) is None


def test_the_settings_of_a_later_mod_are_its_mechanism() -> None:
    """Wrong: noise of `LocalDpMod` that nobody declares."""
    from flwr.clientapp.mod import LocalDpMod

    from leakaudit.integrations import flower

    def chain(mod: object) -> Any:
        def wrapped(message: Any, context: Any) -> Any:
            return mod(message, context)  # type: ignore[operator]

        return wrapped

    stated = flower.stated_by_mods(chain(LocalDpMod(clipping_norm=2.0, sensitivity=0.5, epsilon=2.0, delta=1e-5)))
    options = stated["shipped_defense"]["options"]
    assert stated["shipped_defense"]["name"] == "clip-noise" and options["bound"] == 2.0
    assert options["sigma"] == pytest.approx(0.5 * math.sqrt(2 * math.log(1.25e5)) / 2.0)
    assert flower.stated_by_mods(chain(object())) == {}


def test_what_other_mods_make_of_the_weights_is_what_is_sent(tmp_path: Path) -> None:
    """Produced and sent updates differ by exactly what the mod between added."""
    reply, made, _, _ = exchange(
        tmp_path, changed_by(lambda w: {n: x + 1e-3 if x.is_floating_point() else x for n, x in w.items()})
    )
    snapshot = kept(tmp_path)
    name, produced = next(iter(snapshot.observation.update.items()))
    assert torch.equal(reply.content["arrays"].to_torch_state_dict()[name], made[name] + 1e-3)
    torch.testing.assert_close(produced - snapshot.sent.update[name], torch.ones_like(produced), rtol=0, atol=1e-3)


def test_without_other_mods_what_is_sent_is_what_was_made(tmp_path: Path) -> None:
    """The mod stands first and last in the list, and tells it once."""
    exchange(tmp_path)
    snapshot = kept(tmp_path)
    assert all(torch.equal(snapshot.sent.update[n], update) for n, update in snapshot.observation.update.items())


def test_a_mod_that_takes_the_weights_away_is_refused_as_sent(tmp_path: Path, capsys: Any) -> None:
    """As secure aggregation does; the round is audited as it was made."""
    exchange(tmp_path, changed_by(lambda w: {}))
    assert kept(tmp_path).sent is None
    assert (
        "round 0 is audited as the training made it, not as it is sent: the reply holds no arrays"
        in capsys.readouterr().err
    )


def test_names_that_are_not_the_models_are_an_error_that_changes_nothing(tmp_path: Path, capsys: Any) -> None:
    """Flower's old clients number their arrays."""
    reply, *_ = exchange(tmp_path, changed_by(lambda w: {str(i): x for i, x in enumerate(w.values())}))
    assert "0" in reply.content["arrays"]
    said = capsys.readouterr().err
    assert "what is sent is not audited" in said and "the first is '0', expected were names such as" in said


def test_a_client_may_send_one_part_of_its_model_under_the_names_of_that_part(tmp_path: Path) -> None:
    """As one does that trains a new head and sends the state dict of the head."""
    part = "bert.encoder."
    exchange(tmp_path, changed_by(lambda w: {n.removeprefix(part): x for n, x in w.items() if n.startswith(part)}))
    snapshot = kept(tmp_path)
    inside = {name for name in snapshot.observation.update if name.startswith(part)}
    assert inside
    assert all(torch.equal(snapshot.sent.update[name], snapshot.observation.update[name]) for name in inside)


def test_names_that_two_parts_of_the_model_have_are_an_error(tmp_path: Path, capsys: Any) -> None:
    """Both layers of the encoder have them."""
    part = "bert.encoder.layer.0."
    exchange(tmp_path, changed_by(lambda w: {n.removeprefix(part): x for n, x in w.items() if n.startswith(part)}))
    assert kept(tmp_path).sent is None
    assert "what is sent is not audited: none of 16 sent tensors" in capsys.readouterr().err


def test_a_client_without_an_audit_is_named_once(tmp_path: Path, capsys: Any) -> None:
    """One line, with what to do."""
    _, _, mod, (message, context) = exchange(tmp_path, audited=False)
    assert capsys.readouterr().err.count("no training here is audited in") == 1
    assert not (tmp_path / "client-3").exists() and mod.folder(context) == tmp_path / "client-3" and message is not None


def _own_loop(model: Any, optimizer: Any, tokenizer: Any) -> None:
    """Train as a client whose loop stands in a function without its context."""
    from leakaudit.integrations.flower import watch_round

    watch_round(model, optimizer, tokenizer=tokenizer, config={"attacks": ["span"]})
    _step(model, optimizer, tokenizer)


def test_a_loop_without_a_with_block_is_a_round_of_its_client(tmp_path: Path) -> None:
    """The round belongs to the mod's client and ends with its function."""
    reply, made, _, _ = exchange(tmp_path, step=_own_loop)
    snapshot = kept(tmp_path)
    sent = reply.content["arrays"].to_torch_state_dict()
    assert snapshot.observation.update
    for name, produced in snapshot.observation.update.items():
        assert torch.equal(snapshot.sent.update[name], produced) and torch.equal(sent[name], made[name])


def test_a_loop_that_fails_ends_its_round_and_the_next_one_is_kept(tmp_path: Path, capsys: Any) -> None:
    """The client's own exception arrives; nothing of the round is kept."""

    def fails(*objects: Any) -> None:
        _own_loop(*objects)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        exchange(tmp_path, step=fails)
    assert "training ended with ZeroDivisionError" in capsys.readouterr().err
    exchange(tmp_path, step=_own_loop)
    assert len(list((tmp_path / "client-3" / "spool").glob("0*"))) <= 1 and kept(tmp_path).sent is not None


def test_a_loop_outside_of_a_message_trains_without_an_audit(capsys: Any) -> None:
    """One line says what is missing."""
    model = tiny.bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _own_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), tiny.bert_tokenizer())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "`watch_round` runs outside of a function with `mods=[LeakAuditMod(...)]`" in capsys.readouterr().err


def test_the_example_reads_sentences_and_shows_what_its_defence_buys(tmp_path: Path) -> None:
    """Sentences come back as made, and none as sent; each client has one audit."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--out", str(tmp_path / "audits")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read: set[str] = set()
    for client in range(2):
        results = load_results(tmp_path / "audits" / f"client-{client}")
        assert [step.verification.status.value for step in results.steps] == ["verified"] * 3
        assert results.run.battery.defenses == ("none", "as-sent")
        exact = {"exact_sentence", "exact_sequence"}
        read |= {a.defense for a in results.attempts if exact & set(a.events)}
        assert {a.defense for a in results.attempts if "most_words" in a.events} <= {"none"}
        assert [step.sent.status.value for step in results.steps if step.sent is not None] == ["noised"] * 3
    assert read == {"none"}
