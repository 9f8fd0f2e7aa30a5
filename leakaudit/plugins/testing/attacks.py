"""Checks of what every attack promises."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, get_args, get_type_hints

import torch

from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import Attack, Goal, Needs, Reads, Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing.promises import ModelState, can_be_shown, describes_itself, instance, promise
from leakaudit.plugins.testing.steps import classifier_step, language_model_step

Makers = Mapping[str, Callable[[], Observation]]
"""Description of an observation -> function that makes a new one at each call."""

OBSERVATIONS: Makers = {
    "a classifier": lambda: classifier_step().observe(),
    "a language model": lambda: language_model_step().observe(),
}
"""Steps on one sentence each, in eval mode, without a defence."""

FIELDS = {"text": "sequences", "words": "tokens", "labels": "label_counts"}
"""Goal -> the field of a reconstruction that an attack with this goal fills."""


def check_attack(attack: Any, observations: Makers = OBSERVATIONS) -> None:
    """Check an attack against what every attack promises.

    Args:
        attack: the class, or an instance if a knob has to be set.
        observations: observations to try the attack on. It has to apply to at least one of them. For an attack that needs a grant or an
            active server, give observations that have these.

    Raises:
        AssertionError: a promise is broken. The message says what was asked and what was found.
    """
    attack = instance(attack)
    _says_what_it_is(attack)
    _cannot_be_handed_the_truth(attack)
    applicable = list(_applicable(attack, observations))
    reasons = "; ".join(attack.applies(make()).reason for make in observations.values())
    promise(applicable, attack, f"an attack applies to one of: {', '.join(observations)}", f"only refusals: {reasons}")
    for what, make in applicable:
        _repeats_itself(attack, what, make)
        _leaves_everything_as_it_was(attack, what, make)
        _keeps_to_its_budget(attack, what, make)
        _guesses_what_its_goal_says(attack, what, make)
        _leaves_no_trace_when_asked_about_its_reach(attack, what, make)


def ticking(checks: int) -> Budget:
    """Return a budget that ends after a number of looks at the clock.

    A test with it does not depend on time.
    """
    ticks = count()
    return Budget(checks, clock=lambda: float(next(ticks)))


def _rng(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _says_what_it_is(attack: Any) -> None:
    describes_itself(attack, "threat_model")
    can_be_shown(attack)
    promise(
        isinstance(attack, Attack), attack, "an attack has all that `leakaudit.plugins.Attack` lists", _missing(attack)
    )
    promise(attack.goal in get_args(Goal), attack, f"`goal` is one of {', '.join(get_args(Goal))}", attack.goal)
    promise(attack.needs in get_args(Needs), attack, f"`needs` is one of {', '.join(get_args(Needs))}", attack.needs)
    promise(attack.reads in get_args(Reads), attack, f"`reads` is one of {', '.join(get_args(Reads))}", attack.reads)
    promise(0 <= attack.false_event_rate <= 1, attack, "`false_event_rate` is a probability", attack.false_event_rate)


def _missing(attack: Any) -> str:
    wanted = [*get_type_hints(Attack), "applies", "__call__"]
    return f"no {', '.join(name for name in wanted if not hasattr(attack, name))}"


def _cannot_be_handed_the_truth(attack: Any) -> None:
    hints = {name: kind for name, kind in get_type_hints(type(attack).__call__).items() if name != "self"}
    wanted = {"seen": Observation, "rng": torch.Generator, "budget": Budget, "return": Reconstruction}
    signature = "`__call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction`"
    parameters = [*inspect.signature(type(attack).__call__).parameters]
    promise(hints == wanted, attack, f"an attack is called as {signature}", hints)
    promise(parameters == ["self", *wanted][:4], attack, f"an attack is called as {signature}", parameters)
    parameters = [*inspect.signature(type(attack).applies).parameters]
    promise(parameters == ["self", "seen"], attack, "`applies` takes the observation and nothing else", parameters)


def _applicable(attack: Any, observations: Makers) -> Iterator[tuple[str, Callable[[], Observation]]]:
    """Yield the observations that the attack applies to.

    Also check that a refusal has a reason and that `applies` does not change the model.
    """
    for what, make in observations.items():
        seen = make()
        before = ModelState.of(seen.model)
        verdict = attack.applies(seen)
        changed = before.changed(seen.model)
        promise(not changed, attack, f"`applies` leaves the model as it was, on {what}", f"other {', '.join(changed)}")
        promise(verdict or verdict.reason, attack, f"a refusal has a reason, on {what}", "none")
        if verdict:
            yield what, make


def _repeats_itself(attack: Any, what: str, make: Callable[[], Observation]) -> None:
    """Check that randomness comes from the generator only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        one = attack(make(), _rng(), ticking(25))
        torch.manual_seed(2)
        other = attack(make(), _rng(), ticking(25))
    promise(one == other, attack, f"the same generator gives the same guess, on {what}", "two different guesses")


