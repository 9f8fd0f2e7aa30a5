"""`leakaudit simulate --config`: a YAML file, overridden by options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from leakaudit.audit.audit import Audit
from leakaudit.cli import main
from leakaudit.cli.dataclass_options import options_of, values_of
from leakaudit.client.facts import Granted
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.simulation import GRANTS, Simulation
from tests.support import tiny

YAML = """
attacks: [embedding-rows]
defenses: [none, round]
controls: 0
budget_s: 20
seed: 5
text: hash
"""


@pytest.fixture
def audit(tmp_path: Path) -> list[str]:
    """Give the command of a small audit with a configuration file."""
    tiny.bert(seed=1).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": "the dog sat on a mat", "label": 0}, {"text": "a cat ran to the park", "label": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "audit.yaml").write_text(YAML)
    names = ("model", "rows.jsonl", "out", "audit.yaml")
    model, data, out, config = (str(tmp_path / name) for name in names)
    return ["simulate", "--model", model, "--data", data, "--out", out, "--config", config, "--steps", "1"]


def _results(command: list[str], *more: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, [*command, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads((Path(command[command.index("--out") + 1]) / "results.json").read_text())
    return found


def test_a_configuration_sets_attacks_defences_and_seed(audit: list[str]) -> None:
    """What the file says is used where no option says otherwise."""
    run = _results(audit)["run"]
    battery = run["battery"]
    assert (battery["attacks"], battery["defenses"]) == (["embedding-rows"], ["none", "round"])
    assert (run["seed"], battery["budget_s"]) == (5, 20.0)


def test_an_option_overrides_the_configuration(audit: list[str]) -> None:
    """The command line is nearer to the user than the file."""
    run = _results(audit, "--defenses", "none,sign", "--seed", "0", "--attacks", "random-labels")["run"]
    battery = run["battery"]
    assert (battery["attacks"], battery["defenses"], run["seed"]) == (["random-labels"], ["none", "sign"], 0)


def test_a_wrong_configuration_names_its_line(audit: list[str]) -> None:
    """Exit code 2, file and line, and the nearest key."""
    Path(audit[audit.index("--config") + 1]).write_text("atacks: [span]\n")
    done = CliRunner().invoke(main, audit, catch_exceptions=False)
    assert done.exit_code == 2
    assert "audit.yaml:1" in done.stderr
    assert "did you mean" in done.stderr


def test_every_field_of_a_simulation_is_an_option_with_help() -> None:
    """A new field is one line; the command line has it by itself."""
    options = {parameter.name: parameter for parameter in main.commands["simulate"].params}
    for field in dataclasses.fields(Simulation):
        option = options[field.name]
        assert isinstance(option, click.Option)
        assert option.help == field.metadata["help"]


def test_what_can_be_granted_is_what_the_facts_know() -> None:
    """The names stand twice, because the configuration does without torch."""
    assert set(GRANTS) == set(Granted.model_fields)


@dataclasses.dataclass(frozen=True)
class Small:
    """Options of a test."""

    words: tuple[str, ...] = dataclasses.field(default=("a",), metadata={"help": "Words."})
    count: int = dataclasses.field(default=2, metadata={"help": "Count.", "minimum": 1})
    rate: float | None = dataclasses.field(default=None, metadata={"help": "Rate.", "above": 0})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"words": ("a",), "count": 2, "rate": None}),
        (["--words", "b, c", "--count", "3", "--rate", "0.5"], {"words": ("b", "c"), "count": 3, "rate": 0.5}),
    ],
)
def test_options_give_a_dataclass_its_values(given: list[str], expected: dict[str, object]) -> None:
    """Defaults, tuples written with commas, numbers, and None."""
    seen: dict[str, object] = {}

    @click.command()
    @options_of(Small)
    def command(**found: object) -> None:
        seen.update(values_of(Small, found))

    assert CliRunner().invoke(command, given, catch_exceptions=False).exit_code == 0
    assert seen == expected


@pytest.mark.parametrize("given", [["--count", "0"], ["--rate", "0"]])
def test_limits_of_a_field_are_limits_of_its_option(given: list[str]) -> None:
    """The field's metadata says the least value."""
    command = options_of(Small)(click.Command("small", callback=lambda **_: None).callback or (lambda **_: None))
    assert CliRunner().invoke(click.command()(command), given).exit_code == 2


