"""GRAB: dropout masks as unknowns, beam search over tokens, guessed lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.algorithms.matching import hybrid_search as matching_hybrid
from leakaudit.algorithms.matching.batch_shape import equal_lengths, guess_shape
from leakaudit.algorithms.matching.descent import Descent, Run
from leakaudit.algorithms.matching.dropout_distance import distances_by_dropout
from leakaudit.algorithms.matching.dropout_masks import Drop, MaskLayout, dropping, masked_by
from leakaudit.algorithms.matching.hybrid_search import Beams, search_apart
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.attacks.grab import PRESETS, Grab
from leakaudit.client.facts import DeclaredDefense, Granted
from leakaudit.client.observation import Observation
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.laplace_noise import LaplaceNoise
from leakaudit.defenses.prune import Prune
from leakaudit.defenses.sign import Sign
from leakaudit.errors import AnatomyError
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from tests.support import tiny

TEXT = "birds saw the river"
TWO = ["a bird saw the river.", "the old dog chased a cat near the house."]
RATE = 0.2
TABLES = frozenset(f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))


def _model(dropout: float = RATE, **more: Any) -> nn.Module:
    return tiny.bert(initializer_range=0.1, dropout=dropout, **more)


def _ids(texts: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(tiny.bert_tokenizer()(text)["input_ids"]) for text in texts]


def _seen(texts: Sequence[str] = (TEXT,), *, granted: bool = True, model: nn.Module | None = None) -> Observation:
    """Return what is seen of a step with dropout on."""
    labels = [1, 0][: len(texts)]
    torch.manual_seed(0)  # of the client's masks
    step = tiny.client_step(model or _model(), tiny.bert_tokenizer(), list(texts), labels, training=True, frozen=TABLES)
    lengths = tuple(map(len, _ids(texts)))
    return step.observe().granting(Granted(labels=tuple(labels), lengths=lengths)) if granted else step.observe()


def _noted(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return logits of a pass with real dropout, and the masks that it drew."""
    masks = []

    def draw(number: int, given: Tensor, rate: float) -> Tensor:
        masks.append(functional.dropout(torch.ones_like(given), rate))
        return given * masks[-1]

    torch.manual_seed(0)
    with dropping(model, draw):
        return model(input_ids=ids).logits, masks


# ---------------------------------------------------------------------- masks


@pytest.mark.parametrize("make", [_model, tiny.gpt2_classifier], ids=["BERT", "GPT-2"])
def test_a_pass_with_the_masks_that_another_drew_is_that_pass(make: Any) -> None:
    """It holds for dropout modules and for attention's functional dropout.

    The model is in its old mode afterwards.
    """
    model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = RATE
    ids = torch.tensor([[5, 6, 7, 8], [8, 7, 6, 5]])
    logits, masks = _noted(model, ids)
    assert len(masks) >= 5
    with dropping(model, masked_by(masks)):
        again = model(input_ids=ids).logits
    torch.testing.assert_close(again, logits)
    assert not model.training and not torch.allclose(model(input_ids=ids).logits, logits)


def test_masks_lie_side_by_side_and_go_with_their_tokens() -> None:
    """Rows and columns of an attention mask alike; those of other sequences stay."""
    drops = (Drop(0.5, (3, 2), (0,)), Drop(0.5, (1, 3, 3), (1, 2)), Drop(0.5, (4,), ()))
    layout = MaskLayout({3: drops, 2: (Drop(0.5, (2, 2), (0,)),)}, [([1], 2), ([0, 2], 3)])
    assert layout.entries == 4 + 2 * (6 + 9 + 4)
    masks = torch.arange(float(layout.entries))[None]
    moved = layout.rearranged(masks, 2, (1, 2, 0))
    before, after = (layout.of(each, [0, 2]) for each in (masks, moved))
    torch.testing.assert_close(after[0][1], before[0][1][[1, 2, 0]])
    torch.testing.assert_close(after[1][1, 0], before[1][1, 0][[1, 2, 0]][:, [1, 2, 0]])
    torch.testing.assert_close(after[2], before[2])
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one[0], two[0])
    torch.testing.assert_close(layout.of(moved, [1])[0], layout.of(masks, [1])[0])
    torch.testing.assert_close(layout.of(masks, [1])[0][0], masks[0, :4].view(2, 2) / 0.5)
    torch.testing.assert_close(layout.rearranged(moved, 2, (2, 0, 1)), masks)


