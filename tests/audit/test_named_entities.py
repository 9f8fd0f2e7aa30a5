"""Named entities come from the data or a tagger, and stay private."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from leakaudit.audit.audit import Audit
from leakaudit.audit.entity_tagger import entity_tagger
from leakaudit.audit.scoring.score import score
from leakaudit.audit.simulation.texts import Simulator, read_examples
from leakaudit.config.audit import AuditConfig
from leakaudit.config.simulation import Simulation
from leakaudit.errors import DataError, ModelError
from leakaudit.plugins import entities_in_bag
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from leakaudit.results.schema import Missing, Score
from leakaudit.storage.snapshot_content import check_truth
from leakaudit.storage.truth_tensors import tensors_of, truth_of
from tests.support import tiny

ROWS: list[dict[str, Any]] = [
    {"text": "the old dog chased a red horse near the big river", "label": 0, "spans": [[4, 11, "PERSON"], [21, 30]]},
    {"text": "one bird never ate two fish today and the cat ran", "label": 1, "entities": ["two fish", "seven seas"]},
    {"text": "four new trees near a big house and the small road", "label": 2, "entities": None},
]
NAMED = ("old dog", "red horse", "two fish", "seven seas")


def _rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _simulator(folder: Path) -> Simulator:
    tiny.wide_bert().save_pretrained(folder / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder / "model")
    return Simulator(Simulation(model=folder / "model", data=_rows(folder, ROWS), batch_size=3, steps=1, seed=1))


def test_entities_are_read_as_strings_and_as_places(tmp_path: Path) -> None:
    """A row may name none, or nothing about them."""
    rows = [*ROWS, {"text": "a dog", "label": 0, "spans": [{"start": 2, "end": 5}]}, {"text": "a dog", "label": 0}]
    found = [example.entities for example in read_examples(_rows(tmp_path, rows), "classification")]
    assert found == [("old dog", "red horse"), ("two fish", "seven seas"), None, ("dog",), None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("secret", r":1: 'entities' must be a list of strings, or of places .*; found str$"),
        (["secret", 7], r":1: 'entities' must be .*; its item 1 is neither$"),
        ([[2, 99, "secret"]], r"its item 0 is neither$"),
        ([[3, 3]], r"its item 0 is neither$"),
        ([[True, 3]], r"its item 0 is neither$"),
    ],
)
def test_entities_that_cannot_be_read_are_refused(tmp_path: Path, given: Any, message: str) -> None:
    """The message names the line and never its content."""
    path = _rows(tmp_path, [{"text": "a dog", "label": 0, "entities": given}])
    with pytest.raises(DataError, match=message) as refused:
        read_examples(path, "classification")
    assert "secret" not in str(refused.value)


def test_an_audit_scores_entities_of_the_data_and_shows_none(tmp_path: Path) -> None:
    """No file of the audit holds one, and no public fact or printed batch."""
    simulator = _simulator(tmp_path)
    snapshot = simulator.snapshot(0)
    given = {example.text: example.entities for example in simulator.batches[0]}
    assert set(snapshot.truth.entities()) == set(given.values())
    config = AuditConfig.model_validate(
        {"out_dir": tmp_path, "attacks": ["span", "embedding-rows"], "controls": 0, "attack_recovered_steps": True}
    )
    audit = Audit(tmp_path / "run", config, simulator.tokenizer)
    audit.step(snapshot)
    audit.finish()
    found = load_results(tmp_path / "run")
    attempt, bag = found.attempts
    assert bag.scores["nerr"] == Score(value=1.0, n=2) and bag.sequences[0].exact is None
    assert [s.exact for s in attempt.sequences] == [True] * 3
    assert attempt.scores["nerr"] == Score(value=1.0, n=2)
    assert isinstance(attempt.scores["nerr_f1"], Missing)
    assert found.summaries[0].scores["nerr"] == 1.0 and found.summaries[0].texts_found == 3
    assert contradictions(found) == ()
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()).decode()
    public = written + snapshot.observation.facts.model_dump_json() + repr(snapshot.truth)
    assert not [name for name in NAMED if name in public]


def test_entities_survive_the_file_of_the_private_batch(tmp_path: Path) -> None:
    """A text without entities and one of which nothing is known stay apart."""
    truth = _simulator(tmp_path).snapshot(0).truth
    tensors = tensors_of(truth)
    check_truth(tensors, "truth.safetensors", arrays=False)
    assert truth_of(tensors).entities() == truth.entities()
    tensors["0/entities"] = tensors["0/entities"][:-1].clone()
    with pytest.raises(Exception, match="no list of names for each sequence"):
        check_truth(tensors, "truth.safetensors", arrays=False)


TEXTS = ["the old dog chased a cat", "a bird ate two fish"]
TOKENIZER = tiny.bert_tokenizer()
TRUTH = [tuple(TOKENIZER(text)["input_ids"]) for text in TEXTS]


def _scored(guess: Reconstruction, **known: Any) -> dict[str, Any]:
    special = frozenset(TOKENIZER.all_special_ids)
    return dict(score(guess, TRUTH, None, None, TOKENIZER, special, 6, **known).scores)


def _tagger(texts: Any) -> list[tuple[str, ...]]:
    return [tuple(name for name in ("dog", "cat", "bird") if name in text) for text in texts]


def test_a_tagger_names_entities_where_the_data_names_none() -> None:
    """Of dog and cat the guess holds dog, and it holds bird, which is wrong.

    Recall is 1 / 2 and F1 is 1 / 2; the second text is not recovered.
    """
    guess = Reconstruction(sequences=(GuessedSequence(tiny.ids_of("the old dog chased a bird")),))
    tagged = _scored(guess, entities=[None, ("two fish",)], tagger=_tagger)
    assert tagged["nerr"] == Score(value=0.25, n=2)
    assert tagged["nerr_f1"] == Score(value=0.25, n=2)
    untagged = _scored(guess, entities=[None, ("two fish",)])
    assert untagged["nerr"] == Score(value=0.0, n=1)
    assert "no entity tagger" in untagged["nerr_f1"].missing
    assert "the data names none" in _scored(guess)["nerr"].missing


def test_a_bag_recovers_an_entity_if_it_has_every_piece_of_its_name() -> None:
    """Order and neighbours do not count.

    Of old dog and cat the bag lacks a piece of one, of two fish it has all.
    """
    bag = Reconstruction(tokens=tiny.ids_of("fish cat old two a"))
    found = _scored(bag, entities=[("old dog", "cat"), ("two fish",)])
    assert found["nerr"] == Score(value=0.75, n=2)
    assert "the data names none" in _scored(bag)["nerr"].missing
    assert {found[name].missing for name in ("best_rl", "sentences_found")} == {
        "the attack guesses a bag of words and no sequences"
    }


@pytest.mark.parametrize("without", ["", "##ann", "lee", "met"])
def test_the_pieces_of_a_name_are_the_tokens_of_its_place(without: str) -> None:
    """A piece of another word that looks like the name does not stand for it."""
    tokens = ["jo", "##ann", "met", "jo", "-", "ann", "lee"]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(tokens[i] for i in ids).replace(" ##", "")

    bag = [i for i, token in enumerate(tokens) if token != without]
    assert entities_in_bag(["Jo-Ann Lee"], range(len(tokens)), bag, decode) == (
        frozenset() if without == "lee" else {("jo", "-", "ann", "lee")}
    )
    assert entities_in_bag(["Ann"], range(len(tokens)), [1], decode) == frozenset()
    assert entities_in_bag(["Joann"], range(len(tokens)), [0], decode) == frozenset()
    assert entities_in_bag(["JOANN"], range(len(tokens)), [0, 1], decode) == {("joann",)}


def test_without_spacy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the pipeline that was asked for."""
    monkeypatch.setitem(sys.modules, "spacy", None)
    entity_tagger.cache_clear()
    with pytest.raises(ModelError, match=r"'en_core_web_sm': spaCy is not installed; .*leakaudit\[entities\]"):
        entity_tagger("en_core_web_sm")


