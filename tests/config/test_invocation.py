"""What an audit keeps of its command, with canaries in every argument."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from leakaudit.callbacks.torch_loop import watch
from leakaudit.cli import main
from leakaudit.config.audit import PluginSpec
from leakaudit.config.invocation import public_label, training_command
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.registry import attacks
from tests.support import tiny

CANARY = "wolverine7"
TEXTS = ("the old dog chased a horse", "one bird ate two fish", "a cat found three trees", "four birds saw the river")


def _found(folder: Path) -> list[str]:
    """Return the files below a folder with the canary in name or content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    hits = [path for path in files if CANARY in str(path.relative_to(folder)) or CANARY.encode() in path.read_bytes()]
    return sorted(str(path.relative_to(folder)) for path in hits)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Give a folder of model, data, policy and encoder with private names."""
    folder = tmp_path / CANARY
    folder.mkdir()
    tiny.bert(seed=1).save_pretrained(folder / f"{CANARY}-model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder / f"{CANARY}-model")
    rows = [{"text": text, "label": n % 2, CANARY: 1} for n, text in enumerate(TEXTS)]
    (folder / f"{CANARY}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = dict(tiny.bert_tokenizer()(list(TEXTS), padding=True, return_tensors="pt"))
    save_auxiliary(folder / f"{CANARY}.safetensors", inputs, torch.tensor([0, 1, 0, 1]))
    policy = {
        "schema": "leakaudit.policy/1",
        "name": "p",
        "rules": [{"id": "r", "event": "exact_sentence", "max_rate": 0.1}],
    }
    (folder / f"{CANARY}.yaml").write_text(json.dumps(policy))
    return folder


def test_no_option_of_simulate_reaches_a_file(secret: Path, tmp_path: Path) -> None:
    """Numbers, choices and plugins are kept; paths, patterns and texts are not."""
    model, data = secret / f"{CANARY}-model", secret / f"{CANARY}.jsonl"
    auxiliary = secret / f"{CANARY}.safetensors"
    out = tmp_path / "out"
    done = CliRunner().invoke(
        main,
        [
            "simulate", "--model", str(model), "--data", str(data), "--out", str(out), "--steps", "2", "--mode", "train",
            "--freeze", f"[b{CANARY}]ert.encoder.layer.0.*", "--grant", "labels", "--budget", "5", "--controls", "1",
            "--policy", str(secret / f"{CANARY}.yaml"), "--sentence-model", str(model), "--server", "wide-pooler(dimension=9)",
            "--attacks", f"llg-plus(auxiliary={auxiliary}),llg-plus,lamp-cos(prior={CANARY},steps=2)",
            "--attack-option", f"lamp-cos.exposure={CANARY}", "--defenses", "none,gaussian-noise(scale=0.1)",
            "--defense-option", "gaussian-noise.scale=0.2", "--seed", "3", "--fresh",
        ],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert _found(out) == []
    command = json.loads((out / "results.json").read_text())["run"]["command"]
    for kept in ("leakaudit simulate --model <path> --data <path>", "--steps 2", "--mode train", "--seed 3", "--freeze <text>",
                 "--grant labels", "--server wide-pooler(dimension=9)", "gaussian-noise(scale=0.2)"):  # fmt: skip
        assert kept in command
    assert "llg-plus(auxiliary=<path>),llg-plus,lamp-cos" in command
    for name in (CANARY, str(tmp_path)):
        assert name not in command


def test_no_argument_of_run_reaches_a_file(secret: Path, tmp_path: Path) -> None:
    """A path of a snapshot is private as well."""
    from leakaudit.client.snapshot import Manifest, Provenance
    from leakaudit.models.recipe import ModelRecipe
    from leakaudit.models.tensors import state_of
    from leakaudit.storage.snapshots import write_snapshot

    model = tiny.bert(seed=1)
    client = tiny.client_step(model, tiny.bert_tokenizer(), [TEXTS[0]], [0])
    manifest = Manifest(
        model=ModelRecipe.of(model), facts=client.facts, recipe=client.recipe,
        provenance=Provenance(framework="test", step=0),
    )  # fmt: skip
    kept = secret / f"{CANARY}-kept"
    write_snapshot(kept, update=client.observe().update, weights=state_of(model), truth=client.truth, manifest=manifest)
    (secret / f"{CANARY}-config.yaml").write_text("attacks: [idlg]\ncontrols: 0\n")
    options = ("--tokenizer", secret / f"{CANARY}-model", "--config", secret / f"{CANARY}-config.yaml")
    done = CliRunner().invoke(main, [str(a) for a in ("run", kept, *options, "--out", tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert _found(tmp_path / "out") == []
    command = json.loads((tmp_path / "out" / "results.json").read_text())["run"]["command"]
    assert command == "leakaudit run <path> --tokenizer <path> --config <path> --out <path>"


def test_no_argument_of_a_training_program_reaches_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spool and results hold the interpreter and the number of arguments."""
    monkeypatch.setattr(sys, "argv", [f"/home/{CANARY}/train.py", "--api-key", CANARY, f"--data=/{CANARY}.jsonl"])
    model, tokenizer = tiny.bert(seed=1), tiny.bert_tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "out_dir": tmp_path / "out", "attacks": ["idlg"], "controls": 0, "first_step": 0, "every_n_steps": 1,
        "max_snapshots": 1, "schedule": "inline", "keep_snapshots": True,
    }  # fmt: skip
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=2):
        for text in TEXTS[:2]:
            batch = tokenizer([text], return_tensors="pt")
            optimizer.zero_grad()
            model(**batch, labels=torch.tensor([0])).loss.backward()
            optimizer.step()
    assert (tmp_path / "out" / "spool" / "audit.json").exists()
    assert _found(tmp_path / "out") == []
    command = json.loads((tmp_path / "out" / "results.json").read_text())["run"]["command"]
    assert command.endswith("<path> (3 arguments, not kept)")