def test_masks_of_some_places_are_those_of_their_tokens_and_of_none() -> None:
    """Of attention a token's own row; in the order in which masks lie."""
    drops = (Drop(0.5, (3, 2), (0,)), Drop(0.5, (1, 3, 3), (1, 2)), Drop(0.5, (2,), ()))
    layout = MaskLayout({3: drops, 2: (Drop(0.5, (2, 2), (0,)),)}, [([1], 2), ([0, 2], 3)])
    chosen = layout.of_places([[0], [1], [0, 2]]).float()[None]
    (short,), (tokens, attention, rest) = (layout.of(chosen, rows) for rows in ([1], [0, 2]))
    assert (short[0] > 0).tolist() == [[False] * 2, [True] * 2]
    assert (tokens > 0).all(dim=2).tolist() == [[True, False, False], [True, False, True]]
    assert (attention[:, 0] > 0).all(dim=2).tolist() == [[True, False, False], [True, False, True]]
    assert bool((rest > 0).all()) and chosen.sum() == 2 + (3 * 2) + (3 * 3) + 2 * 2


def test_masks_of_opening_tokens_are_learned_and_those_of_words_stay_at_their_mean() -> None:
    """If they are known, the true words have less than half of the distance."""
    seen = _seen()
    lengths = seen.facts.granted.lengths or ()
    matcher = Matcher(
        seen, lengths, Objective("cosine"), Matching(dropout=True, mask_weight=0.1, mask_places="opening")
    )
    dummy = matcher.candidates.of_tokens(_batches([TEXT]), torch.zeros(1, 1, 2))
    still = Descent(100, 1e-9, mask_step=0.05)
    run = Run(matcher, still, dummy, tiny.generator(), optimise_labels=False)
    for _ in range(still.steps):
        run.step()
    assert matcher.gradients.masks is not None
    opening = matcher.gradients.masks.of_places([[0]])
    moved = (run.now.masks - dummy.masks)[0] != 0
    assert bool(opening.any()) and not bool(moved[~opening].any()) and float(moved[opening].float().mean()) > 0.7
    masks = [run.now.masks[0], dummy.masks[0]]
    learned, mean = (matcher.token_losses(_batches([TEXT]), torch.zeros(1, 2), one)[0] for one in masks)
    assert learned < 0.5 * mean
    assert float(matcher.masks.penalty(dummy.masks)) == pytest.approx(0.0, abs=1e-9)
    everything = Matcher(seen, lengths, Objective("cosine"), Matching(dropout=True, mask_weight=0.1))
    drawn = matcher.masks.drawn(1, tiny.generator())
    for one in (matcher, everything):  # masks as they are drawn cost the weight, however many are learned
        assert float(one.masks.penalty(drawn)) == pytest.approx(0.1, rel=0.2)


def test_where_nothing_stands_before_a_text_all_masks_are_learned() -> None:
    """A decoder's tokenizer adds none, and nothing is dropped that is of no token."""
    model = tiny.gpt2_classifier()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = RATE
    step = tiny.client_step(model, tiny.gpt2_tokenizer(), [TEXT], [0])
    lengths = tuple(map(len, step.truth.sequences()))
    seen = step.observe().granting(Granted(labels=(0,), lengths=lengths))
    matcher = Matcher(seen, lengths, Objective("cosine"), Matching(dropout=True, mask_places="opening"))
    assert matcher.gradients.masks is not None and bool(matcher.masks.learned.all())


def test_masks_at_their_mean_are_no_dropout() -> None:
    """So a search that learns nothing about them is the one without."""
    seen = _seen(TWO)
    lengths = seen.facts.granted.lengths or ()
    with_masks, without = (Matcher(seen, lengths, Objective(), Matching(dropout=dropout)) for dropout in (True, False))
    dummy = with_masks.candidates.random(2, tiny.generator())
    assert dummy.masks.shape[1] > 1000 and without.candidates.random(2, tiny.generator()).masks.shape == (2, 0)
    torch.testing.assert_close(
        with_masks.losses(dummy), without.losses(without.candidates.random(2, tiny.generator())), rtol=1e-4, atol=0.0
    )