def _fake_spacy(labels: tuple[str, ...], parts: tuple[str, ...] = ("ner",)) -> ModuleType:
    """Return a stand-in for spaCy to which each capitalised word is an entity."""

    def document(text: str) -> SimpleNamespace:
        names = [word for word in text.split() if word[0].isupper()]
        kinds = (labels * len(names))[: len(names)]
        return SimpleNamespace(ents=[SimpleNamespace(text=n, label_=k) for n, k in zip(names, kinds, strict=True)])

    pipeline = SimpleNamespace(
        pipeline=[(name, SimpleNamespace(labels=labels)) for name in parts],
        pipe_names=list(parts),
        pipe=lambda texts: map(document, texts),
    )
    module: Any = ModuleType("spacy")
    module.util = SimpleNamespace(is_package=lambda name: name == "small")
    module.load = lambda name: pipeline
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("labels", "found"), [(("PERSON", "DATE"), ("Ann", "Carl")), (("gene", "cell"), ("Ann", "Bo", "Carl"))]
)
def test_only_entities_of_the_named_kinds_count(
    monkeypatch: pytest.MonkeyPatch, labels: tuple[str, ...], found: tuple[str, ...]
) -> None:
    """Dates do not; a pipeline with kinds of its own counts with all of them."""
    monkeypatch.setitem(sys.modules, "spacy", _fake_spacy(labels))
    entity_tagger.cache_clear()
    assert entity_tagger("small")(["Ann met Bo and Carl", "nobody"]) == [found, ()]


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("small", ("tagger",), "the pipeline finds no entities; it has tagger"),
        ("absent", ("ner",), "no spaCy pipeline"),
    ],
)
def test_a_pipeline_that_cannot_serve_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, parts: tuple[str, ...], message: str
) -> None:
    """The message says what was asked for and what was found."""
    monkeypatch.setitem(sys.modules, "spacy", _fake_spacy(("PERSON",), parts))
    entity_tagger.cache_clear()
    with pytest.raises(ModelError, match=message):
        entity_tagger(name)


def test_a_real_pipeline_tags_names(tmp_path: Path) -> None:
    """A pipeline of rules in a folder, where spaCy is installed."""
    spacy = pytest.importorskip("spacy")
    pipeline = spacy.blank("en")
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": "PERSON", "pattern": "Ann Lee"}])
    pipeline.to_disk(tmp_path / "names")
    entity_tagger.cache_clear()
    assert entity_tagger(str(tmp_path / "names"))(["We met Ann Lee.", ""]) == [("Ann Lee",), ()]
