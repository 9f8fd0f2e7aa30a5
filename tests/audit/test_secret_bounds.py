"""Secrets in simulated steps: drawn, recovered, and what they say of a claim."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.audit.secret_bounds import canaries_of
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.cli import main
from leakaudit.config.secret_book import SecretBook, check_tokenizer, simulated_record
from leakaudit.config.secret_template import SecretTemplate
from leakaudit.config.simulation import Simulation
from leakaudit.errors import ConfigError
from leakaudit.results.canaries import bounded, pooled
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from leakaudit.results.journal import JournalEntry, SecretOutcome
from leakaudit.results.schema import AttackEntry, AttemptStatus, Catalogue, Privacy
from tests.support import factories, tiny

WORDS = ["dog", "cat", "bird", "fish", "horse", "house", "tree", "river", "road"]
SPAN = AttackEntry(label="Span", meaning="m", source="s", goal="text", threat_model="t")


def template(text: str = "the old {word} saw a {digits:4} .", **named: list[str]) -> SecretTemplate:
    """Return a template with nine words and ten thousand numbers."""
    return SecretTemplate.parse(text, {"word": WORDS} | named)


# ---------------------------------------------------------------------------------------------------------- templates
def test_a_template_counts_its_values_and_draws_them_all() -> None:
    """Nine words and ten digits: every value comes up."""
    made = template("{word} {digits:1}")
    rng = random.Random(0)
    assert made.values == 90
    assert len({made.draw(rng).secret for _ in range(2000)}) == 90


def test_a_secret_is_read_in_a_text_with_other_spaces_case_and_accents() -> None:
    """A tokenizer may drop all three."""
    made = SecretTemplate.parse("Patient {who}, number {digits:6}.", {"who": ["Béla O'Brien", "Anna"]})
    assert made.secret_in("x patient bela o ' brien , number 123456 . y") == ("belao'brien", "123456")
    assert made.secret_in("patient anna , number 12345 .") is None


def test_a_guess_names_one_value_at_most() -> None:
    """Else a long guess would hide a thousand guesses."""
    made = template("number {digits:4} end")
    assert made.guess_in("1111 2222 3333") is None  # without spaces these are twelve digits
    assert made.guess_in("a 1111 b 2222 c") == ("1111",)
    assert made.guess_in("1111 b number 2222 end") == ("2222",)


@pytest.mark.parametrize(("text", "named", "message"), [
    ("no field at all", {}, "needs a field"),
    ("{digits:0}", {}, "from 1 to 18"),
    ("{colour}", {}, "unknown field"),
    ("{one_of:nowhere.txt}", {}, "cannot be read"),
    ("{word}", {"word": ["one"]}, "single value"),
    ("{word} {digits:2}", {"word": ["one", "ONE"]}, "same as another"),
    ("{word}{word}", {"word": WORDS}, "two lists"),
    ("{word} dog {word}", {"word": WORDS}, "two lists"),
    ("{digits:3} }", {}, "brace"),
])  # fmt: skip
def test_a_template_whose_values_are_not_what_they_seem_is_refused(
    text: str, named: dict[str, list[str]], message: str
) -> None:
    """A wrong number of values makes a wrong bound."""
    with pytest.raises(ConfigError, match=message):
        SecretTemplate.parse(text, named)


def test_a_tokenizer_that_loses_a_value_is_refused() -> None:
    """The tiny vocabulary has no digits, and reads them all as unknown."""
    tokenizer = tiny.bert_tokenizer()

    def read(text: str) -> str:
        return str(tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True))

    check_tokenizer(template("the {word} saw a tree"), read)
    with pytest.raises(ConfigError, match="changes or cuts a secret"):
        check_tokenizer(template(), read)


# -------------------------------------------------------------------------------------------------------------- bounds
def entries(recovered: int, clean: int, defense: str = "none", **outcome: Any) -> list[JournalEntry]:
    """Return attempts of one attack, of which the first recovered the secret."""
    told = {"guesses": 1, "values": 10**6} | outcome
    return [
        JournalEntry(
            attempt=factories.attempt(step, "span", defense), secret=SecretOutcome(recovered=step < recovered, **told)
        )
        for step in range(recovered + clean)
    ]


def found(made: list[JournalEntry], *privacy: Privacy, attacks: tuple[str, ...] = ("span",)) -> Any:
    """Return the only bound."""
    (one,) = canaries_of(made, (), Catalogue(attacks=dict.fromkeys(attacks, SPAN)), privacy, None)
    return one


def test_one_recovered_secret_of_a_million_bounds_epsilon() -> None:
    """The closed form for 1 of 20, and no claim to compare it with."""
    one = found(entries(1, 19))
    assert one.epsilon_lower == pytest.approx(7.844, abs=0.001)
    assert (one.k, one.n, one.guesses, one.verdict, one.covers) == (1, 20, 1, "no claim", "step")
    assert "Nobody claims" in bounded(one)


def test_a_claimed_noise_that_is_not_there_is_contradicted() -> None:
    """Noise multiplier 8 claims about 0.5 for one step, and every secret came back."""
    claim = Privacy(noise_multiplier=8.0, sampling_rate=0.01, steps=100, delta=1e-5, epsilon=0.1, origin="computed")
    one = found(entries(20, 0), claim)
    assert one.verdict == "contradicted"
    assert 0.3 < (one.claimed or 0) < 0.8  # the whole run's epsilon of 0.1 is smaller, and is no claim about one step
    assert "This contradicts the claim" in bounded(one)


def test_what_is_not_contradicted_is_not_confirmed() -> None:
    """No secret came back."""
    one = found(entries(0, 20), Privacy(noise_multiplier=1.0, delta=1e-5))
    assert (one.verdict, one.epsilon_lower) == ("not contradicted", 0.0)
    assert "does not confirm it" in bounded(one)


def test_an_epsilon_of_the_whole_run_is_no_claim_about_a_step() -> None:
    """Sampling amplifies it; without sampling it holds for each step, too."""
    run = Privacy(epsilon=3.0, delta=1e-5, sampling_rate=0.01)
    assert found(entries(20, 0), run).verdict == "no claim"
    assert found(entries(20, 0), run.model_copy(update={"sampling_rate": 1.0})).verdict == "contradicted"
    assert found(entries(20, 0), run.model_copy(update={"covers": "message"})).verdict == "contradicted"


def test_attempts_that_did_not_run_count_as_not_recovered() -> None:
    """What ended them may depend on the update."""
    made = entries(5, 5)
    left_out = factories.attempt(10, "span", status=AttemptStatus.NOT_NEEDED)
    made += [
        JournalEntry(attempt=left_out),
        JournalEntry(attempt=factories.attempt(10, "other"), secret=made[0].secret),
    ]
    one = found(made)
    assert (one.k, one.n) == (5, 11)


def test_steps_of_later_epochs_do_not_count() -> None:
    """The weights may hold the record already."""
    made = entries(5, 5)
    late = [factories.step(n).model_copy(update={"epoch": n / 4}) for n in range(10)]
    (one,) = canaries_of(made, late, Catalogue(attacks={"span": SPAN}), (), None)
    assert (one.k, one.n) == (4, 4)
    book = replace(SecretBook.of(template("the {word} sat"), [("dog",)]), total=6)
    told = [book.outcome(["the dog sat", "a cat"], ["the dog sat"], step) for step in range(4)]
    assert [each is not None and each.first for each in told] == [True, True, True, False]
    assert not canaries_of(entries(5, 5, first=False), (), Catalogue(attacks={"span": SPAN}), (), None)


def test_several_attacks_share_the_error() -> None:
    """The largest of two bounds must hold at 95 %, too."""
    assert found(entries(5, 15), attacks=("span", "tag")).epsilon_lower < found(entries(5, 15)).epsilon_lower


def test_as_many_guesses_as_values_bound_nothing() -> None:
    """And the note says so."""
    one = found(entries(20, 0, guesses=50, values=50))
    assert one.epsilon_lower == 0.0
    assert "bounds nothing" in one.notes[0]


def test_the_bounds_of_several_runs_add_their_counts() -> None:
    """And those of another claim stay apart."""
    one = found(entries(1, 19))
    other = found(entries(1, 19), Privacy(noise_multiplier=1.0, delta=1e-5))
    both = pooled([one, other, one])
    assert [(each.k, each.n) for each in both] == [(2, 40), (1, 20)]
    assert both[0].epsilon_lower == pytest.approx(found(entries(2, 38)).epsilon_lower)


def test_bounds_that_contradict_their_counts_are_found() -> None:
    """Somebody may edit the file."""
    honest = factories.audit(0, 20).model_copy(update={"canaries": (found(entries(5, 15)),)})
    edited = honest.canaries[0].model_copy(update={"epsilon_lower": 0.1})
    assert not [one for one in contradictions(honest) if "secrets" in one]
    assert "its counts give" in " ".join(contradictions(honest.model_copy(update={"canaries": (edited,)})))


# ---------------------------------------------------------------------------------------------------------- simulation
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a tiny encoder, texts, and a list of words."""
    place = tmp_path_factory.mktemp("secrets")
    tiny.bert(seed=1).save_pretrained(place / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(place / "model")
    rows = [{"text": f"the {word} sat near a house", "label": n % 2} for n, word in enumerate(WORDS)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "words.txt").write_text("\n".join(WORDS))
    return place


def test_every_step_holds_the_record_of_its_number(folder: Path) -> None:
    """The first text of the batch is the record, the others are those of the data."""
    text = f"the old {{one_of:{folder / 'words.txt'}}} saw a tree"
    made = Simulator(Simulation(folder / "model", folder / "rows.jsonl", batch_size=2, steps=3, secrets=text))
    plainly = Simulator(Simulation(folder / "model", folder / "rows.jsonl", batch_size=2, steps=3))
    assert made.secrets is not None and made.digest != plainly.digest
    for step in range(3):
        texts = [made.tokenizer.decode(ids, skip_special_tokens=True) for ids in made.snapshot(step).truth.sequences()]
        record = simulated_record(made.secrets.template, 0, step)
        assert texts[0] == record.text
        assert tuple(made.snapshot(step).truth.sequences()[1]) == plainly.snapshot(step).truth.sequences()[1]
        outcome = made.secrets.outcome(texts, [record.text])
        assert outcome is not None and outcome.recovered and outcome.values == 9


def test_only_drawn_secrets_count_as_secrets(folder: Path) -> None:
    """A text of the data that looks like a record is none."""
    made = template("the {word} sat")
    book = SecretBook.of(made, [("dog",)])
    assert book.outcome(["the cat sat"], ["the cat sat"]) is None
    assert book.outcome(["the cat sat", "the dog sat"], ["the cat sat"]) == SecretOutcome(guesses=1, values=9)


def test_simulate_recovers_secrets_and_contradicts_a_claim(folder: Path, tmp_path: Path) -> None:
    """End to end: command, results, claim of one message, rule of the gate."""
    (tmp_path / "policy.yaml").write_text(
        "schema: leakaudit.policy/1\nname: claim\nrules:\n  - {id: epsilon, claimed_epsilon: {max: 8}}\n"
        "  - {id: rate, event: exact_sentence, max_rate: 0.5}\n"
    )
    (tmp_path / "audit.yaml").write_text(
        "attacks: [span]\ncontrols: 0\nbudget_s: 20\ntext: hash\n"
        "privacy: {epsilon: 0.1, delta: 1.0e-5, covers: message, accountant: somebody}\npolicy: policy.yaml\n"
    )
    secret = f"the {{one_of:{folder / 'words.txt'}}} saw a tree"
    more = ["--seeds", "1,2", "--steps", "3", "--out", str(tmp_path / "out"), "--config", str(tmp_path / "audit.yaml")]
    command = ["simulate", "--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--secrets", secret]
    done = CliRunner().invoke(main, [*command, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    results = load_results(tmp_path / "out")
    (one,) = results.canaries
    assert (one.defense, one.attack, one.values, one.n, one.guesses) == ("none", "span", 9, 6, 1)
    assert one.k == 6 and one.verdict == "contradicted" and one.claimed == 0.1
    assert not contradictions(results)
    assert "the owner of the run, for one message" in one.claimed_by
    assert secret not in (tmp_path / "out" / "results.json").read_text()
    rule = json.loads((tmp_path / "out" / "verdict.json").read_text())["rules"][0]
    assert rule["status"] == "FAIL" and "This contradicts the claim" in rule["sentence"]


def test_arrays_have_no_secrets(folder: Path) -> None:
    """They hold no text."""
    (folder / "arrays.safetensors").write_bytes(b"")
    command = ["simulate", "--model", "a:b", "--data", str(folder / "arrays.safetensors"), "--secrets", "{digits:6}"]
    assert "--secrets" in CliRunner().invoke(main, command).output