def test_the_derivative_by_masks_is_its_finite_difference() -> None:
    """For sequences of two lengths, three candidates at once."""
    seen = _seen(TWO)
    seen.model.double()
    seen = dataclasses.replace(seen, update={name: update.double() for name, update in seen.update.items()})
    matcher = Matcher(seen, seen.facts.granted.lengths or (), Objective("cosine"), Matching(dropout=True))
    dummy = matcher.candidates.random(3, tiny.generator())
    dummy = type(dummy)(*(part.double() for part in dummy))
    dummy = dummy._replace(masks=torch.rand(dummy.masks.shape, generator=tiny.generator(1), dtype=torch.float64))
    _, slopes = matcher.losses_and_derivatives(dummy)
    direction = torch.randn(dummy.masks.shape, generator=tiny.generator(2), dtype=torch.float64)
    ahead, behind = (matcher.losses(dummy._replace(masks=dummy.masks + sign * 1e-5 * direction)) for sign in (1, -1))
    assert float((slopes.masks * direction).sum()) == pytest.approx(float((ahead - behind).sum()) / 2e-5, rel=1e-4)


def test_learning_recovers_a_known_mask() -> None:
    """Only the input's masks are unknown: dropped entries end below kept ones."""
    model = _model(dropout=0.0)
    dropout: Any = model.get_submodule("bert.embeddings.dropout")
    dropout.p = RATE
    kept: list[Tensor] = []
    handle = dropout.register_forward_hook(lambda _, given, made: kept.append((made != 0).float()))
    seen = _seen(model=model)
    handle.remove()
    matcher = Matcher(seen, seen.facts.granted.lengths or (), Objective("cosine"), Matching(dropout=True))
    dummy = matcher.candidates.of_tokens(_batches([TEXT]), torch.zeros(1, 1, 2))
    still = Descent(400, 1e-9, linear=True, mask_step=0.2)
    run = Run(matcher, still, dummy, tiny.generator(), optimise_labels=False)
    for _ in range(still.steps):
        run.step()
    learned, true = run.best.masks[0], kept[0].flatten()
    assert len(kept) == 1 and 0.1 < float((true == 0).float().mean()) < 0.3
    assert ((learned > 0.5) == (true > 0.5)).float().mean() > 0.97
    assert float(learned.min()) >= 0.0 and float(learned.max()) <= 1.0


