"""`dlg` and `tag` find sentences by gradients, and report their assumptions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from leakaudit.algorithms.matching.descent import LABEL_STEP, Descent, Run
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.attacks.dlg import Dlg
from leakaudit.attacks.tag import Tag
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.truth import Truth
from leakaudit.defenses.freeze_embeddings import FreezeEmbeddings
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXT = "birds saw the river"
TWO = ["a bird saw the river.", "the old dog chased a cat."]


def _model() -> nn.Module:
    """Return a model whose tokens matter.

    With BERT's usual 0.02 an untrained model hardly separates them.
    """
    return tiny.bert(initializer_range=0.1)


@pytest.mark.parametrize("kind", [Dlg, Tag])
def test_a_sentence_comes_back_without_granted_labels_or_lengths(kind: type[Dlg | Tag]) -> None:
    """Label and length are found on the way, and the re-simulated guess proves itself."""
    seen = tiny.observe([TEXT], [1], model=_model(), batch_size_bound=1)
    guess = kind(steps=300, restarts=1)(seen, tiny.generator(), Budget(600))
    assert [(g.token_ids, g.proved, g.own_score) for g in guess.sequences or ()] == [(tiny.ids_of(TEXT), True, 1.0)]
    assert guess.label_counts == (0, 1)
    assert guess.diagnostics["lengths_granted"] == 0


def test_two_sentences_of_different_length_are_guessed_at_their_lengths() -> None:
    """Granted labels are not returned as if they had been found."""
    lengths = tuple(len(tiny.ids_of(text)) for text in TWO)
    seen = tiny.observe(TWO, [0, 1], model=_model()).granting(Granted(labels=(0, 1), lengths=lengths))
    guess = Tag(steps=5, trial_steps=2)(seen, tiny.generator(), Budget(600))
    assert sorted(len(g.token_ids) for g in guess.sequences or ()) == sorted(lengths)
    assert all(g.token_ids[0] == tiny.VOCABULARY["[CLS]"] and g.token_ids[-1] == 3 for g in guess.sequences or ())
    assert guess.label_counts is None


def test_local_steps_are_taken_for_one_step_on_all_their_sequences() -> None:
    """At a small learning rate the update is nearly the mean gradient.

    LAMP, "Attacking FedAvg".
    """
    texts = (TEXT, "a fish")
    lengths = tuple(len(tiny.ids_of(text)) for text in texts)
    rate: dict[str, Any] = {"view": "delta", "local_steps": 2, "learning_rate": 1e-3}
    parts = [
        tiny.client_step(_model(), tiny.bert_tokenizer(), [t], [k], **rate) for t, k in zip(texts, (1, 0), strict=True)
    ]
    step = dataclasses.replace(parts[0], truth=Truth(tuple(part.truth.micro_batches[0] for part in parts)))
    seen = step.observe().granting(Granted(labels=(1, 0), lengths=lengths))
    guess = Dlg(steps=600, restarts=1)(seen, tiny.generator(), Budget(600))
    assert {g.token_ids for g in guess.sequences or ()} == {tiny.ids_of(TEXT), tiny.ids_of("a fish")}


def test_without_position_table_and_attention_updates_lengths_must_be_granted() -> None:
    """With most of the model frozen nothing tells the length."""
    frozen = frozenset(name for name, _ in tiny.bert().named_parameters() if "classifier" not in name)
    verdict = Tag().applies(tiny.observe([TEXT], [1], frozen=frozen))
    assert not verdict and "grant `lengths`" in verdict.reason


def test_under_noise_it_applies_where_lengths_are_granted() -> None:
    """Nothing else tells them."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    noisy = GaussianNoise(scale=1.0)(step, step.observe(), tiny.generator())
    assert not Tag().applies(noisy)
    assert Tag().applies(noisy.granting(Granted(lengths=(6,))))


def test_it_does_not_apply_to_word_tables_alone() -> None:
    """The reason names what is missing."""
    words = tiny.word_table(tiny.bert())
    frozen = frozenset(name for name, _ in tiny.bert().named_parameters() if name != words)
    assert "beyond the word embedding" in Tag().applies(tiny.observe([TEXT], [1], frozen=frozen)).reason


