"""What every attack, defence, metric and prior promises, checked for all that are registered."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from leakaudit.client.observation import Observation
from leakaudit.models.vocabulary import Vocabulary, vocabulary_of
from leakaudit.plugins.attack_protocol import Attack, Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.plugins.metric_protocol import LabelCounts, Pair
from leakaudit.plugins.prior_loading import load_prior
from leakaudit.plugins.prior_protocol import Prior, Scorer
from leakaudit.priors.ngram import build_ngram, write_ngram
from leakaudit.registry import attacks, defenses, metrics, priors
from tests.support import tiny

TEXT = "the old dog chased a cat."

UNDEFINED_WITHOUT_A_GUESS = {"token_precision"}
"""Metrics of what was guessed: where nothing was, they are missing and not zero."""

NEEDS_A_GRANT = {"gradient-mixture", "llg-plus", "pooler-features"}
"""Attacks that apply nowhere without a file that the threat model grants, or an active server; their own tests hold them to this file's promises."""


def _classifier() -> Observation:
    return tiny.observe([TEXT], [1], model=tiny.bert(num_labels=3), batch_size_bound=1)


def _language_model() -> Observation:
    return tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm").observe()


OBSERVATIONS: dict[str, Callable[[], Observation]] = {"classifier": _classifier, "language model": _language_model}


def _cases() -> Iterator[Any]:
    """Yield (attack class, maker of an observation it applies to)."""
    for name, kind in attacks:
        for what, make in OBSERVATIONS.items():
            if kind().applies(make()):
                yield pytest.param(kind, make, id=f"{name} on a {what}")


def _ticking(checks: int) -> Budget:
    """Return a budget that is used up after so many looks at the clock, so that time plays no part in a test."""
    ticks = count()
    return Budget(checks, clock=lambda: float(next(ticks)))


