"""`leakaudit frontier`: what each defence hides, and what it costs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.audit.frontier.training import Run
from leakaudit.audit.frontier.work import Work
from leakaudit.cli import main
from leakaudit.results.files import load_results
from tests.support import tiny

WORDS = (("the dog sat on a mat", 0), ("a cat ran to the park", 1))
DEFENSES = "gaussian-noise(scale=0.1|1000),sign,freeze-embeddings"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Give the command of a small frontier on 40 rows of two texts."""
    tiny.bert(seed=1).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": text, "label": label} for text, label in WORDS] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, data, out = (str(tmp_path / name) for name in ("model", "rows.jsonl", "out"))
    audit = ["--attacks", "embedding-rows", "--controls", "0", "--steps", "1", "--device", "cpu"]
    train = ["--train-steps", "9", "--train-batch-size", "4", "--train-rate", "0.01", "--seeds", "1,2"]
    return ["frontier", "--model", model, "--data", data, "--out", out, *audit, *train]


def _run(command: list[str], *more: str) -> Result:
    return CliRunner().invoke(main, [*command, *more], catch_exceptions=False)


def _rows(command: list[str], *more: str) -> dict[str, Any]:
    done = _run(command, *more, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_frontier_states_utility_and_prices_of_each_defence(command: list[str]) -> None:
    """Forbids a defence without a row, and a difference that is not paired."""
    found = _rows(command, "--defenses", DEFENSES, "--no-halving")
    rows = {(row["defense"], row["metric"]): row for row in found["utility"]}
    labels = {label for label, _ in rows}
    noisy = "gaussian-noise(scale=1000)"
    assert labels == {"none", "gaussian-noise(scale=0.1)", noisy, "sign", "freeze-embeddings"}
    plain, loud = rows["none", "loss"], rows[noisy, "loss"]
    assert plain["difference"] is None and plain["seeds"] == [1, 2]
    assert loud["baseline"] == pytest.approx(plain["value"])
    assert loud["difference"] == pytest.approx(loud["value"] - plain["value"])
    assert loud["lower"] <= loud["difference"] <= loud["upper"]
    assert loud["value"] > plain["value"]
    prices = {price["defense"]: price for price in found["prices"]}
    assert prices["none"]["traffic"] == 1.0
    assert prices["sign"]["traffic"] == pytest.approx(2 / 32)  # rows of words that do not occur stay zero
    assert prices["freeze-embeddings"]["traffic"] < 1
    kept = load_results(Path(command[command.index("--out") + 1]))
    assert len(kept.utility) == len(found["utility"])


def test_a_finished_frontier_is_read_and_not_trained_again(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids a second training of what is finished."""
    first = _rows(command, "--defenses", "sign")

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(Work, "train_one", refuse)
    monkeypatch.setattr(Work, "_priced", refuse)
    assert _rows(command, "--defenses", "sign") == first


def test_a_stopped_frontier_names_what_is_missing(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids a zero for a defence whose trainings did not begin."""
    train = Work.train_one

    def stop_at_signs(self: Work, candidate: Any, *rest: Any) -> Any:
        if candidate.label == "sign":
            raise KeyboardInterrupt
        return train(self, candidate, *rest)

    monkeypatch.setattr(Work, "train_one", stop_at_signs)
    done = _run(command, "--defenses", "sign")
    assert done.exit_code == 130
    results = load_results(Path(command[command.index("--out") + 1]))
    assert {row.defense for row in results.utility} == {"none"}
    assert any(one.what == "utility under sign" and "stopped" in one.why for one in results.coverage.not_tested)
    monkeypatch.undo()
    assert {row["defense"] for row in _rows(command, "--defenses", "sign")["utility"]} == {"none", "sign"}


@pytest.mark.parametrize("turned", [None, ValueError])
def test_a_signal_that_foreign_code_loses_stops_the_trainings(
    command: list[str], monkeypatch: pytest.MonkeyPatch, turned: type[Exception] | None
) -> None:
    """Its exception is dropped, or becomes an error of a defence."""
    steps, send = 0, Run.sent

    def loses_it(run: Run, *given: Any) -> Any:
        nonlocal steps
        steps += 1
        try:
            if steps == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
        except KeyboardInterrupt:
            if turned is not None:
                raise turned("not a number") from None
        return send(run, *given)

    monkeypatch.setattr(Run, "sent", loses_it)
    done = _run(command, "--defenses", "gaussian-noise(scale=0.1)")
    assert done.exit_code == 143 and steps == 4
    assert "the same command continues" in done.stderr


def test_a_training_that_diverges_has_no_value(command: list[str]) -> None:
    """Forbids a point in the frontier for a model that does not exist."""
    found = _rows(command, "--defenses", "gaussian-noise(sigma=1e38)", "--train-optimizer", "sgd")
    assert {row["defense"] for row in found["utility"]} == {"none"}
    why = {one["what"]: one["why"] for one in found["not_tested"]}
    assert "2 trainings of 2 diverged" in why["utility under gaussian-noise(sigma=1e38)"]


def test_adapters_and_language_models_are_trained_and_measured(command: list[str], tmp_path: Path) -> None:
    """Forbids a frontier of classifiers with whole weights only."""
    tiny.gpt2_lm().save_pretrained(tmp_path / "lm")  # type: ignore[operator]
    tiny.gpt2_tokenizer().save_pretrained(tmp_path / "lm")
    command[command.index("--model") + 1] = str(tmp_path / "lm")
    more = ("--task", "causal-lm", "--mode", "train", "--lora-rank", "2", "--lora-targets", "c_attn")
    found = _rows(command, *more, "--defenses", "prune(share=0.5)")
    rows = {(row["defense"], row["metric"]): row for row in found["utility"]}
    assert {metric for _, metric in rows} == {"loss", "perplexity"}
    assert not rows["none", "perplexity"]["higher_is_better"]
    traffic = {price["defense"]: price["traffic"] for price in found["prices"]}
    assert (
        0.9 < traffic["prune(share=0.5)"] <= 1.0
    )  # half of the entries, each with its place; B has no more zeros after a step


SCRIPT = """
import json, os, pathlib
defense, seed = os.environ["LEAKAUDIT_DEFENSE"], int(os.environ["LEAKAUDIT_SEED"])
value = {"none": 0.9, "sign": 0.8, "prune(share=0.9)": float("nan")}[defense] + seed * (0.01 if defense == "sign" else 0)
print("secret of the user")
pathlib.Path(os.environ["LEAKAUDIT_METRICS_FILE"]).write_text(json.dumps({"eval_accuracy": value, "eval_runtime": 3.0}))
"""


def test_the_users_own_script_is_the_training(command: list[str], tmp_path: Path) -> None:
    """Forbids NaN as a point, a value of another defence, and its output in ours."""
    (tmp_path / "train.py").write_text(SCRIPT)
    script = ("--command", f"{sys.executable} {tmp_path / 'train.py'}")
    done = _run(command, *script, "--defenses", "sign,prune(share=0.9),round", "--json")
    assert done.exit_code == 0, done.stderr
    assert "secret" not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    rows = {(row["defense"], row["metric"]): row for row in found["utility"]}
    assert set(rows) == {("none", "accuracy"), ("sign", "accuracy")}
    row = rows["sign", "accuracy"]
    assert (row["value"], row["difference"]) == (pytest.approx(0.815), pytest.approx(-0.085))
    assert row["upper"] - row["difference"] == pytest.approx(12.706 * 0.005, rel=1e-3)  # t(1) s / sqrt(2)
    why = {one["what"]: one["why"] for one in found["not_tested"]}
    assert "2 trainings of 2 diverged" in why["utility under prune(share=0.9)"]
    assert "exit code 1" in why["utility under round"]
    (tmp_path / "train.py").write_text(SCRIPT.replace('"sign": 0.8', '"round": 0.7, "sign": 0.8'))
    again = json.loads(_run(command, *script, "--defenses", "sign,prune(share=0.9),round", "--json").stdout)
    assert {row["defense"] for row in again["utility"]} == {"none", "sign", "round"}  # what failed is tried again


def test_a_dry_run_prints_the_plan_and_trains_nothing(command: list[str]) -> None:
    """Forbids a plan that writes or trains."""
    done = _run(command, "--defenses", DEFENSES, "--dry-run", "--retune", "3")
    assert done.exit_code == 0, done.stderr
    assert "3 short trainings and 2 trainings" in done.stderr
    assert not Path(command[command.index("--out") + 1]).exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--learning-rate", "0.1"), "--train-rate is the learning rate of the trainings"),
        (("--retune", "2"), "give an odd number"),
        (("--train-batch-size", "39"), "fewer than one batch of 39"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_audit(
    command: list[str], more: tuple[str, str], said: str
) -> None:
    """Forbids an audit of minutes that ends with a usage error."""
    done = _run(command, *more)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not Path(command[command.index("--out") + 1]).exists()