def _leaves_everything_as_it_was(attack: Any, what: str, make: Callable[[], Observation]) -> None:
    seen = make()
    update, before, state = seen.digest(), ModelState.of(seen.model), torch.get_rng_state()
    attack(seen, _rng(0), ticking(15))
    promise(seen.digest() == update, attack, f"an attack leaves the update as it was, on {what}", "other values")
    changed = before.changed(seen.model)
    promise(not changed, attack, f"an attack leaves the model as it was, on {what}", f"other {', '.join(changed)}")
    same = torch.equal(torch.get_rng_state(), state)
    promise(same, attack, f"an attack draws from `rng` only, on {what}", "another global random state")


def _keeps_to_its_budget(attack: Any, what: str, make: Callable[[], Observation]) -> None:
    """Check that the attack guesses even if its budget is used up at once."""
    guess = attack(make(), _rng(0), ticking(1))
    promise(isinstance(guess, Reconstruction), attack, f"an attack returns a Reconstruction, on {what}", type(guess))
    stops = ("budget", "done", "converged")
    promise(guess.stop in stops, attack, f"`stop` is one of {', '.join(stops)}, on {what}", repr(guess.stop))
    infinite = [name for name, value in guess.diagnostics.items() if not math.isfinite(value)]
    promise(not infinite, attack, f"diagnostics are finite numbers, on {what}", f"others: {', '.join(infinite)}")


def _guesses_what_its_goal_says(attack: Any, what: str, make: Callable[[], Observation]) -> None:
    """Check the field that the goal names, the token ids and the scores."""
    seen = make()
    guess = attack(seen, _rng(0), ticking(15))
    field = FIELDS[attack.goal]
    guessed = getattr(guess, field) is not None
    promise(guessed, attack, f"an attack whose goal is {attack.goal} fills `{field}`, on {what}", "None")
    ids = {token for sequence in guess.sequences or () for token in sequence.token_ids} | set(guess.tokens or ())
    size = seen.facts.vocabulary.size
    outside = sorted(token for token in ids if not 0 <= token < size)
    promise(not outside, attack, f"token ids are at least 0 and below {size}, on {what}", outside)
    unsure = [s.own_score for s in guess.sequences or () if not 0 <= s.own_score <= 1]
    promise(not unsure, attack, f"an own score is from 0 to 1, on {what}", unsure)


def _leaves_no_trace_when_asked_about_its_reach(attack: Any, what: str, make: Callable[[], Observation]) -> None:
    """Check that questions about the truth change neither model nor attack."""
    seen = make()
    before = ModelState.of(seen.model)
    guess = attack(seen, _rng(), ticking(25))
    if guess.reach is None:
        return
    ids = tuple(range(5, min(13, seen.facts.vocabulary.size)))
    questions = [ids, ids[:3], (*ids, *ids), ids[::-1]]
    answers = [(guess.reach.tokens(question), guess.reach.passes(question)) for question in questions]
    lengths = [len(tokens) for tokens, _ in answers]
    promise(lengths == [*map(len, questions)], attack, f"`reach.tokens` answers for each token, on {what}", lengths)
    again = [(guess.reach.tokens(question), guess.reach.passes(question)) for question in questions]
    promise(again == answers, attack, f"`reach` answers the same question alike, on {what}", "two different answers")
    changed = before.changed(seen.model)
    promise(not changed, attack, f"`reach` leaves the model as it was, on {what}", f"other {', '.join(changed)}")
    same = attack(seen, _rng(), ticking(25)) == guess
    promise(same, attack, f"what `reach` was asked has no effect on the next guess, on {what}", "another guess")