def _state(model: torch.nn.Module) -> dict[str, Any]:
    """Return everything about a model that an attack must not change."""
    return {
        "flags": [(n, p.requires_grad, p.grad is None) for n, p in model.named_parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "values": {n: t.clone() for n, t in model.state_dict().items()},
    }


def _same_state(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(one[key] == two[key] for key in ("flags", "modes", "hooks")) and all(
        torch.equal(one["values"][name], two["values"][name]) for name in one["values"]
    )


def _can_be_shown(plugin: Any) -> None:
    """Hold a plugin to a label without full stop and a meaning that is a sentence, both its own."""
    assert plugin.label and len(plugin.label) <= 30 and not plugin.label.endswith(".")
    assert plugin.meaning[0].isupper() and plugin.meaning.endswith(".")
    assert {"label", "meaning"} <= vars(plugin).keys()


@pytest.mark.parametrize(("name", "attack"), list(attacks))
def test_an_attack_is_a_frozen_dataclass_that_says_what_it_is(name: str, attack: Any) -> None:
    """Goal, source and threat model are printed with every score."""
    assert attack.__dataclass_params__.frozen
    assert isinstance(attack(), Attack)
    assert attack.goal in get_args(get_type_hints(Attack)["goal"].__args__[0])
    assert attack.source and attack.threat_model and attack.__doc__
    _can_be_shown(attack)
    assert getattr(attack, "needs", "everything") in ("everything", "named parts")


@pytest.mark.parametrize(("name", "attack"), list(attacks))
def test_an_attack_cannot_be_handed_the_truth(name: str, attack: Any) -> None:
    """It takes an observation, a generator and a budget, and nothing else."""
    hints = {key: kind.__name__ for key, kind in get_type_hints(attack.__call__).items()}
    assert hints == {"seen": "Observation", "rng": "Generator", "budget": "Budget", "return": "Reconstruction"}
    assert list(inspect.signature(attack.__call__).parameters) == ["self", "seen", "rng", "budget"]
    assert list(inspect.signature(attack.applies).parameters) == ["self", "seen"]


@pytest.mark.parametrize(("name", "attack"), list(attacks))
def test_an_attack_applies_somewhere_and_explains_itself_where_it_does_not(name: str, attack: Any) -> None:
    """A refusal is a sentence, and leaves the model as it was."""
    verdicts = []
    for make in OBSERVATIONS.values():
        seen = make()
        before = _state(seen.model)
        verdicts.append(attack().applies(seen))
        assert _same_state(before, _state(seen.model))
    assert any(verdicts) or name in NEEDS_A_GRANT
    assert all(verdict.reason for verdict in verdicts if not verdict)


@pytest.mark.parametrize(("attack", "make"), list(_cases()))
def test_the_same_seed_gives_the_same_guess(attack: Any, make: Callable[[], Observation]) -> None:
    """Randomness comes from the generator only, and time plays no part in it."""
    torch.manual_seed(1)
    one = attack()(make(), torch.Generator().manual_seed(7), _ticking(25))
    torch.manual_seed(2)
    assert attack()(make(), torch.Generator().manual_seed(7), _ticking(25)) == one


@pytest.mark.parametrize(("attack", "make"), list(_cases()))
def test_an_attack_leaves_everything_as_it_was(attack: Any, make: Callable[[], Observation]) -> None:
    """The update, the weights, `requires_grad`, gradients, training flags, hooks and the global random state."""
    seen = make()
    update, before, state = seen.digest(), _state(seen.model), torch.get_rng_state()
    attack()(seen, torch.Generator().manual_seed(0), _ticking(15))
    assert seen.digest() == update
    assert _same_state(before, _state(seen.model))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("attack", "make"), list(_cases()))
def test_a_budget_that_is_used_up_at_once_gives_a_guess_all_the_same(
    attack: Any, make: Callable[[], Observation]
) -> None:
    """Either the attack says `budget`, or it needed none."""
    guess = attack()(make(), torch.Generator().manual_seed(0), _ticking(1))
    assert isinstance(guess, Reconstruction)
    assert guess.stop in ("budget", "done", "converged")
    assert all(math.isfinite(value) for value in guess.diagnostics.values())


@pytest.mark.parametrize(("attack", "make"), list(_cases()))
def test_a_guess_is_what_the_goal_says(attack: Any, make: Callable[[], Observation]) -> None:
    """Text attacks return sequences, word attacks a bag, label attacks counts; confidences are fractions."""
    seen = make()
    guess = attack()(seen, torch.Generator().manual_seed(0), _ticking(15))
    field = {"text": "sequences", "words": "tokens", "labels": "label_counts"}[attack.goal]
    assert getattr(guess, field) is not None
    ids = {token for sequence in guess.sequences or () for token in sequence.token_ids} | set(guess.tokens or ())
    assert all(0 <= token < seen.facts.vocabulary.size for token in ids)
    assert all(0 <= sequence.confidence <= 1 for sequence in guess.sequences or ())


@pytest.mark.parametrize(("attack", "make"), list(_cases()))
def test_what_an_attack_is_asked_about_its_reach_leaves_no_trace(attack: Any, make: Callable[[], Observation]) -> None:
    """The battery asks with the truth: the model stays as it was, and the same attack guesses the same afterwards."""
    seen, one = make(), attack()
    before = _state(seen.model)
    guess = one(seen, torch.Generator().manual_seed(7), _ticking(25))
    if guess.reach is None:
        pytest.skip("the attack does not say what it could have reached")
    ids = tuple(tiny.bert_tokenizer()(TEXT)["input_ids"])
    questions = [ids, ids[:3], (*ids, *ids), ids[::-1]]
    answers = [(guess.reach.tokens(question), guess.reach.passes(question)) for question in questions]
    assert [len(tokens) for tokens, _ in answers] == [len(question) for question in questions]
    assert [(guess.reach.tokens(question), guess.reach.passes(question)) for question in questions] == answers
    assert _same_state(before, _state(seen.model))
    assert one(seen, torch.Generator().manual_seed(7), _ticking(25)) == guess


@pytest.mark.parametrize(("name", "defense"), list(defenses))
def test_a_defense_is_a_frozen_dataclass_that_says_what_it_is(name: str, defense: Any) -> None:
    """Source, protection and cost stand in the report."""
    assert defense.__dataclass_params__.frozen
    assert isinstance(defense(), Defense)
    assert defense.source and defense.protects and defense.cost and defense.__doc__
    _can_be_shown(defense)


@pytest.mark.parametrize(("name", "defense"), list(defenses))
def test_a_defense_of_no_strength_is_the_identity(name: str, defense: Any) -> None:
    """Otherwise the matrix would compare two undefended runs that differ."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    seen = step.observe()
    zero = defense(**defense.identity)
    same = zero(step, seen, torch.Generator().manual_seed(0))
    assert zero.is_identity()
    assert same.digest() == seen.digest()
    assert same.facts == seen.facts


@pytest.mark.parametrize(("name", "defense"), list(defenses))
def test_a_defense_leaves_its_inputs_alone_and_declares_itself(name: str, defense: Any) -> None:
    """Nothing in place; an attack finds name and parameters in the public facts."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    seen = step.observe()
    digest, before, knobs = seen.digest(), _state(seen.model), dict(defense().declared().parameters)
    defended = defense()(step, seen, torch.Generator().manual_seed(0))
    assert seen.digest() == digest
    assert _same_state(before, _state(seen.model))
    if not defense().is_identity():
        declared = defended.facts.defenses[-1]
        assert declared.name == name and knobs.items() <= declared.parameters.items()
        assert defended.digest() != digest
    assert set(defended.facts.shared) == set(defended.update)


def _pair(guess: tuple[int, ...], text: str) -> Pair:
    return Pair((5, 6, 7), guess, "old dog ran", text, masked_ids=(5, 7))


@pytest.mark.parametrize(("name", "metric"), list(metrics))
def test_a_metric_scores_the_perfect_guess_best_and_the_empty_one_worst(name: str, metric: Any) -> None:
    """All numbers are fractions, so that intervals and rules need no units."""
    outcomes: list[Any] = [_pair((5, 6, 7), "old dog ran"), _pair((7, 5), "ran old"), _pair((), "")]
    if metric.level == "step":
        outcomes = [LabelCounts((2, 1), guess) for guess in ((2, 1), (1, 2), (0, 0))]
    perfect, partial, empty = (metric()(outcome) for outcome in outcomes)
    assert 0 <= partial <= perfect == 1.0
    assert metric.higher_is_better
    assert empty == 0.0 or (empty is None and name in UNDEFINED_WITHOUT_A_GUESS)


@pytest.mark.parametrize(("name", "metric"), list(metrics))
def test_a_metric_is_a_frozen_dataclass_that_says_what_it_is(name: str, metric: Any) -> None:
    """Level and direction are read by the report, never written down a second time."""
    assert metric.__dataclass_params__.frozen
    assert metric.level in ("sequence", "step")
    assert metric.source and metric.__doc__
    _can_be_shown(metric)


@pytest.mark.parametrize(("name", "prior"), list(priors))
def test_a_prior_is_a_frozen_dataclass_that_says_what_it_is(name: str, prior: Any) -> None:
    """What an attacker must have for it stands beside every score that was reached with it."""
    assert prior.__dataclass_params__.frozen
    assert isinstance(prior(), Prior)
    assert prior.source and prior.knows and prior.__doc__


@pytest.mark.parametrize(("name", "prior"), list(priors))
def test_a_prior_cannot_be_handed_an_update_or_the_truth(name: str, prior: Any) -> None:
    """It takes the vocabulary and the public model, and nothing else."""
    hints = get_type_hints(prior.load)
    assert hints.keys() == {"vocabulary", "victim", "return"}
    assert hints["vocabulary"] is Vocabulary and hints["victim"] == torch.nn.Module | None


@pytest.mark.parametrize(("name", "prior"), list(priors))
def test_a_prior_scores_many_sequences_as_it_scores_one(name: str, prior: Any, tmp_path: Path) -> None:
    """In their order, without a trace in the victim or in the global random state."""
    victim, tokenizer = tiny.gpt2_lm(), tiny.gpt2_tokenizer()
    vocabulary = vocabulary_of(tokenizer, victim)
    tokenizer.save_pretrained(tmp_path / "lm")
    victim.save_pretrained(tmp_path / "lm")  # type: ignore[operator]
    write_ngram(tmp_path / "ngram", build_ngram([TEXT], tokenizer, 3), tokenizer)
    path = {"causal-lm": tmp_path / "lm", "ngram": tmp_path / "ngram"}.get(name)
    before, state = _state(victim), torch.get_rng_state()
    scorer = load_prior(name if path is None else str(path), vocabulary=vocabulary, victim=victim)
    assert isinstance(scorer, Scorer)
    sequences: list[list[int]] = [[*tokenizer(TEXT)["input_ids"]], [7], [9, 8, 7], []]
    values = scorer.nll(sequences)
    assert values == pytest.approx([scorer.nll([sequence])[0] for sequence in sequences], rel=1e-4)
    assert scorer.nll(sequences) == values and all(value > 0 and math.isfinite(value) for value in values)
    following = scorer.next_token_nll([[7], [9, 8]])
    assert following is None or following.shape == (2, vocabulary.size)
    assert _same_state(before, _state(victim))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_plugins_of_the_first_audit_are_there() -> None:
    """A forgotten import line in a folder's `__init__` would make a plugin silently vanish."""
    assert {"embedding-rows", "idlg", "llg", "tag"} <= set(attacks.names())
    assert {"none", "gaussian-noise", "freeze-embeddings", "prune"} <= set(defenses.names())
    assert {"rouge1", "rouge2", "rougeL", "exact", "token_recall", "label_accuracy"} <= set(metrics.names())