def test_the_canary_would_be_found(tmp_path: Path) -> None:
    """A search that finds nothing anywhere proves nothing."""
    (tmp_path / "a").write_text(f"x{CANARY}x")
    assert _found(tmp_path) == ["a"]
    shutil.move(tmp_path / "a", tmp_path / CANARY)
    (tmp_path / CANARY).write_text("x")
    assert _found(tmp_path) == [CANARY]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("tag(steps=3, alpha=0.5)", "tag(steps=3, alpha=0.5)"),
        ("tag", "tag"),
        (f"llg-plus(auxiliary=/{CANARY})", "llg-plus(auxiliary=<path>)"),
        (f"lamp-cos(prior={CANARY})", "lamp-cos(prior=<text>)"),
    ],
)
def test_a_knob_is_shown_by_its_type(text: str, label: str) -> None:
    """Numbers and choices as given."""
    spec = PluginSpec.parse(text)
    assert public_label(spec, attacks.create(spec.name, spec.options)) == label


@pytest.mark.parametrize(
    ("argv", "ending"),
    [(["a.py"], "<path>"), (["a.py", CANARY], "(1 argument, not kept)"), ([], "<path>")],
)
def test_a_program_is_kept_as_its_interpreter(monkeypatch: pytest.MonkeyPatch, argv: list[str], ending: str) -> None:
    """And an interpreter of a private name as `python`."""
    monkeypatch.setattr(sys, "argv", argv)
    assert training_command().endswith(ending)
    monkeypatch.setattr(sys, "executable", f"/opt/{CANARY}")
    assert training_command().startswith("python <path>")


def test_every_option_of_the_command_line_has_a_type_that_tells_what_may_be_shown() -> None:
    """Other than numbers, choices and flags there are paths and texts only."""
    from leakaudit.cli.common import public_value

    commands = [main.commands[name] for name in ("simulate", "run", "worker")]
    for parameter in (parameter for command in commands for parameter in command.params):
        if isinstance(parameter.type, click.Path):
            assert public_value(parameter.type, Path(CANARY)) == "<path>"
        elif parameter.type is click.STRING:
            assert public_value(parameter.type, CANARY) == "<text>"
