"""A defence that a callback applies to the update which training uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.context import OFF_SWITCH
from leakaudit.capture.secret_generator import secret_generator
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.audit import PluginSpec
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.errors import DefenseError
from leakaudit.plugins import Defense
from leakaudit.plugins.error_feedback import SentInOrder
from leakaudit.registry import defenses
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.stacks import STACKS, Case
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

SEED = 7
CLIP = 0.5
ON_UPDATE = sorted(name for name, kind in defenses if kind().on_update)
"""Every registered defence that is a function of the update, at its default knobs."""
IN_STACKS = ("Trainer", "Lightning, automatic", "Lightning, manual", "Accelerate", "plain torch")
NOISE = "gaussian-noise(scale=0.5)"


def _raw(model: nn.Module, batch: Mapping[str, Tensor], clip: float = CLIP) -> dict[str, Tensor]:
    """Return the clipped gradient of one batch, by plain autograd."""
    model.zero_grad()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def _by_hand(defense: Defense, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the updates of a defended training, without any callback."""
    model, rng, updates = tiny.bert().train(), torch.Generator().manual_seed(SEED), []
    left: dict[str, Tensor] = {}
    for batch in batches:
        raw = _raw(model, batch)
        updates.append(dict(SentInOrder(defense.prepared(raw, 1.0), left).send(raw, rng)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in updates[-1]:
                    parameter.add_(updates[-1][name], alpha=-stacks.RATE)
    return updates


def _loop(folder: Path, *, kind: Any = torch.optim.SGD, clip: float = CLIP, **audit: Any) -> Any:
    """Train in a plain loop with clipping and dropout; return the audit and the model."""
    torch.manual_seed(0)
    model = tiny.bert(dropout=0.1).train()
    optimizer = kind(model.parameters(), lr=stacks.RATE)
    config = audit.pop("config", None) or audit_config(folder, max_snapshots=50)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config, **audit)
    with without_side_process(), watched:
        for batch in stacks.classes(count=2):
            _raw(model, batch, clip)
            optimizer.step()
    return watched, model


def _same_weights(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("name", ON_UPDATE)
@pytest.mark.parametrize("stack", IN_STACKS)
def test_what_training_uses_is_what_the_defence_makes_of_the_gradient(stack: str, name: str, tmp_path: Path) -> None:
    """Forbids other gradients than the defence returns, in training or in a snapshot.

    So it forbids a second application, too.
    """
    case = Case(batches=stacks.classes(count=3), clip=CLIP, audit={"defense": name, "defense_seed": SEED})
    found = STACKS[stack](tmp_path, case)
    assert list(found) == [0, 1, 2]
    for step, wanted in enumerate(_by_hand(defenses.create(name), case.batches)):
        snapshot = found[step]
        assert snapshot.observation.update.keys() == wanted.keys()
        assert all(torch.equal(snapshot.observation.update[n], wanted[n]) for n in wanted)
        if step:
            assert _moved(found[step - 1], snapshot), "the optimizer moved the weights by the kept update"
        assert [declared.name for declared in snapshot.observation.facts.defenses] == [name]
        verified = stamp(snapshot)
        clipped = verified.status is VerificationStatus.SCALED and stack == "Lightning, manual"  # nobody told the bound
        assert clipped or verified.status in (VerificationStatus.VERIFIED, VerificationStatus.NOISED), verified


def test_what_was_not_sent_is_sent_with_the_next_update(tmp_path: Path) -> None:
    """Forbids a defence that promises error feedback and forgets what it dropped."""
    name, forgets = "top-k(share=0.1,error_feedback=true)", "top-k(share=0.1)"
    case = Case(batches=stacks.classes(count=3), clip=CLIP, audit={"defense": name, "defense_seed": SEED})
    found = STACKS["plain torch"](tmp_path, case)
    spec = PluginSpec.parse(name)
    wanted = _by_hand(defenses.create(spec.name, spec.options), case.batches)
    without = PluginSpec.parse(forgets)
    other = _by_hand(defenses.create(without.name, without.options), case.batches)
    for step, update in enumerate(wanted):
        assert all(torch.equal(found[step].observation.update[n], update[n]) for n in update)
        assert all(torch.equal(update[n], other[step][n]) for n in update) is (step == 0)
        assert stamp(found[step]).status is VerificationStatus.UNVERIFIABLE


def _moved(before: Snapshot, after: Snapshot) -> bool:
    now, then = before.observation.model.state_dict(), after.observation.model.state_dict()
    return all(torch.equal(now[n].add(g, alpha=-stacks.RATE), then[n]) for n, g in before.observation.update.items())


@pytest.mark.parametrize("stack", IN_STACKS)
def test_several_micro_batches_are_defended_once_when_they_are_summed(stack: str, tmp_path: Path) -> None:
    """Forbids noise on each micro-batch, and noise before clipping."""
    alone = Case(batches=stacks.classes(count=3), clip=CLIP, windows=2)
    defended = Case(batches=alone.batches, clip=CLIP, windows=2, audit={"defense": NOISE, "defense_seed": SEED})
    raw = STACKS[stack](tmp_path / "raw", alone)
    found = STACKS[stack](tmp_path / "defended", defended)
    assert list(raw) == list(found) == [0, 1]
    names = [name for name, _ in tiny.bert().named_parameters()]  # noise is drawn in this order
    clean = {name: raw[0].observation.update[name] for name in names}
    wanted = defenses.create("gaussian-noise", {"scale": 0.5}).prepared(clean, 1.0)
    sent = wanted.changed(clean, torch.Generator().manual_seed(SEED))
    assert all(torch.equal(found[0].observation.update[name], sent[name]) for name in clean)


def test_at_least_half_of_the_defences_change_an_update_at_their_default_knobs() -> None:
    """Forbids that the test above compares undefended updates only."""
    raw = _raw(tiny.bert().train(), stacks.classes(count=1)[0])
    made = {n: kind().prepared(raw, 1.0).changed(raw, torch.Generator()) for n, kind in defenses if n in ON_UPDATE}
    changed = [name for name, sent in made.items() if any(not torch.equal(sent[n], raw[n]) for n in raw)]
    assert len(changed) >= len(ON_UPDATE) / 2


# ---------------------------------------------------------------------- random numbers


def test_noise_is_of_its_own_and_training_draws_the_same_numbers(tmp_path: Path) -> None:
    """Forbids noise from torch's global state.

    Dropout masks, and the state after training, would differ.
    """
    _loop(tmp_path / "plain")
    state = torch.get_rng_state()
    watched, _ = _loop(tmp_path / "defended", defense=NOISE)
    assert torch.equal(torch.get_rng_state(), state)
    found = kept(watched)
    assert [stamp(found[step]).status for step in found] == [VerificationStatus.NOISED] * 2


def test_two_trainings_have_other_noise_of_the_declared_size(tmp_path: Path) -> None:
    """Forbids a fixed seed, by which anybody could remove the noise.

    And noise of another size.
    """
    one, two = (kept(_loop(tmp_path / name, defense=NOISE)[0])[0].observation.update for name in "ab")
    torch.manual_seed(0)
    raw = _raw(tiny.bert(dropout=0.1).train(), stacks.classes(count=1)[0])
    flat = [torch.cat([update[n].flatten() for n in raw]) for update in (raw, one, two)]
    sigma = 0.5 * float(flat[0].square().mean().sqrt())
    noise = [sent - flat[0] for sent in flat[1:]]
    for added in noise:
        assert float(added.std()) == pytest.approx(sigma, rel=0.05)
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.05


def test_a_secret_generator_has_no_seed_to_try() -> None:
    """Forbids a state that follows from a seed.

    Torch uses 32 bits of a seed on a CPU, and an attacker can try them all.
    """
    states = [secret_generator(torch.device("cpu")).get_state() for _ in range(2)]
    words = [state[24 : 24 + 8 * 624].view(torch.int64) for state in states]
    assert not (words[0] == words[1]).any()
    for drawn in words:
        assert int(drawn.min()) >= 0 and int(drawn.max()) < 2**32
        again = torch.Generator().manual_seed(int(drawn[0])).get_state()[24 : 24 + 8 * 624].view(torch.int64)
        assert not torch.equal(again, drawn)
    numbers = torch.rand(100_000, generator=secret_generator(torch.device("cpu")))
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(numbers.var()) == pytest.approx(1 / 12, rel=0.03)


# ---------------------------------------------------------------------- parameters that are not sent


def test_withheld_tables_do_not_move_and_the_step_is_verified(tmp_path: Path) -> None:
    """Forbids a table that decays or moves although its update is not sent."""
    start = dict(tiny.bert(dropout=0.1).named_parameters())
    watched, model = _loop(tmp_path, kind=torch.optim.AdamW, clip=1e9, defense="freeze-embeddings")
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    now = dict(model.named_parameters())
    assert tables and all(torch.equal(start[name], now[name]) for name in tables)
    assert any(not torch.equal(start[name], now[name]) for name in now.keys() - tables)
    for snapshot in kept(watched).values():
        assert not tables & snapshot.observation.update.keys()
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


# ---------------------------------------------------------------------- without an audit


def test_the_defence_works_where_the_audit_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids that a switched-off or refused audit takes the protection away."""
    plain = _loop(tmp_path / "plain")[1]
    wanted = _loop(tmp_path / "audited", defense=NOISE, defense_seed=SEED)[1]
    monkeypatch.setenv(OFF_SWITCH, "1")
    off = _loop(tmp_path / "off", defense=NOISE, defense_seed=SEED)[1]
    monkeypatch.delenv(OFF_SWITCH)
    config = {"out_dir": tmp_path / "refused", "attacks": ["no such attack"]}
    refused = _loop(tmp_path, defense=NOISE, defense_seed=SEED, config=config)[1]
    assert _same_weights(off, wanted) and _same_weights(refused, wanted) and not _same_weights(plain, wanted)


def test_the_key_of_the_configuration_does_the_same_and_declares_it(tmp_path: Path) -> None:
    """Forbids a key that is read and not applied.

    And a hook that stays on the optimizer after training.
    """
    wanted = _loop(tmp_path / "argument", defense=NOISE, defense_seed=SEED)[1]
    config = audit_config(tmp_path / "key", defense=NOISE)
    watched, model = _loop(tmp_path, config=config, defense_seed=SEED)
    assert _same_weights(model, wanted)
    assert not watched.optimizer._optimizer_step_pre_hooks
    assert all(found.observation.facts.defenses[0].name == "gaussian-noise" for found in kept(watched).values())


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("stack", IN_STACKS)
def test_training_stops_where_the_defence_fails(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids an undefended step after an exception.

    And an error that quotes private values.
    """
    made: list[Any] = []
    real = GaussianNoise.changed

    def changed(self: GaussianNoise, update: Any, rng: torch.Generator) -> Any:
        if made:
            raise ValueError("a private sentence")
        made.append(1)
        return real(self, update, rng)

    monkeypatch.setattr(GaussianNoise, "changed", changed)
    models: list[nn.Module] = []

    def model() -> nn.Module:
        models.append(tiny.bert())
        return models[-1]

    case = Case(model=model, batches=stacks.classes(count=4), audit={"defense": NOISE, "defense_seed": SEED})
    with pytest.raises(DefenseError, match="must not move by an undefended update: ValueError at") as error:
        STACKS[stack](tmp_path, case)
    assert "private" not in str(error.value)
    made.clear()
    one = Case(batches=stacks.classes(count=1), audit={"defense": NOISE, "defense_seed": SEED})
    (first,) = STACKS[stack](tmp_path / "one", one).values()
    weights = first.observation.model.state_dict()
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter, weights[name].add(first.observation.update[name], alpha=-stacks.RATE))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "each example": ({"defense": "dp-sgd(noise_multiplier=1.0)"}, "examples/with_opacus.py"),
    "more than the update": ({"defense": "round(of=weights)"}, "more than the update"),
    "no such defence": ({"defense": "gausian-noise"}, "did you mean 'gaussian-noise'"),
    "no such knob": ({"defense": "gaussian-noise(scael=1)"}, "did you mean 'scale'"),
    "another form": ({"defense": "gaussian-noise(1)"}, "expected name"),
    "differences": ({"defense": NOISE, "observe": "delta"}, "a mod of Flower or a filter of NVFlare"),
    "its own share": ({"defense": NOISE, "observe": "local"}, "the share of one process"),
    "rounds": ({"defense": NOISE, "config": {"unit": "round"}}, "a mod of Flower or a filter of NVFlare"),
    "two of them": ({"defense": NOISE, "config": {"defense": "sign"}}, "name one"),
    "declared as well": ({"defense": NOISE, "config": {"shipped_defense": "sign"}}, "set one of the two keys"),
    "a wrong configuration": ({"config": {"defense": "sign", "budget": 1}}, "budget"),
}
"""What is wrong -> arguments of the audit, and a part of the sentence."""


