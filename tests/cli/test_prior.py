"""`leakaudit prior`: training, counting, scoring, and errors."""

from __future__ import annotations

import json
import math
import random
from itertools import count
from pathlib import Path

import click.testing
import pytest
import torch

from leakaudit.algorithms.language_models.training import Progress, frame, held_out, perplexity, train_causal_lm
from leakaudit.cli import main
from leakaudit.errors import PriorError
from leakaudit.plugins.prior_loading import load_prior
from leakaudit.plugins.prior_protocol import tokenizer_vocabulary
from tests.support import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    tiny.bert_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sentences of one pattern: a language that can be learned in seconds."""
    rng = random.Random(0)
    words = ["dog", "cat", "bird", "fish", "horse"], ["saw", "ate", "chased", "found"], ["old", "new", "red", "small"]
    return [
        f"the {rng.choice(words[2])} {rng.choice(words[0])} {rng.choice(words[1])} a {rng.choice(words[0])}"
        for _ in range(300)
    ]


@pytest.fixture(scope="module")
def file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "texts.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def call(*words: object, given: str = "") -> click.testing.Result:
    """Run a command in this process."""
    return click.testing.CliRunner().invoke(main, [str(word) for word in words], input=given)


def test_an_ngram_model_is_counted_judged_and_read(tokenizer: Path, file: Path, tmp_path: Path) -> None:
    """The perplexity of held-out texts is near that of the pattern."""
    out = tmp_path / "made" / "here.safetensors"
    said = call("prior", "train", "--kind", "ngram", "--text", file, "--tokenizer", tokenizer, "--out", out, "--json")
    assert said.exit_code == 0, said.output
    facts = json.loads(said.stdout)
    assert facts["kind"] == "ngram" and facts["held_out_texts"] >= 1
    assert 1 < facts["perplexity"] < 5
    asked = call(
        "prior", "score", "--prior", out, "--tokenizer", tokenizer, "the old dog saw a cat", "cat a saw dog old the"
    )
    assert asked.exit_code == 0, (asked.output, asked.exception)
    first, second, total = asked.stdout.splitlines()
    assert float(first.split()[0]) < float(second.split()[0])
    assert total.startswith("perplexity ") and total.endswith("over 2 texts")


def test_a_language_model_learns(texts: list[str]) -> None:
    """By steps rather than by time: the clock is the test's own."""
    ticks = count()
    seen: list[Progress] = []
    train_causal_lm(texts, tiny.bert_tokenizer(), 40 / 60, clock=lambda: float(next(ticks)), report=seen.append)
    assert [now.step for now in seen] == list(range(1, 40))
    assert seen[0].nats > 3 and seen[-1].nats < 1.6


def test_the_same_seed_and_steps_give_the_same_model(texts: list[str]) -> None:
    """And leave the global random state alone."""
    made = []
    state = torch.get_rng_state()
    for _ in range(2):
        ticks = count()
        made.append(train_causal_lm(texts[:40], tiny.bert_tokenizer(), 3 / 60, clock=lambda t=ticks: float(next(t))))  # type: ignore[misc]
    one, other = (model.state_dict() for model in made)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_writes_a_folder_that_scores(tokenizer: Path, file: Path, tmp_path: Path) -> None:
    """For people: where it is, and how good on what."""
    out = tmp_path / "lm"
    words = ("prior", "train", "--text", file, "--tokenizer", tokenizer, "--out", out, "--minutes", 0.001)
    said = call(*words)
    assert said.exit_code == 0, said.output
    assert "texts that it has not seen" in said.stdout and "nats a token" in said.stderr
    scorer = load_prior(str(out), vocabulary=tokenizer_vocabulary(tiny.bert_tokenizer()))
    assert scorer.nll([[7, 8, 9]])[0] > 0


def test_scoring_a_file_prints_one_number(tokenizer: Path, file: Path, tmp_path: Path) -> None:
    """No text is printed back; stdin is read where nothing is given."""
    out = tmp_path / "n.safetensors"
    call("prior", "train", "--kind", "ngram", "--text", file, "--tokenizer", tokenizer, "--out", out)
    said = call("prior", "score", "--prior", out, "--tokenizer", tokenizer, "--text", file)
    assert said.stdout.count("\n") == 1 and said.stdout.endswith("over 300 texts\n")
    piped = call("prior", "score", "--prior", out, "--tokenizer", tokenizer, "--json", given="the old dog\n\n")
    facts = json.loads(piped.stdout)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["nats"][0]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("score", "--prior", "n-gram", "a dog"), "did you mean 'ngram'"),
        (("score", "--text", "{file}", "a dog"), "give sentences or --text, not both"),
        (("score",), "nothing to score"),
        (("train", "--text", "{file}.gone", "--out", "x"), "no such file"),
        (("train", "--text", "{file}", "--out", "{file}"), "is a file; a language model is a folder"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(tokenizer: Path, file: Path, words: tuple[str, ...], message: str) -> None:
    """What was asked, what was found, what to do."""
    said = call("prior", *(word.replace("{file}", str(file)) for word in words), "--tokenizer", tokenizer)
    assert said.exit_code == 2
    assert message in said.stderr


def test_the_list_shows_every_prior() -> None:
    """With what an attacker must have."""
    rows = json.loads(call("prior", "list", "--json").stdout)
    assert [row["name"] for row in rows] == ["causal-lm", "ngram", "victim"]
    assert all(row["knows"] and row["source"] for row in rows)


def test_texts_are_held_out_once_each() -> None:
    """A text that occurs twice must not be in both parts."""
    learn, judge = held_out(["a", "b", "a", "c", "d"], 0.25)
    assert len(judge) == 1 and sorted(learn + judge) == ["a", "b", "c", "d"]
    assert held_out(["a"], 0.5) == (["a"], [])
    assert held_out(["a", "b"], 0.0)[1] == []


def test_perplexity_is_over_tokens_not_over_texts() -> None:
    """A long text counts more than a short one."""
    assert perplexity([1.0, 3.0], [3, 1]) == pytest.approx(math.exp(1.5))


def test_a_tokenizer_without_special_tokens_cannot_frame_a_text() -> None:
    """And time has to be positive."""
    from tokenizers import Tokenizer, models

    bare = tiny.hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(PriorError, match="no special token"):
        frame(bare)
    with pytest.raises(PriorError, match="minutes above 0, got 0"):
        train_causal_lm(["a"], tiny.bert_tokenizer(), 0)
