"""Both variants of LAMP: sentences with their order, presets, ablations, priors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from leakaudit.algorithms.matching.lamp import PRESETS
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.attacks.dlg import Dlg
from leakaudit.attacks.lamp_cos import LampCos
from leakaudit.attacks.lamp_l1l2 import LampL1L2
from leakaudit.attacks.tag import Tag
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from tests.support import tiny

TEXT = "birds saw the river"


def _seen(**granted: Any) -> Observation:
    model = tiny.bert(initializer_range=0.1)
    return tiny.observe([TEXT], [1], model=model, batch_size_bound=1).granting(Granted(**granted))


@pytest.mark.parametrize("kind", [LampCos, LampL1L2])
def test_a_sentence_comes_back_in_order_without_granted_labels_or_lengths(kind: Any) -> None:
    """Every label is tried, the length is read off, and the guess proves itself."""
    attack = kind(steps=225, n_init=10, n_permutations=0, length_weight=0.01)
    guess = attack(_seen(), tiny.generator(), Budget(600))
    assert [(g.token_ids, g.proved) for g in guess.sequences or ()] == [(tiny.ids_of(TEXT), True)]
    assert guess.label_counts == (0, 1)
    assert guess.diagnostics["rounds"] > 0


def test_the_fast_preset_refines_the_result_of_its_few_steps() -> None:
    """A few steps leave wrong words; with the words of both candidates it proves."""
    seen = _seen(labels=(1,), lengths=(7,))
    knobs: dict[str, Any] = {"preset": "fast", "steps": 8, "length_weight": 0.01}
    refined, plain = (LampCos(words=words, **knobs)(seen, tiny.generator(), Budget(600)) for words in (2, 0))
    assert [(g.token_ids, g.proved) for g in refined.sequences or ()] == [(tiny.ids_of(TEXT), True)]
    assert [g.token_ids for g in plain.sequences or ()] != [tiny.ids_of(TEXT)]


def test_only_a_cosine_is_taken_in_a_metric() -> None:
    """The fast preset has it with a cosine; an L1 distance refuses it."""
    assert LampCos(preset="fast").settings().whitened
    assert not LampL1L2(preset="fast").settings().whitened
    with pytest.raises(ValueError, match="whitened"):
        LampL1L2(whitened=True)
    with pytest.raises(ValueError, match="whitened"):
        Objective("l2", whitened=True)


@pytest.mark.parametrize(("discrete", "rounds"), [("alternate", 3), ("at-end", 3), ("never", None)])
def test_ablations_run_as_many_rounds_as_they_say(discrete: Any, rounds: int | None) -> None:
    """One round after every `round_every` steps; as many at the end; none."""
    attack = LampCos(steps=9, n_init=1, n_permutations=0, round_every=3, round_draws=5, discrete=discrete, patience=0)
    guess = attack(_seen(labels=(1,), lengths=(7,)), tiny.generator(), Budget(600))
    assert guess.diagnostics.get("rounds") == rounds


def test_it_starts_from_what_exact_recovery_read_where_it_is_told_to() -> None:
    """Under noise nothing else gives the length; an exact start needs no step."""
    model = tiny.wide_bert()
    step = tiny.client_step(model, tiny.bert_tokenizer(), [TEXT], [1], batch_size_bound=1)
    seen = GaussianNoise(scale=1e-3)(step, step.observe(), tiny.generator())
    assert not LampCos().applies(seen)
    attack = LampCos(start="span", steps=3, n_init=1, trial_steps=1)
    assert attack.applies(seen)
    guess = attack(seen, tiny.generator(), Budget(600))
    assert [g.token_ids for g in guess.sequences or ()] == [tiny.ids_of(TEXT)]
    assert guess.diagnostics["lengths_from_evidence"] == 1.0


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
    guess = attack(_seen(labels=(1,), lengths=(7,)), tiny.generator(), Budget(600))
    assert guess.stop == "converged"
    assert guess.diagnostics["steps"] < 100


def test_an_option_that_is_set_overrides_its_preset_and_the_others_stay() -> None:
    """The options are typed as on the command line.

    As in `--attack-option lamp-cos.preset=fast --attack-option lamp-cos.steps=300`.
    """
    attack = attacks.create("lamp-cos", {"preset": "fast", "steps": "300"})
    assert attack.settings() == dataclasses.replace(LampCos.presets["fast"], steps=300)
    assert LampCos().settings() == PRESETS["improved"]


PRINTED: list[tuple[str, str, Any]] = [
    ("bag", "App. A.1: the word embedding is frozen", False),
    ("steps", "Sec. 5: stop once we reach a total of 2000 continuous steps", 2000),
    ("round_every", "Sec. 5: n_c", 75),
    ("round_draws", "Sec. 5: n_d", 200),
    ("n_init", "Sec. 5: random samples; App. D: n_init", 500),
    ("n_permutations", "Sec. 5: permutations on the best initialization", 500),
    ("learning_rate", "App. D: lambda, absolute", 0.01),
    ("decay", "App. D: gamma, every 50 steps", 0.89),
    ("linear", "Sec. 5: BERT-large only", False),
    ("weight_decay", "Sec. 5: Adam", 0.0),
    ("clip", "App. D: BERT-large only", 0.0),
    ("relative", "App. D: lambda is absolute", False),
    ("start_scale", "Algorithm 1, line 1: N(0, I); Sec. 5: a standard Gaussian", 1.0),
    ("prior", "Sec. 4.3: a language model such as GPT-2; ours stands in", "ngram"),
    ("start_norm", "Sec. 4.2: the regulariser pulls to the mean row of the word embedding", 0.0),
    ("orders_after", "Algorithm 1, line 3: from the first iteration on", 0.0),
    ("lowest_id", "Algorithm 1, line 20: the nearest of all tokens", 0),
    ("squared", "Sec. 4.2: the L2 norm in L_tag", False),
    ("words", "Algorithm 1, line 20: the nearest token", 0),
    ("restarts", "Algorithm 1, line 2: one start", 1),
    ("whitened", "not in the paper", False),
    ("seats", "not in the paper", False),
    ("patience", "Algorithm 1: every iteration is taken", 0),
    ("stop_early", "Algorithm 1: every iteration is taken", False),
    ("keep", "Algorithm 1, lines 18 to 20: the last candidate", "last"),
    ("aware", "Sec. 5: the attack under defences is the same", False),
]

WEIGHTS: list[tuple[Any, str, str, float]] = [
    (LampCos, "length_weight", "App. D: alpha_reg", 1.0),
    (LampCos, "prior_weight", "App. D: alpha_lm", 0.2),
    (LampL1L2, "length_weight", "App. D: alpha_reg", 25.0),
    (LampL1L2, "prior_weight", "App. D: alpha_lm", 60.0),
]

RELEASED: list[tuple[str, str, Any]] = [
    ("start_norm", "args_factory.py: --init_size; init.py rescales rows, attack.py regularises to it", 1.4),
    ("squared", "utilities.py: square().sum() in the losses dlg and tag", True),
    ("keep", "attack.py: the x of the lowest total loss of all steps, which has no prior", "best-step"),
    ("orders_after", "args_factory.py: --swap_burnin", 0.1),
    ("lowest_id", "attack.py: ids 1 to 99 and 104 to 998 are never decoded", 999),
]

LARGE: list[tuple[str, str, Any]] = [
    ("steps", "Sec. 5: 5000 continuous steps", 5000),
    ("round_every", "Sec. 5: n_c", 200),
    ("learning_rate", "App. D: lambda", 0.01),
    ("decay", "Sec. 5: linear schedule instead", 1.0),
    ("linear", "Sec. 5: linear learning rate decay", True),
    ("clip", "App. D: 0.5 for both variants", 0.5),
]


@pytest.mark.parametrize("kind", [LampCos, LampL1L2])
@pytest.mark.parametrize(("knob", "place", "value"), PRINTED)
def test_the_paper_preset_holds_the_papers_constants(kind: Any, knob: str, place: str, value: Any) -> None:
    """LAMP for BERT-base; the place says where the paper gives it."""
    assert getattr(kind(preset="paper").settings(), knob) == value, place


@pytest.mark.parametrize(("kind", "knob", "place", "value"), WEIGHTS)
def test_each_variant_has_the_papers_weights(kind: Any, knob: str, place: str, value: float) -> None:
    """For BERT-base and BERT-large alike."""
    for preset in ("paper", "released", "large"):
        assert getattr(kind(preset=preset).settings(), knob) == value, place


@pytest.mark.parametrize(("knob", "place", "value"), RELEASED)
def test_the_released_preset_holds_the_constants_of_the_published_code(knob: str, place: str, value: Any) -> None:
    """What is not in this table is as printed.

    lamp_cos.sh and lamp_l1l2.sh give the same numbers.
    """
    assert getattr(LampCos(preset="released").settings(), knob) == value, place
    same = {name: getattr(PRESETS["paper"], name) for name, _, _ in RELEASED}
    assert dataclasses.replace(PRESETS["released"], **same) == PRESETS["paper"]


@pytest.mark.parametrize(("after", "rounds"), [(0.0, 3), (0.5, 2), (0.7, 1), (1.0, 1)])
def test_orders_are_tried_after_the_share_of_steps_that_is_asked_for(after: float, rounds: int) -> None:
    """Of the rounds after 3, 6 and 9 of 9 steps, the later ones are left."""
    attack = LampCos(
        steps=9,
        n_init=1,
        n_permutations=0,
        round_every=3,
        round_draws=2,
        patience=0,
        orders_after=after,
        stop_early=False,
        words=0,
    )
    guess = attack(_seen(labels=(1,), lengths=(7,)), tiny.generator(), Budget(600))
    assert guess.diagnostics["rounds"] == rounds


@pytest.mark.parametrize("kind", [LampCos, LampL1L2, Dlg, Tag])
def test_the_released_preset_says_where_its_lowest_id_belongs(kind: Any) -> None:
    """A vocabulary without unused tokens would lose its words.

    With lowest_id=0 the attack runs on any.
    """
    knobs: dict[str, Any] = {"prior": "none"} if kind in (LampCos, LampL1L2) else {}
    seen = _seen(labels=(1,), lengths=(7,))
    refused = kind(preset="released", **knobs).applies(seen)
    assert not refused and "lowest_id=0" in refused.reason
    open_to_all = kind(preset="released", lowest_id=0, steps=3, n_init=2, n_permutations=1, **knobs)
    assert open_to_all.applies(seen)
    guess = open_to_all(seen, tiny.generator(), Budget(600))
    assert [len(each.token_ids) for each in guess.sequences or ()] == [7]


@pytest.mark.parametrize(("knob", "place", "value"), LARGE)
def test_the_large_preset_holds_the_papers_recipe_for_bert_large(knob: str, place: str, value: Any) -> None:
    """What is not in this table is as for BERT-base."""
    assert getattr(LampCos(preset="large").settings(), knob) == value, place
    same = {name: getattr(PRESETS["paper"], name) for name, _, _ in LARGE} | {"weight_decay": 0.0}
    assert dataclasses.replace(PRESETS["large"], **same) == PRESETS["paper"]


def test_every_knob_of_a_preset_is_in_the_papers_table_or_decides_nothing_there() -> None:
    """A new knob has to say what the paper does."""
    without_effect = {
        "trial_steps",
        "next_tokens",
    }  # of one start; of a language model, which the paper does not attack
    weights = {knob for _, knob, _, _ in WEIGHTS}
    named = {knob for knob, _, _ in PRINTED}
    assert {field.name for field in dataclasses.fields(PRESETS["paper"])} == named | weights | without_effect
    plain = LampCos(preset="paper")
    assert (plain.discrete, plain.per, plain.labels, plain.start, plain.exposure) == (
        *("alternate", "parameter", "enumerate", "none"),
        "*",
    )
    assert LampL1L2(preset="paper").alpha == 0.01  # App. D: alpha_tag


@pytest.mark.parametrize("kind", [LampCos, LampL1L2])
def test_the_paper_preset_takes_every_step_and_every_round(kind: Any) -> None:
    """It starts from N(0, I), never stops early, and ends with the last candidate.

    So it does even if the tokens explain the update at once.
    """
    knobs: dict[str, Any] = {
        "steps": 7,
        "n_init": 1,
        "n_permutations": 0,
        "round_every": 3,
        "round_draws": 2,
        "prior": "none",
    }
    seen = _seen(labels=(1,), lengths=(7,))
    attack = kind(preset="paper", learning_rate=1e-12, **knobs)
    guess = attack(seen, tiny.generator(), Budget(600))
    assert (guess.stop, guess.diagnostics["steps"], guess.diagnostics["rounds"], guess.diagnostics["seated"]) == (
        "done",
        7,
        3,
        0,
    )
    recipe = attack.recipe(seen, Objective())
    matcher = Matcher(seen, (7,), Objective(), Matching(relative=recipe.relative, start_scale=recipe.start_scale))
    start = matcher.candidates.random(200, tiny.generator()).embeddings
    assert matcher.unit == 1.0
    assert float(start.std()) == pytest.approx(1.0, abs=0.02)


def test_the_paper_preset_uses_no_declared_defence() -> None:
    """LAMP is not told of noise; the presets of our own are."""
    seen = _seen()
    assert LampCos(preset="paper", prior="none").recipe(seen, Objective("cosine")).aware is False
    assert LampCos().recipe(seen, Objective("cosine")).aware is True
    assert LampCos(aware=False).recipe(seen, Objective("cosine")).aware is False


def test_the_paper_preset_needs_a_prior_and_says_so() -> None:
    """The built-in prior replaces GPT-2 where the tokens are its own.

    Elsewhere the refusal says what to give; `none` is allowed.
    """
    refused = LampCos(preset="paper").applies(_seen())
    assert not refused
    assert "prior=" in str(refused.reason) and "preset=paper" in str(refused.reason)
    assert LampCos(preset="paper", prior="none").applies(_seen())
    assert LampCos(preset="paper").stands_in and not LampCos(preset="paper", prior="none").stands_in
    assert not LampCos().stands_in and not LampCos(preset="paper", prior="ngram").stands_in
    assert LampCos(preset="paper").prior_facts == {"prior_stand_in": 1.0}
    assert attacks.create("lamp-cos", {"preset": "paper", "prior": "none"}).settings().prior == ""


def test_a_distance_without_squares_is_the_papers() -> None:
    """L_tag as printed is the sum of norms; its derivative lowers it."""
    seen = _seen(labels=(1,), lengths=(7,))
    plain, squared = (Matcher(seen, (7,), Objective("l2", l1=0.01, squared=each)) for each in (False, True))
    dummy = plain.candidates.random(1, tiny.generator())
    pairs = plain.gradients.pairs(plain.known.placed(dummy), differentiable=False)
    formed = plain.gradients.formed(pairs, 0)
    apart = [seen.update[name] - gradient for name, gradient in formed.items()]
    l1 = 0.01 * sum(float(each.abs().sum()) for each in apart)
    assert float(plain.losses(dummy)) == pytest.approx(sum(float(each.norm()) for each in apart) + l1, rel=1e-4)
    assert float(squared.losses(dummy)) == pytest.approx(
        sum(float(each.square().sum()) for each in apart) + l1, rel=1e-4
    )
    loss, slope = plain.losses_and_derivatives(dummy)
    moved = dummy._replace(embeddings=dummy.embeddings - 1e-3 * slope.embeddings / slope.embeddings.norm())
    fall = 1e-3 * float(slope.embeddings.norm())
    assert float(loss - plain.losses(moved)) == pytest.approx(fall, rel=0.1)


def test_a_prior_by_name_takes_part() -> None:
    """Refusals name the reason: another tokenizer, or a victim of another kind."""
    for prior in ("ngram", "victim", "no-such-prior"):
        verdict = LampCos(prior=prior).applies(_seen())
        assert not verdict and verdict.reason


@pytest.mark.parametrize("knob", [{"steps": 0}, {"learning_rate": 0.0}, {"patience": -1}, {"alpha": -1.0}])
def test_knobs_that_leave_nothing_to_do_are_refused(knob: dict[str, Any]) -> None:
    """The message names the knob."""
    with pytest.raises(ValueError, match=next(iter(knob))):
        dataclasses.replace(LampL1L2(), **knob)


def test_the_default_is_what_it_was_before_it_had_a_preset_of_its_own() -> None:
    """The default has the paper's steps and rounds with our additions."""
    old: dict[str, Any] = {
        "learning_rate": 0.2,
        "relative": True,
        "start_scale": 0.0,
        "prior": "",
        "squared": True,
        "seats": True,
        "patience": 3,
    }
    ours: dict[str, Any] = {
        "stop_early": True,
        "keep": "best",
        "aware": True,
        "length_weight": 1.0,
        "prior_weight": 0.2,
        "next_tokens": "similar",
        "bag": True,
    }
    for kind in (LampCos, LampL1L2):
        assert kind().settings() == dataclasses.replace(PRESETS["paper"], **old, **ours)