@pytest.mark.parametrize("what", REFUSED)
def test_a_defence_that_cannot_be_applied_ends_the_training_before_it_begins(what: str, tmp_path: Path) -> None:
    """Forbids an undefended training whose user asked for a defence."""
    options, says = REFUSED[what]
    start = tiny.bert(dropout=0.1)
    model = tiny.bert(dropout=0.1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=stacks.RATE)
    config = {"out_dir": tmp_path, **options.get("config", {})}
    with (
        pytest.raises(DefenseError, match=says) as error,
        watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), **{**options, "config": config}),
    ):
        raise AssertionError("the loop began")
    assert "Remove `defense` to train without it" in str(error.value)
    assert _same_weights(start, model) and not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("stack", IN_STACKS)
def test_every_framework_ends_before_training_if_the_defence_is_refused(stack: str, tmp_path: Path) -> None:
    """Forbids a framework in which the refusal is swallowed."""
    case = Case(batches=stacks.classes(count=1), audit={"defense": "dp-sgd(noise_multiplier=1.0)"})
    with pytest.raises(DefenseError, match="Opacus"):
        STACKS[stack](tmp_path, case)


def test_a_broken_file_that_asks_for_a_defence_ends_the_training(tmp_path: Path) -> None:
    """Forbids that a mistake in another key switches the protection off.

    And that a wrong file without the key ends a training.
    """
    wrong = tmp_path / "leakaudit.yaml"
    wrong.write_text("defense: sign\nbudget: 1\n")
    with pytest.raises(DefenseError, match="budget"):
        _loop(tmp_path, config=wrong)
    wrong.write_text("budget: 1\n")
    assert _same_weights(_loop(tmp_path, config=wrong)[1], _loop(tmp_path / "plain")[1])