def _batches(texts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    return [_ids(texts)]


# ---------------------------------------------------------------------- lengths


@pytest.mark.parametrize("dropout", [0.0, RATE])
def test_lengths_of_a_batch_are_read_off_its_update(dropout: float) -> None:
    """How many sequences, too."""
    model = tiny.wide_bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    step = tiny.client_step(model, tiny.bert_tokenizer(), TWO, [0, 1], training=dropout > 0, frozen=TABLES)
    shape = guess_shape(step.observe())
    assert shape.lengths == tuple(sorted(map(len, _ids(TWO)), reverse=True)) and shape.evidence == "ends"


# ---------------------------------------------------------------------- beams


def _beams(width: int) -> tuple[Matcher, Beams]:
    step = tiny.client_step(_model(0.0), tiny.bert_tokenizer(), [TEXT], [1], frozen=TABLES)
    seen = step.observe().granting(Granted(labels=(1,), lengths=(len(_ids([TEXT])[0]),)))
    matcher = Matcher(seen, seen.facts.granted.lengths or (), Objective("cosine"))
    return matcher, Beams(matcher, torch.zeros(1, 2), None, width)


def test_a_sweep_puts_every_token_of_the_sequence_everywhere_and_scores_none_twice() -> None:
    """Two exchanged words are put right over two positions.

    The beams keep a worse batch in between.
    """
    (true,) = _ids([TEXT])
    wrong = (true[0], true[2], true[1], *true[3:])
    matcher, beams = _beams(4)
    scored: list[Any] = []
    score = matcher.token_losses
    matcher.token_losses = lambda batches, *more: scored.extend(batches) or score(batches, *more)  # type: ignore[method-assign,func-returns-value]
    beams.offer([(wrong,)])
    assert beams.sweep(Budget(600))
    assert beams.best[0] == (true,) and matcher.explained_by(beams.best[1])
    assert len(scored) == len(set(scored)) == beams.scored
    assert all(sequence[0] == true[0] and sequence[-1] == true[-1] for (sequence,) in scored)


def test_a_sweep_without_budget_changes_nothing() -> None:
    """What is known is still there."""
    _, beams = _beams(2)
    (true,) = _ids([TEXT])
    beams.offer([((true[0], *true[1:-1][::-1], true[-1]),)])
    before = beams.best
    assert not beams.sweep(Budget(1e-9)) and beams.best == before


# ---------------------------------------------------------------------- the attack


def test_a_sentence_behind_dropout_comes_back_where_nothing_is_granted() -> None:
    """Word for word, with its label."""
    seen = _seen(granted=False, model=_model(0.05))
    guess = Grab(steps=100, n_init=10, labels="enumerate")(seen, tiny.generator(), Budget(600))
    assert [g.token_ids for g in guess.sequences or ()] == _ids([TEXT])
    assert guess.label_counts == (0, 1)
    assert guess.diagnostics["hybrid_rounds"] >= 1


def test_however_small_the_budget_there_is_a_guess() -> None:
    """Of the right length, and it says why it ended."""
    seen = _seen()
    guess = Grab(n_init=1)(seen, tiny.generator(), Budget(1e-9))
    assert [len(g.token_ids) for g in guess.sequences or ()] == list(seen.facts.granted.lengths or ())
    assert guess.stop == "budget"


def test_rounds_end_when_one_brings_nothing() -> None:
    """With steps too small to change anything, the second one."""
    guess = Grab(steps=2, n_init=1, learning_rate=1e-12, mask_step=0.0, sweeps=0, attempts=1)(
        _seen(), tiny.generator(), Budget(600)
    )
    assert (guess.stop, guess.diagnostics["hybrid_rounds"], guess.diagnostics["steps"]) == ("converged", 2, 4)


@pytest.mark.parametrize(("plausible", "attempts"), [(1e-6, 2), (1e6, 1)])
def test_a_search_begins_anew_while_its_end_is_farther_off_than_dropout_explains(
    monkeypatch: pytest.MonkeyPatch, plausible: float, attempts: int
) -> None:
    """As often as is allowed."""
    monkeypatch.setattr(matching_hybrid, "PLAUSIBLE", plausible)
    attack = Grab(steps=2, n_init=1, restarts=1, sweeps=0, hybrid_rounds=1, verdict_steps=0, attempts=2)
    facts = attack(_seen(), tiny.generator(), Budget(600)).diagnostics
    assert (facts["attempts"], facts["hybrid_rounds"], facts["steps"]) == (attempts, attempts, 2 * attempts)


def test_what_dropout_explains_is_the_distance_of_masks_that_are_not_learned() -> None:
    """None without dropout, none where every mask is known."""
    seen, still = _seen(), torch.zeros(1, 2)
    lengths = seen.facts.granted.lengths or ()
    (ids,) = _ids([TEXT])
    without = Matcher(seen, lengths, Objective("cosine"))
    assert distances_by_dropout(without, [ids], still, without.masks.full(1)[0], 3, tiny.generator()) == []
    found = {}
    for places in ("all", "opening"):
        matcher = Matcher(seen, lengths, Objective("cosine"), Matching(dropout=True, mask_places=places))
        found[places] = distances_by_dropout(matcher, [ids], still, matcher.masks.full(1)[0], 3, tiny.generator())
    assert max(found["all"]) < 1e-4
    assert len(found["opening"]) == 3 and min(found["opening"]) > 0.01 and max(found["opening"]) < 1.0


def test_an_attack_that_is_not_aware_takes_no_notice_of_a_declared_defence() -> None:
    """The paper's ablation: zeros of a pruned update count as zeros."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1], training=True, frozen=TABLES)
    pruned = Prune(share=0.5)(step, step.observe(), tiny.generator()).granting(Granted(labels=(1,), lengths=(7,)))
    assert [
        Matcher(pruned, (7,), Objective(), Matching(aware=aware, fill=False)).objective.masked
        for aware in (True, False)
    ] == [
        True,
        False,
    ]


PRINTED: list[tuple[str, str, Any]] = [
    ("n_init", "Sec. 5.1: n_e", 2000),
    ("n_permutations", "Sec. 5.1: n_p", 2000),
    ("steps", "Sec. 5.1: n_c", 2000),
    ("sweeps", "Sec. 5.1: n_d", 5),
    ("beams", "Sec. 5.1: n_b", 4),
    ("alpha", "Sec. 5.1: alpha_L1", 0.01),
    ("learning_rate", "Sec. 5.1: lambda, absolute", 0.01),
    ("label_step", "Algorithm 2, line 5: lambda", 0.01),
    ("decay", "Sec. 5.1: gamma, every 50 steps", 0.89),
    ("clip", "Sec. 5.1: nothing is clipped", 0.0),
    ("linear", "Sec. 5.1: decay every 50 steps instead", False),
    ("weight_decay", "Sec. 5.1: AdamW", 0.01),
    ("distance", "Eq. 1", "l2"),
    ("squared", "Eq. 1", False),
    ("length_weight", "Eq. 1: no regulariser", 0.0),
    ("mask_start", "Algorithm 1, line 1", "bernoulli"),
    ("mask_weight", "Algorithm 2: masks are clamped only", 0.0),
    ("mask_places", "Sec. 4.3: every dropout layer", "all"),
    ("restarts", "Algorithm 1, line 2: one start", 1),
    ("attempts", "Algorithm 1: one search", 1),
    ("keep_masks", "Algorithm 1: one Psi", True),
    ("seats", "not in the paper", False),
    ("verdict_steps", "not in the paper", 0),
    ("fill", "Sec. 5.5.2: entries are zeroed out", False),
    ("whitened", "not in the paper", False),
    ("start_norm", "Algorithm 1: the start is as drawn", 0.0),
    ("lowest_id", "Algorithm 2: the nearest of all tokens", 0),
    ("relative", "Sec. 5.1: lambda is absolute", False),
    ("start_scale", "Sec. 4.2: initialised as in LAMP, N(0, I)", 1.0),
    ("apart", "Algorithm 3, lines 3 to 7", True),
    ("patience", "Algorithm 2: every step is taken", 0),
    ("stop_early", "Sec. 5.1: only where the beam search does not improve on the steps", False),
    ("keep", "Algorithm 1, line 9", "last"),
    ("denoise", "not in the paper", False),
    ("noise_rescales", "Sec. 5.5.1: the magnitude of dummy gradients is adjusted", True),
]


@pytest.mark.parametrize(("knob", "place", "value"), PRINTED)
def test_the_paper_preset_holds_the_papers_constants(knob: str, place: str, value: Any) -> None:
    """GRAB, Sec. 5.1; what departs from it all the same is in the docstring."""
    assert getattr(Grab(preset="paper").settings(), knob) == value, place


def test_the_released_preset_starts_with_rows_as_long_as_words() -> None:
    """The published code scales every sample to the word table's mean norm.

    All else is as printed.
    """
    assert Grab(preset="released").settings() == dataclasses.replace(PRESETS["paper"], start_scale=0.0)
    seen = tiny.observe([TEXT], [1])
    matcher = Matcher(seen, (7,), Objective(), Matching(start_scale=0.0))
    rows = matcher.candidates.random(200, tiny.generator()).embeddings.norm(dim=3)
    assert float(rows.square().mean().sqrt()) == pytest.approx(float(matcher.table.norm(dim=1).mean()), rel=0.02)


def test_the_preset_for_large_models_clips_and_falls_linearly() -> None:
    """Sec. 5.4.1, Table 4: all other settings remain the same."""
    large = Grab(preset="large").settings()
    assert large == dataclasses.replace(PRESETS["paper"], clip=0.5, linear=True, decay=1.0)
    seen = tiny.observe([TEXT], [1], granted=Granted(labels=(1,), lengths=(7,)))
    knobs: dict[str, Any] = {
        "steps": 3,
        "n_init": 2,
        "n_permutations": 0,
        "sweeps": 0,
        "hybrid_rounds": 1,
        "masks": False,
    }
    (text,) = Grab(preset="large", **knobs)(seen, tiny.generator(), Budget(30)).sequences or ()
    assert len(text.token_ids) == 7


def test_every_knob_of_a_preset_is_in_the_papers_table() -> None:
    """A new knob has to say what the paper does."""
    assert {field.name for field in dataclasses.fields(PRESETS["paper"])} == {knob for knob, _, _ in PRINTED}
    plain = Grab(preset="paper")
    assert (plain.hybrid_rounds, plain.mask_step, plain.masks, plain.labels, plain.aware) == (
        5,
        0.01,
        True,
        "joint",
        True,
    )
    chosen = attacks.create("grab", {"preset": "paper", "beams": "2"}).settings()
    assert chosen == dataclasses.replace(PRESETS["paper"], beams=2)


def _noisy() -> Observation:
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1])
    return GaussianNoise(scale=0.5)(step, step.observe(), tiny.generator()).granting(Granted(labels=(1,), lengths=(7,)))


@pytest.mark.parametrize(
    ("rescales", "aware", "matched"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_norms_are_matched_under_declared_noise_where_the_paper_does(
    rescales: bool, aware: bool, matched: bool
) -> None:
    """Sec. 5.5.1; the noise is asked for, not a defence's name."""
    seen = _noisy()
    assert seen.noise_sigma > 0
    matcher = Matcher(seen, (7,), Objective("l2"), Matching(aware=aware, noise_rescales=rescales))
    assert matcher.objective.match_norm is matched


def test_noise_stays_in_the_update_without_denoising() -> None:
    """The paper knows of the noise and takes none of it out."""
    seen = _noisy()
    found = {
        denoise: Matcher(seen, (7,), Objective("l2"), Matching(denoise=denoise)).objective.sigma
        for denoise in (True, False)
    }
    assert found == {True: seen.noise_sigma, False: 0.0}


def test_beams_of_their_own_search_from_each_of_the_best_orders() -> None:
    """Algorithm 3: every start keeps its own words, and nothing is scored twice.

    The best of all starts is the result.
    """
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1])
    seen = step.observe().granting(Granted(labels=(1,), lengths=(7,)))
    ids = tuple(tiny.bert_tokenizer()(TEXT)["input_ids"])
    matcher = Matcher(seen, (7,), Objective())
    logits = torch.tensor([[-30.0, 30.0]])
    beams = Beams(matcher, logits, None, 2)
    swapped = (ids[0], ids[2], ids[1], *ids[3:])
    turned = (ids[0], *reversed(ids[1:-1]), ids[-1])
    beams.offer([(swapped,), (turned,)])
    start = beams.best[1]
    assert set(beams.words((swapped,))[0]) == set(ids[1:-1])
    search_apart(beams, 5, Budget(600))
    assert beams.best[0] == (ids,)
    assert beams.best[1] < start
    assert beams.scored == len(beams._losses)


