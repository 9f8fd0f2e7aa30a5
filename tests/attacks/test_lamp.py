"""Both variants of LAMP: sentences with their order, presets, ablations, priors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from leakaudit.attacks.lamp import PRESETS
from leakaudit.attacks.lamp_cos import LampCos
from leakaudit.attacks.lamp_l1l2 import LampL1L2
from leakaudit.attacks.matching_objective import Objective
from leakaudit.budget import Budget
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.registry import attacks
from leakaudit.snapshot import Granted, Observation
from tests import tiny

TEXT = "birds saw the river"


def _ids(text: str) -> tuple[int, ...]:
    return tuple(tiny.bert_tokenizer()(text)["input_ids"])


def _seen(**granted: Any) -> Observation:
    model = tiny.bert(initializer_range=0.1)
    return tiny.observe([TEXT], [1], model=model, batch_size_bound=1).granting(Granted(**granted))


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("kind", [LampCos, LampL1L2])
def test_a_sentence_comes_back_in_order_without_granted_labels_or_lengths(kind: Any) -> None:
    """Every label is tried, the length is read off, and the guess proves itself."""
    attack = kind(steps=225, n_init=10, n_permutations=0, length_weight=0.01)
    guess = attack(_seen(), _rng(), Budget(600))
    assert [(g.token_ids, g.proved) for g in guess.sequences or ()] == [(_ids(TEXT), True)]
    assert guess.label_counts == (0, 1)
    assert guess.facts["rounds"] > 0


def test_the_fast_preset_mends_what_its_few_steps_left_over() -> None:
    """Without words to try, as few steps as here leave wrong words; with those of both candidates the guess proves itself."""
    seen = _seen(labels=(1,), lengths=(7,))
    knobs: dict[str, Any] = {"preset": "fast", "steps": 8, "length_weight": 0.01}
    mended, plain = (LampCos(words=words, **knobs)(seen, _rng(), Budget(600)) for words in (2, 0))
    assert [(g.token_ids, g.proved) for g in mended.sequences or ()] == [(_ids(TEXT), True)]
    assert [g.token_ids for g in plain.sequences or ()] != [_ids(TEXT)]


def test_only_a_cosine_is_taken_in_a_metric() -> None:
    """The fast preset has it with a cosine; an L1 distance refuses it."""
    assert LampCos(preset="fast").settings().whitened
    assert not LampL1L2(preset="fast").settings().whitened
    with pytest.raises(ValueError, match="whitened"):
        LampL1L2(whitened=True)
    with pytest.raises(ValueError, match="whitened"):
        Objective("l2", whitened=True)


@pytest.mark.parametrize(("discrete", "rounds"), [("alternate", 3), ("at-end", 1), ("never", None)])
def test_ablations_run_as_many_rounds_as_they_say(discrete: Any, rounds: int | None) -> None:
    """One round after every `round_every` steps; one at the end; none."""
    attack = LampCos(steps=9, n_init=1, n_permutations=0, round_every=3, round_draws=5, discrete=discrete, patience=0)
    guess = attack(_seen(labels=(1,), lengths=(7,)), _rng(), Budget(600))
    assert guess.facts.get("rounds") == rounds


def test_it_starts_from_what_exact_recovery_read_where_it_is_told_to() -> None:
    """Under noise nothing else tells the length; what was read exactly needs no step at all."""
    model = tiny.wide_bert()
    step = tiny.client_step(model, tiny.bert_tokenizer(), [TEXT], [1], batch_size_bound=1)
    seen = GaussianNoise(scale=1e-3)(step, step.observe(), _rng())
    assert not LampCos().applies(seen)
    attack = LampCos(start="span", steps=3, n_init=1, trial_steps=1)
    assert attack.applies(seen)
    guess = attack(seen, _rng(), Budget(600))
    assert [g.token_ids for g in guess.sequences or ()] == [_ids(TEXT)]
    assert guess.facts["lengths_from_evidence"] == 1.0


def test_drawing_places_anew_begins_another_descent_only_where_the_update_is_not_explained() -> None:
    """As often as it is allowed to, from the best so far."""
    knobs: dict[str, Any] = {"n_init": 1, "n_permutations": 0, "round_every": 2, "round_draws": 1, "redraw_steps": 2}
    guess = LampCos(steps=2, redraws=2, learning_rate=1e-9, **knobs)(
        _seen(labels=(1,), lengths=(7,)), _rng(), Budget(600)
    )
    assert (guess.facts["redrawn"], guess.facts["steps"]) == (2, 6)


def test_it_stops_when_no_token_changes_any_more() -> None:
    """With steps too small to change anything, after `patience` rounds."""
    attack = LampCos(
        steps=100,
        n_init=1,
        n_permutations=0,
        learning_rate=1e-12,
        round_every=2,
        round_draws=1,
        seats=False,
        patience=2,
    )
    guess = attack(_seen(labels=(1,), lengths=(7,)), _rng(), Budget(600))
    assert guess.stop == "converged"
    assert guess.facts["steps"] < 100


def test_a_knob_that_is_set_overrules_its_preset_and_the_others_stay() -> None:
    """As typed on the command line: `--attack-option lamp-cos.preset=fast --attack-option lamp-cos.steps=300`."""
    attack = attacks.create("lamp-cos", {"preset": "fast", "steps": "300"})
    assert attack.settings() == dataclasses.replace(LampCos.presets["fast"], steps=300)
    assert LampCos().settings() == PRESETS["paper"]


def test_the_papers_settings_are_the_papers() -> None:
    """LAMP, Sec. 5 and App. D."""
    paper, large = PRESETS["paper"], PRESETS["large"]
    assert (paper.steps, paper.n_init, paper.n_permutations, paper.round_every, paper.round_draws) == (
        2000,
        500,
        500,
        75,
        200,
    )
    assert (LampCos().length_weight, LampCos().prior_weight, paper.decay) == (1.0, 0.2, 0.89)
    assert (large.steps, large.round_every, large.linear, large.clip) == (5000, 200, True, 0.5)


def test_a_prior_by_name_takes_part() -> None:
    """The built-in one knows another tokenizer; the victim is no language model: both refusals say why."""
    for prior in ("ngram", "victim", "no-such-prior"):
        verdict = LampCos(prior=prior).applies(_seen())
        assert not verdict and verdict.reason


@pytest.mark.parametrize("knob", [{"steps": 0}, {"learning_rate": 0.0}, {"patience": -1}, {"alpha": -1.0}])
def test_knobs_that_leave_nothing_to_do_are_refused(knob: dict[str, Any]) -> None:
    """The message names the knob."""
    with pytest.raises(ValueError, match=next(iter(knob))):
        dataclasses.replace(LampL1L2(), **knob)
