"""Who was in a step: an audit says how many of its texts the update names."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.audit.membership.log import MembershipLog, Scored
from leakaudit.audit.membership.nonmembers import FEWEST_OTHERS, KNOWN_BATCH, parts_of
from leakaudit.audit.membership.summary import conformal_threshold, membership_of
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.cli import main
from leakaudit.config.audit import PluginSpec
from leakaudit.config.membership import MembershipConfig
from leakaudit.errors import ConfigError
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from leakaudit.results.membership import FALSE_RATES, Membership, broken, in_words
from leakaudit.results.schema import Results
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, make_trainer


@cache
def texts() -> list[dict[str, Any]]:
    """Return different texts of the tiny vocabulary, with labels."""
    draw = random.Random(0)
    words = tiny.TEXT_WORDS.split()
    found = sorted({" ".join(draw.choices(words, k=draw.randint(4, 9))) for _ in range(420)})
    draw.shuffle(found)
    return [{"text": text, "label": draw.randint(0, 1)} for text in found]


MEMBERS = 60
"""Rows of the training data; the others are of no step."""


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(folder: Path, *more: str) -> list[str]:
    """Return a small audit of three steps of six texts, with texts of no step."""
    tiny.bert(seed=1, num_labels=2, initializer_range=0.2).save_pretrained(folder / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder / "model")
    data = written(folder / "train.jsonl", texts()[:MEMBERS])
    held = written(folder / "held.jsonl", texts()[MEMBERS:])
    return [
        *("simulate", "--model", str(folder / "model"), "--data", str(data), "--out", str(folder / "out")),
        *("--nonmembers", str(held), "--attacks", "embedding-rows", "--controls", "0", "--text", "hash"),
        *("--steps", "3", "--batch-size", "6", *more),
    ]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Give the folder and the results of one audit."""
    folder = tmp_path_factory.mktemp("membership")
    done = CliRunner().invoke(main, command(folder), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return folder / "out", load_results(folder / "out")


def test_an_update_of_one_step_names_its_texts(audited: tuple[Path, Results]) -> None:
    """The null and the model before the step name nearly none."""
    found = audited[1].membership
    assert found is not None
    point = found.at(0.01)
    assert point is not None
    assert (found.members, found.nonmembers) == (18, 3 * 58)
    assert point.found >= 14
    assert point.base <= 4
    assert not broken(found, point)
    assert found.auc > 0.95
    assert 0.2 < (found.null_auc or 0.0) < 0.8
    assert [step.null for step in found.steps] == ["known batch", "another step", "another step"]
    assert (found.control_found, found.control_texts) == (KNOWN_BATCH, KNOWN_BATCH)
    assert found.epsilon_lower() > 0.5
    assert f"{point.found} of 18 texts of 3 steps are named at one false alarm in 100" in in_words(found)


def test_the_results_hold_counts_and_no_scores_or_texts(audited: tuple[Path, Results]) -> None:
    """The scores are in the private log alone, and the log has no texts either."""
    folder, results = audited
    public = json.loads((folder / "results.json").read_text())["membership"]
    assert set(public["steps"][0]) == {
        *("step", "members", "nonmembers", "found", "false", "auc", "base_auc", "null_auc", "null")
    }
    log = folder / "membership.jsonl"
    assert log.stat().st_mode & 0o077 == 0
    assert not any(row["text"] in log.read_text() + json.dumps(public) for row in texts())
    tested = {one.what for one in results.coverage.not_tested}
    assert "membership inference" not in tested
    assert "attribute inference" in tested


def test_texts_of_no_step_that_are_in_a_step_are_left_out_and_counted(tmp_path: Path) -> None:
    """Wrong: such a text counts as a false alarm."""
    run = command(tmp_path)
    written(tmp_path / "held.jsonl", texts()[MEMBERS - 60 :])
    done = CliRunner().invoke(main, run, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = load_results(tmp_path / "out").membership
    assert found is not None
    assert found.overlapped == 18
    assert not broken(found, found.points[0])


def test_too_few_texts_of_no_step_are_said_and_nothing_else_is_lost(tmp_path: Path) -> None:
    """The audit goes on; what was not tested has its reason."""
    run = command(tmp_path)
    written(tmp_path / "held.jsonl", texts()[MEMBERS : MEMBERS + 20])
    assert CliRunner().invoke(main, run, catch_exceptions=False).exit_code == 0
    results = load_results(tmp_path / "out")
    assert results.membership is None
    assert results.attempts
    (why,) = [one.why for one in results.coverage.not_tested if one.what == "membership inference"]
    assert (
        why
        == "the file of non-members has 20 different texts that the step does not hold, and 36 are the fewest; give more"
    )


def test_a_file_that_is_not_there_ends_the_command_before_it_begins(tmp_path: Path) -> None:
    """The message names the file and what to do."""
    run = command(tmp_path)
    (tmp_path / "held.jsonl").unlink()
    done = CliRunner().invoke(main, run)
    assert done.exit_code == 2
    assert "there is no such file; name a file of texts that the training does not use" in done.stderr.replace(
        "\n", " "
    )


def test_without_texts_of_no_step_nobody_asks(tmp_path: Path) -> None:
    """The coverage says so."""
    run = command(tmp_path)
    at = run.index("--nonmembers")
    assert CliRunner().invoke(main, [*run[:at], *run[at + 2 :]], catch_exceptions=False).exit_code == 0
    results = load_results(tmp_path / "out")
    assert results.membership is None
    assert "membership inference" in {one.what for one in results.coverage.not_tested}


def test_a_language_model_needs_no_labels(tmp_path: Path) -> None:
    """The tokens of a text are its labels, also behind adapters and steps of AdamW."""
    run = command(
        tmp_path, "--task", "causal-lm", "--local-steps", "2", "--optimizer", "adamw", "--learning-rate", "0.01"
    )
    tiny.gpt2_lm().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tiny.gpt2_tokenizer().save_pretrained(tmp_path / "model")
    done = CliRunner().invoke(main, run, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = load_results(tmp_path / "out").membership
    assert found is not None
    assert (found.members, found.auc > 0.8) == (36, True)
    assert found.granted[0] == "candidate texts, their labels"


def test_shards_are_joined(audited: tuple[Path, Results], tmp_path: Path) -> None:
    """The joined audit counts what the audit on one machine counts."""
    run = command(tmp_path)
    for part in ("1/2", "2/2"):
        at = run.index("--out")
        own = [*run[:at], "--out", str(tmp_path / part[0]), *run[at + 2 :], "--shard", part]
        assert CliRunner().invoke(main, own, catch_exceptions=False).exit_code == 0
    folders = [str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "all")]
    done = CliRunner().invoke(main, ["merge", *folders], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found, whole = load_results(tmp_path / "all").membership, audited[1].membership
    assert found is not None
    assert whole is not None
    assert [step.step for step in found.steps] == [step.step for step in whole.steps]
    assert [step.auc for step in found.steps] == pytest.approx([step.auc for step in whole.steps])
    assert found.points[0].found == whole.points[0].found


def test_a_training_asks_in_its_side_process(tmp_path: Path) -> None:
    """The configuration of the callback is enough."""
    held = written(tmp_path / "held.jsonl", texts()[MEMBERS:])
    what = MembershipConfig(nonmembers=held, calibration=120, candidates=80)
    config = audit_config(
        tmp_path, membership=what, every_n_steps=2, attacks=(PluginSpec(name="embedding-rows"),), controls=0
    )
    model = tiny.bert(seed=1, num_labels=2, initializer_range=0.2)
    make_trainer(tmp_path, LeakAuditCallback(config), model=model, per_device_train_batch_size=4).train()
    found = load_results(tmp_path / "audit").membership
    assert found is not None
    assert (len(found.steps), found.members) == (2, 8)
    assert found.points[0].found >= 6


def test_a_training_without_the_file_is_not_audited_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the key and the file."""
    what = MembershipConfig(nonmembers=tmp_path / "nowhere.jsonl")
    config = audit_config(tmp_path, membership=what)
    make_trainer(tmp_path, LeakAuditCallback(config)).train()
    assert "nowhere.jsonl}`: there is no such file; name a file of texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"guesses": 19}, "membership has 1 right guesses of 19"),
        ({"control_found": 9}, "more named texts of a known batch than it has"),
    ],
)
def test_counts_that_cannot_be_are_found(audited: tuple[Path, Results], change: dict[str, int], clause: str) -> None:
    """The gate refuses such results."""
    results = audited[1]
    assert results.membership is not None
    assert not contradictions(results)
    wrong = results.membership.model_copy(update={"right": 1} | change)
    assert any(clause in one for one in contradictions(results.model_copy(update={"membership": wrong})))


def test_a_step_that_is_no_step_of_the_audit_is_found(audited: tuple[Path, Results]) -> None:
    """Also a step whose counts do not add up to those of the threshold."""
    results = audited[1]
    assert results.membership is not None
    strange = results.membership.steps[0].model_copy(update={"step": "st-9", "found": 0})
    wrong = results.membership.model_copy(update={"steps": (strange, *results.membership.steps[1:])})
    said = " ".join(contradictions(results.model_copy(update={"membership": wrong})))
    assert "membership was asked of step st-9, which is not recorded" in said
    assert "its steps add up to another number" in said


# ------------------------------------------------------------------------------------------------ parts and thresholds


def many(count: int) -> list[Candidate]:
    """Return different texts."""
    return [Candidate((1, n, 2)) for n in range(count)]


@pytest.mark.parametrize(("count", "calibration", "others"), [(400, 128, 64), (100, 64, 32), (36, 16, 16)])
def test_texts_of_no_step_have_one_use_each(count: int, calibration: int, others: int) -> None:
    """With few texts two thirds are for calibration, and candidates are left."""
    parts = parts_of(many(count), set(), MembershipConfig(nonmembers=Path("x")), 0, "step-1")
    used = [*parts.known_batch, *parts.calibration, *parts.others]
    assert (len(parts.calibration), len(parts.others)) == (calibration, others)
    assert len({text.token_ids for text in used}) == len(used)
    assert [many(count)[number] for number in parts.numbers] == list(parts.calibration)
    again = parts_of(many(count), set(), MembershipConfig(nonmembers=Path("x")), 0, "step-2")
    assert again.known_batch == parts.known_batch
    assert again.calibration != parts.calibration


def test_too_few_texts_are_refused_with_both_numbers() -> None:
    """20 are needed besides the known batch and the calibration texts."""
    with pytest.raises(ConfigError, match=r"has 35 different texts .* and 36 are the fewest"):
        parts_of(many(40), {(1, n, 2) for n in range(5)}, MembershipConfig(nonmembers=Path("x")), 0, "step-1")
    assert KNOWN_BATCH + FEWEST_OTHERS == 20


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1])
def test_a_conformal_threshold_keeps_its_rate(rate: float) -> None:
    """Over many draws a new score is above it as often as the rate says."""
    draw = random.Random(1)
    above = 0
    for _ in range(4000):
        threshold = conformal_threshold([draw.gauss(0, 1) ** 3 for _ in range(119)], rate)
        assert threshold is not None
        above += draw.gauss(0, 1) ** 3 > threshold
    assert above / 4000 == pytest.approx(rate, abs=3.5 * (rate * (1 - rate) / 4000) ** 0.5)


def scored(members: list[float], others: list[float], null: float = 0.0, calibration: int = 128) -> Scored:
    """Return a step whose calibration scores are 0.01 to 1.28."""
    quiet = tuple((n + 1) / 100 for n in range(calibration))
    return Scored(
        members=tuple(members),
        others=tuple(others),
        calibration=quiet,
        numbers=tuple(range(calibration)),
        base_members=(0.0,) * len(members),
        base_others=(0.0,) * len(others),
        base_calibration=quiet,
        null="another step",
        null_members=(null,) * len(members),
        null_others=(null,) * len(others),
        labelled=True,
        overlapped=0,
    )


def summed(*steps: Scored) -> Membership:
    """Return the counts of steps."""
    names = [f"step-{n}" for n in range(len(steps))]
    found = membership_of(dict(zip(names, steps, strict=True)), ["why", "why"], names)
    assert found is not None
    return found


def test_counts_are_those_of_the_threshold() -> None:
    """Two of three members and one of 100 others are above all calibration scores."""
    found = summed(scored([9.0, 8.0, 0.0], [9.0, *[0.0] * 99]))
    point = found.at(0.01)
    assert point is not None
    assert (point.found, point.false, point.null, point.base) == (2, 1, 0, 0)
    assert (found.guesses, found.right, found.pairs) == (1, 1, 3)  # the first pair is both named, the third none
    assert found.left_out == ("2 steps: why",)
    assert found.curve[0] == (0.0, 0.0)
    assert found.curve[-1] == (1.0, 1.0)


def test_a_null_that_names_texts_leaves_it_undecided() -> None:
    """Members and others then differ by more than the step."""
    found = summed(scored([9.0] * 10, [0.0] * 100, null=9.0))
    assert "An update that holds none of the candidates names 110 of 110" in broken(found, found.points[0])
    assert in_words(found).startswith("Who was in a step is not decided. An update")


def test_false_alarms_are_said_beside_the_named_texts() -> None:
    """Near copies of members are named too, and the sentence does not hide them."""
    found = summed(scored([9.0] * 10, [*[9.0] * 20, *[0.0] * 80]))
    assert not broken(found, found.points[0])
    assert in_words(found).startswith("10 of 10 texts of 1 step are named at one false alarm in 100")
    assert "and 20 of 100 texts of no step" in in_words(found)
    assert "More texts of no step are named than the threshold should let through." in in_words(found)


def test_too_few_calibration_texts_have_no_threshold() -> None:
    """98 scores cannot show one false alarm in 100."""
    found = summed(scored([9.0], [0.0] * 100, calibration=98))
    assert found.at(0.01) is None
    assert [point.false_rate for point in found.points] == list(FALSE_RATES[1:])
    assert "98 scores of calibration texts are too few for one false alarm in 100" in in_words(found)


def test_a_step_that_was_cut_off_is_tested_again(tmp_path: Path) -> None:
    """A line without an end does not count."""
    log = MembershipLog(tmp_path)
    log.add("step-1", scored([1.0], [0.0]))
    log.leave_out("step-2", "no text")
    with (tmp_path / "membership.jsonl").open("a") as file:
        file.write('{"step": "step-3", "sco')
    assert [log.has(f"step-{n}") for n in (1, 2, 3)] == [True, True, False]
    assert log.read()[1] == ["no text"]