def test_an_exposure_that_names_nothing_does_not_apply() -> None:
    """The reason repeats the pattern."""
    assert "no.such.layer" in Tag(exposure="no.such.layer").applies(tiny.observe([TEXT], [1])).reason


def test_frozen_tables_do_not_stop_it() -> None:
    """The rest of the update is enough."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1], batch_size_bound=1)
    seen = FreezeEmbeddings()(step, step.observe(), tiny.generator())
    guess = Tag(steps=5, trial_steps=1)(seen, tiny.generator(), Budget(600))
    assert [len(g.token_ids) for g in guess.sequences or ()] == [len(tiny.ids_of(TEXT))]


def _short() -> Observation:
    return tiny.observe([TEXT], [1], model=_model(), batch_size_bound=1)


def test_it_stops_when_nothing_improves() -> None:
    """A step too small to change anything is noticed after `patience` steps."""
    seen = _short().granting(Granted(labels=(1,), lengths=(6,)))
    guess = Tag(steps=50, learning_rate=1e-12, patience=3, restarts=1)(seen, tiny.generator(), Budget(600))
    assert guess.stop == "converged"
    assert guess.diagnostics["steps"] < 10


def test_it_stops_in_the_middle_when_the_budget_is_used_up() -> None:
    """The clock strikes after some steps, and the best guess so far is returned."""
    ticks = iter(range(10**6))
    guess = Tag(restarts=1)(_short(), tiny.generator(), Budget(30, clock=lambda: float(next(ticks))))
    assert guess.stop == "budget"
    assert 0 < guess.diagnostics["steps"] < 30
    assert guess.sequences is not None and len(guess.sequences) == 1


PRINTED: list[tuple[str, str, Any]] = [
    ("steps", "LAMP, Sec. 5: 2500 on all models but BERT-large", 2500),
    ("learning_rate", "LAMP, App. D: lambda, absolute", 0.1),
    ("linear", "LAMP, App. D: gamma = 1, no decay", False),
    ("weight_decay", "LAMP, Sec. 5: Adam", 0.0),
    ("clip", "LAMP, App. D: BERT-large only", 0.0),
    ("relative", "LAMP, App. D: lambda is absolute", False),
    ("start_scale", "LAMP, Sec. 5 and Algorithm 1: a standard Gaussian", 1.0),
    ("start_norm", "LAMP, Algorithm 1: the start is as drawn", 0.0),
    ("lowest_id", "LAMP, Algorithm 1: the nearest of all tokens", 0),
    ("n_permutations", "LAMP, Sec. 5: permutations are for its own methods", 0),
    ("n_init", "LAMP, Sec. 5: more samples are for its own methods", 1),
    ("restarts", "one start", 1),
    ("patience", "LAMP, Sec. 5: all steps are taken", 0),
    ("label_step", "DLG: labels are optimised with the embeddings, at the same step", 0.1),
    ("next_tokens", "DLG, Algorithm 1: labels are optimised; a language model has one at each place", "joint"),
    ("bag", "LAMP, App. A.1: the word embedding is frozen", False),
    ("squared", "LAMP, Sec. 4.2: the L2 norm in L_tag", False),
    ("keep", "all steps are taken", "last"),
    ("aware", "LAMP, Sec. 5: the attacks under defences are the same", False),
]


@pytest.mark.parametrize("kind", [Dlg, Tag])
@pytest.mark.parametrize(("knob", "place", "value"), PRINTED)
def test_the_paper_preset_holds_the_papers_constants(kind: type[Dlg | Tag], knob: str, place: str, value: Any) -> None:
    """As LAMP compares with them on BERT-base."""
    assert getattr(kind(preset="paper").settings(), knob) == value, place


def test_every_knob_of_a_preset_is_in_the_papers_table_or_decides_nothing_there() -> None:
    """A new knob has to say what the paper does; `trial_steps` are for several starts."""
    knobs = {field.name for field in dataclasses.fields(Tag(preset="paper").settings())}
    assert knobs == {knob for knob, _, _ in PRINTED} | {"trial_steps"}
    assert Tag(preset="paper").alpha == 0.01  # LAMP, App. D: alpha_tag


@pytest.mark.parametrize(("kind", "rate"), [(Dlg, 0.1), (Tag, 0.01)])
def test_the_large_preset_holds_the_papers_recipe_for_bert_large(kind: type[Dlg | Tag], rate: float) -> None:
    """LAMP, Sec. 5 and App. D: 10,000 steps of AdamW with linear decay, clipped at 1."""
    large = kind(preset="large").settings()
    assert (large.steps, large.linear, large.clip, large.learning_rate, large.label_step) == (
        10_000,
        True,
        1.0,
        rate,
        rate,
    )
    assert large.weight_decay > 0


@pytest.mark.parametrize("kind", [Dlg, Tag])
def test_the_released_preset_is_the_printed_one_squared_with_the_best_step(kind: type[Dlg | Tag]) -> None:
    """`--baseline` of LAMP's code draws one start and does not rescale it.

    It tries one order (dlg.sh and tag.sh).
    """
    printed, released = (kind(preset=name).settings() for name in ("paper", "released"))
    changed = {"squared": True, "keep": "best-step", "n_permutations": 1, "lowest_id": 999}
    assert released == dataclasses.replace(printed, **changed)  # type: ignore[arg-type]
    assert (released.start_scale, released.start_norm, released.n_init) == (1.0, 0.0, 1)


@pytest.mark.parametrize("kind", [Dlg, Tag])
def test_the_paper_preset_takes_every_step_from_one_start(kind: type[Dlg | Tag]) -> None:
    """A step too small to change anything does not end it."""
    seen = _short().granting(Granted(labels=(1,), lengths=(6,)))
    guess = kind(preset="paper", steps=30, learning_rate=1e-12)(seen, tiny.generator(), Budget(600))
    assert (guess.stop, guess.diagnostics["steps"]) == ("done", 30)


def test_labels_move_by_the_papers_step_where_it_is_set() -> None:
    """The first step of Adam is as long as its rate, for labels that are not granted."""
    moved = {}
    for step in (0.01, 0.1):
        matcher = Matcher(_short(), (6,), Objective())
        first = matcher.candidates.random(1, tiny.generator())
        run = Run(matcher, Descent(10, 0.2, decay=0.5, decay_every=1, label_step=step), first, tiny.generator())
        run.step()
        once = run.now.label_logits.clone()
        run.step()
        moved[step] = (float((once - first.label_logits).abs().max()), float((run.now.label_logits - once).abs().max()))
    for step, (one, two) in moved.items():
        assert one == pytest.approx(step, rel=1e-3)
        assert two < 0.6 * step  # it falls with the embeddings'
    assert Descent(10, 0.2, decay=0.5, decay_every=1).label_rate(5) == LABEL_STEP


@pytest.mark.parametrize("knob", [{"steps": 0}, {"restarts": 0}, {"learning_rate": 0.0}, {"alpha": -1.0}])
def test_knobs_that_leave_nothing_to_do_are_refused(knob: dict[str, Any]) -> None:
    """The message names the knob."""
    with pytest.raises(ValueError, match=next(iter(knob))):
        dataclasses.replace(Tag(), **knob)


def test_the_default_is_what_it_was_before_it_had_a_preset_of_its_own() -> None:
    """Figures of earlier versions stand."""
    own: dict[str, Any] = {
        "learning_rate": 0.5,
        "relative": True,
        "start_scale": 0.0,
        "n_init": 10,
        "restarts": 2,
        "patience": 200,
    }
    more: dict[str, Any] = {"label_step": None, "squared": True, "keep": "best", "aware": True}
    more |= {"next_tokens": "similar", "bag": True}
    for kind in (Dlg, Tag):
        assert kind().settings() == dataclasses.replace(kind(preset="paper").settings(), **own, **more)