@pytest.mark.parametrize(
    ("given", "missing"), [([], "--model"), (["--model", "m"], "--data"), (["--data", "d"], "--model")]
)
def test_a_required_option_that_is_missing_is_named(given: list[str], missing: str) -> None:
    """Exit code 2, and no traceback."""
    done = CliRunner().invoke(main, ["simulate", *given], catch_exceptions=False)
    assert (done.exit_code, f"Missing option '{missing}'" in done.stderr) == (2, True)


@pytest.fixture
def headless(audit: list[str]) -> list[str]:
    """Give the command on an encoder without a head, which every seed draws anew."""
    tiny.bert(seed=1).bert.save_pretrained(audit[audit.index("--model") + 1])  # type: ignore[operator, union-attr]
    return audit


def test_several_seeds_are_the_steps_of_each_with_a_spread(headless: list[str]) -> None:
    """Seeds stand beside their steps.

    Another seed draws another head, and so another update of the same texts.
    """
    found = _results(headless, "--seeds", "3..4,7", "--steps", "2", "--attacks", "random-labels", "--defenses", "none")
    assert [(step["step"], step["seed"]) for step in found["steps"]] == [(0, 3), (1, 3), (2, 4), (3, 4), (4, 7), (5, 7)]
    assert len({step["snapshot"] for step in found["steps"]}) == 6
    assert (found["run"]["seed"], found["coverage"]["total_steps"]) == (3, 6)
    by_seed: dict[int, list[float]] = {}
    for one, step in zip(found["attempts"], found["steps"], strict=True):
        by_seed.setdefault(step["seed"], []).append(one["scores"]["label_accuracy"]["value"])
    (summary,) = found["summaries"]
    assert summary["spread"]["label_accuracy"] == pytest.approx(stdev(map(fmean, by_seed.values())))


def test_a_seed_among_others_makes_the_steps_that_it_makes_alone(
    headless: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of seed 4 does not depend on the seeds before it."""
    made: list[tuple[int, torch.Tensor]] = []
    step = Audit.step

    def kept(self: Audit, snapshot: Snapshot, others_wait: Callable[[], bool] = lambda: False) -> bool:
        update = snapshot.observation.update
        made.append((snapshot.provenance.step, torch.cat([update[name].flatten() for name in sorted(update)])))
        return step(self, snapshot, others_wait)

    monkeypatch.setattr(Audit, "step", kept)
    options = ("--steps", "1", "--attacks", "random-labels", "--defenses", "none")
    _results(headless, "--seeds", "3,4", *options)
    _results([*headless, "--fresh"], "--seed", "4", *options)
    (_, three), (place, four), (_, alone) = made
    assert place == 1
    assert torch.equal(four, alone)
    assert not torch.equal(three, alone)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "1..2", "--seed", "1"), "--seed and --seeds"),
        (("--seeds", "5..1"), "a range rises"),
        (("--seeds", "1..5000"), "at most 1000"),
        (("--seeds", "4294967296"), "largest seed"),
        (("--seeds", "1,,2"), "1..10 or 1,2,5"),
        (("--seeds", "-1"), "1..10 or 1,2,5"),
    ],
)
def test_seeds_that_are_none_are_refused(audit: list[str], options: tuple[str, ...], said: str) -> None:
    """Exit code 2, before any attack."""
    done = CliRunner().invoke(main, [*audit, *options], catch_exceptions=False)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_the_name_of_a_run_is_refused_where_nothing_trains(audit: list[str], tmp_path: Path) -> None:
    """The same file serves a training; a simulation is told to name its folder."""
    (tmp_path / "audit.yaml").write_text(f"out_dir: {tmp_path}/audits/{{run_name}}\n{YAML}")
    place = audit.index("--out")
    found = CliRunner().invoke(main, audit[:place] + audit[place + 2 :])
    assert found.exit_code != 0 and "give --out" in found.output
    assert not (tmp_path / "audits").exists()