def test_the_paper_preset_ends_where_the_beam_search_does_not_improve_on_the_steps() -> None:
    """Sec. 5.1, early stopping: not where the tokens explain the update."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1])
    seen = step.observe().granting(Granted(labels=(1,), lengths=(7,)))
    knobs: dict[str, Any] = {"n_init": 2, "n_permutations": 2, "sweeps": 1, "beams": 1}
    guess = Grab(preset="paper", steps=3, hybrid_rounds=4, learning_rate=1e-12, **knobs)(
        seen, tiny.generator(), Budget(600)
    )
    assert guess.diagnostics["steps"] == 3 * guess.diagnostics["hybrid_rounds"]
    assert guess.stop == ("converged" if guess.diagnostics["beamed"] < guess.diagnostics["hybrid_rounds"] else "done")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"hybrid_rounds": 0}, "hybrid_rounds must be at least 1"),
        ({"beams": 0}, "beams must be at least 1"),
        ({"words": -1}, "words must not be below 0"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"whitened": True, "distance": "l2"}, "whitened compares cosines of whole updates; got kind='l2'"),
    ],
)
def test_knobs_that_leave_nothing_to_do_are_refused(knobs: dict[str, Any], message: str) -> None:
    """With what was given."""
    with pytest.raises(ValueError, match=message):
        Grab(**knobs)


def test_lengths_follow_the_groups_that_run_together() -> None:
    """The layout asks for them in the order in which losses run them."""
    assert [list(rows) for rows, _ in equal_lengths((5, 3, 5))] == [[1], [0, 2]]


@pytest.mark.parametrize("defense", [Prune(share=0.8), Sign()], ids=["pruned", "signs"])
def test_a_damaged_update_is_not_taken_for_hundreds_of_sequences(defense: Any) -> None:
    """Zeros and signs make ranks of their own, with clear gaps behind them."""
    step = tiny.client_step(_model(0.0), tiny.bert_tokenizer(), TWO, [0, 1])
    damaged = defense(step, step.observe(), tiny.generator())
    assert len(guess_shape(damaged).lengths) <= 4


@pytest.mark.parametrize("noise", ["gaussian-noise", "laplace-noise", "dp-sgd", "of another protocol"])
def test_declared_noise_of_any_kind_tells_no_length(noise: str) -> None:
    """Every row of the position table is touched."""
    step = tiny.client_step(_model(0.0), tiny.bert_tokenizer(), [TEXT], [1])
    noisy = LaplaceNoise(scale=0.1)(step, step.observe(), tiny.generator())
    declared = noisy.facts.model_copy(update={"defenses": (DeclaredDefense(name=noise),)})
    with pytest.raises(AnatomyError, match="grant `lengths`"):
        guess_shape(dataclasses.replace(noisy, facts=declared))


def test_the_fast_preset_is_what_it_was_before_the_papers_knobs_were_knobs() -> None:
    """Figures of earlier versions stand."""
    fast = Grab().settings()
    assert (fast.relative, fast.label_step, fast.apart, fast.patience, fast.stop_early) == (True, None, False, 50, True)
    assert (fast.keep, fast.denoise, fast.noise_rescales) == ("best", True, False)