def test_models_and_optimizers_without_one_dense_update_are_refused() -> None:
    """Forbids a defence that sees a part of the update, or no hook at all."""
    model = tiny.bert().train()
    halves = list(model.parameters())
    two = [torch.optim.SGD(part, lr=0.1) for part in (halves[:5], halves[5:])]
    own = type("Own", (), {"param_groups": [{"params": halves, "lr": 0.1}], "step": lambda self: None})()
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    tried: dict[str, tuple[nn.Module, Any]] = {
        "one optimizer with several groups": (model, two),
        "calls no hooks of torch": (model, own),
        "`sparse=False`": (sparse, torch.optim.SGD(sparse.parameters(), lr=0.1)),
    }
    for says, (trained, optimizer) in tried.items():
        with pytest.raises(DefenseError, match=says), watch(trained, optimizer, defense=NOISE):
            pass


def test_an_optimizer_that_asks_for_several_gradients_a_step_is_refused(tmp_path: Path) -> None:
    """Forbids that a later gradient of one step moves the weights undefended."""
    model = tiny.bert().train()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(**stacks.classes(count=1)[0]).loss
        loss.backward()
        return loss

    config = audit_config(tmp_path)
    with (
        pytest.raises(DefenseError, match="evaluates its closure several times"),
        without_side_process(),
        watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config, defense=NOISE),
    ):
        optimizer.step(closure)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_skipped_and_the_next_one_is_defended(fused: bool, tmp_path: Path) -> None:
    """Forbids noise on scaled gradients, which would be too weak.

    And an error about an overflow that the scaler handles.
    """
    model = nn.Sequential(nn.Linear(4, 3))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    audit = watch(
        model, optimizer, num_labels=3, scaler=scaler, defense="gaussian-noise(sigma=100)", config={"out_dir": tmp_path}
    )
    with without_side_process(), audit:
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor != 1.0:
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), start, strict=True)])
    assert 40 < float(moved.std()) < 200, "15 draws of noise with the standard deviation 100"


def test_an_overflow_that_a_fused_optimizer_skips_is_no_error(tmp_path: Path) -> None:
    """Forbids that a step which no weight sees ends the training."""
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    audit = watch(
        model, optimizer, num_labels=3, scaler=scaler, defense="round(dtype=fp16)", config={"out_dir": tmp_path}
    )
    with without_side_process(), audit:
        scaler.scale(model(torch.ones(2, 4)).square().mean() * float("inf")).backward()
        scaler.step(optimizer)


class _Own(torch.optim.SGD):
    """An optimizer whose `step` calls that of its parent, which calls all hooks again."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_that_steps_inside_its_step_is_defended_once(tmp_path: Path) -> None:
    """Forbids a second application at the inner step."""
    wanted = _loop(tmp_path / "plain", defense=NOISE, defense_seed=SEED)[1]
    assert _same_weights(_loop(tmp_path / "own", kind=_Own, defense=NOISE, defense_seed=SEED)[1], wanted)


def test_knobs_at_which_it_does_nothing_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Forbids that a user believes in a protection that does nothing."""
    _loop(tmp_path, defense=PluginSpec(name="gaussian-noise", options={"scale": 0.0}))
    assert "does nothing, so this training is not defended" in capfd.readouterr().err
