"""Under pure noise no attack has events above its stated false rate.

Declared noise never makes an attack claim more.

A draw replaces the whole update by noise, which knows nothing of the batch. The noise is declared, Gaussian, Laplace or that of private
SGD, and from 0.1 to 10^4 times as large as the update, so that everything an attack names is named by chance. k events in n draws
refute a stated rate p if P(X >= k) < REFUTED for X ~ Binomial(n, p).

`tests/benchmarks/pure_noise.py` does the same with more draws for attacks that search, and prints a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from leakaudit.audit.scoring.score import Scored, score
from leakaudit.client.facts import DeclaredDefense, Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.errors import AnatomyError
from leakaudit.models.array_classifier import save_auxiliary
from leakaudit.plugins.attack_protocol import FALSE_EVENTS
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks, defenses
from tests.support import tiny

REFUTED = 1e-4
"""Probability below which a count of events refutes the stated rate. Our choice: about thirty such tests run here."""

DRAWS = 1000
"""Of pure noise, for every attack that takes milliseconds."""

SEARCHES = {
    "dlg": 4,
    "tag": 4,
    "lamp-cos": 4,
    "lamp-l1l2": 4,
    "grab": 3,
    "film": 15,
    "span": 15,
    "update-difference": 15,
}
"""Attacks that search -> draws here. So few bound no rate of 1 %: without an event, n draws show a rate below 1 - 0.05^(1 / n) with 95 % confidence,
53 % at n = 4 and 18 % at n = 15. What protects them is that an event asks for eight words out of 47 at random, which has a chance of
10^-3 for half of them and 10^-13 for all, and that their label counts are no event under noise (tested here for each)."""

SHORT: dict[str, dict[str, Any]] = {
    "dlg": {"steps": 3},
    "tag": {"steps": 3},
    "lamp-cos": {"preset": "fast", "steps": 4, "round_every": 2, "n_init": 2, "restarts": 1},
    "lamp-l1l2": {"preset": "fast", "steps": 4, "round_every": 2, "n_init": 2, "restarts": 1},
    "grab": {"preset": "fast", "steps": 4},
    "film": {"beam": 4, "length": 13, "phrase_steps": 2, "token_steps": 2, "candidates": 4},
    "update-difference": {"sentences": 8, "beam": 2, "length": 13},
}
"""Knobs at which a search ends soon. A guess from noise is no better after more steps."""

TEXT = "the old dog chased a small cat near two red trees ."
STRENGTHS = (0.1, 1.0, 100.0, 1e4)
"""Standard deviation of the noise in units of the update's root mean square."""

Noise = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _gaussian(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=rng)


def _laplace(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Return noise of unit variance."""
    one, two = (torch.empty(shape).exponential_(generator=rng) for _ in range(2))
    return (one - two) / 2**0.5


def _private_sgd(sigma: float) -> DeclaredDefense:
    knobs: dict[str, float | int | str | bool] = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 4 * sigma,
        "expected_batch_size": 4.0,
    }
    return DeclaredDefense(name="dp-sgd", parameters=knobs)


NOISES: dict[str, tuple[Noise, Callable[[float], DeclaredDefense]]] = {
    "gaussian": (_gaussian, lambda s: DeclaredDefense(name="gaussian-noise", parameters={"sigma": s})),
    "laplace": (_laplace, lambda s: DeclaredDefense(name="laplace-noise", parameters={"sigma": s})),
    "private SGD": (_gaussian, _private_sgd),
}
"""Kind -> what draws it with unit variance, and how a protocol declares a standard deviation of it."""


def _classifier(classes: int, hidden: int = 16) -> ClientStep:
    """Return the step of one text.

    A guess of its label is right by chance in one of `classes` draws.
    """
    model = tiny.bert(num_labels=classes, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1)
    return tiny.client_step(model, tiny.bert_tokenizer(), [TEXT], [1], batch_size_bound=1)


def _one_class() -> ClientStep:
    """Return the step of a client with one class and a batch size that is not public.

    Naming one class is right by chance in half of the draws.
    """
    model = tiny.bert(hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return tiny.client_step(model, tiny.bert_tokenizer(), [TEXT] * 4, [1] * 4)


def _word() -> ClientStep:
    """Return a step whose batch is one word: naming it alone is an event on all words."""
    model = tiny.bert(hidden_size=8, intermediate_size=16, num_hidden_layers=1)
    return tiny.client_step(model, tiny.bert_tokenizer(), ["dog"], [1])


def _language_model() -> ClientStep:
    return tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm")


def _untied() -> ClientStep:
    """Return a step of a language model whose head is no word embedding."""
    return tiny.client_step(tiny.gpt2_lm(tied=False), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm")


STEPS: dict[str, Callable[[], ClientStep]] = {
    "two classes": partial(_classifier, 2),
    "five classes": partial(_classifier, 5),
    "one class": _one_class,
    "one word": _word,
    "language model": _language_model,
}


@cache
def _made(name: str) -> tuple[ClientStep, Observation, float]:
    """Return a step, what is seen of it, and the root mean square of its update."""
    step = STEPS.get(name, _untied)()
    seen = step.observe()
    squares = torch.cat([g.flatten() for g in seen.update.values()]).square()
    return step, seen, float(squares.mean().sqrt())


def pure_noise(seen: Observation, kind: str, sigma: float, rng: torch.Generator) -> Observation:
    """Return the observation with declared noise instead of its update."""
    draw, declare = NOISES[kind]
    noise = {name: sigma * draw(tuple(tensor.shape), rng) for name, tensor in seen.update.items()}
    return seen.under(declare(sigma), noise)


def settings() -> Iterator[tuple[str, float]]:
    """Yield every kind of noise at every strength, without end."""
    return cycle([(kind, strength) for strength in STRENGTHS for kind in NOISES])


def scored(step: ClientStep, attack: Any, seen: Observation, seed: int, seconds: float = 600.0) -> Scored:
    """Run an attack and score it as the battery does."""
    guess = attack(seen, torch.Generator().manual_seed(seed), Budget(seconds))
    facts = seen.facts
    labels = step.truth.labels() if facts.task == "classification" else None
    tokenizer = tiny.bert_tokenizer()
    around = facts.vocabulary.wordless_ids
    return score(guess, step.truth.sequences(), labels, facts.num_labels, tokenizer, around, 8)


def refuted(events: int, draws: int, rate: float) -> bool:
    """Return whether so many events are too many for a rate."""
    return bool(binom.sf(events - 1, draws, rate) < REFUTED)


def made(name: str, auxiliary: Path) -> Any:
    """Return an attack, with labelled data where it needs some."""
    kind = attacks[name]
    knobs = {"auxiliary": auxiliary} if "auxiliary" in getattr(kind, "__dataclass_fields__", {}) else {}
    return kind(**knobs)


@pytest.fixture(scope="session")
def auxiliary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return labelled texts of two classes."""
    path = tmp_path_factory.mktemp("auxiliary") / "labelled.safetensors"
    texts = ["a bird saw the horse", "two fish ate", "the river is old ."] * 2
    inputs = dict(tiny.bert_tokenizer()(texts, return_tensors="pt", padding=True))
    save_auxiliary(path, inputs, torch.tensor([0, 1, 0, 1, 1, 0]))
    return path


def _ours() -> list[str]:
    """Return the attacks of this project; tests of the registry add others."""
    return [name for name, kind in attacks if kind.__module__.startswith("leakaudit.")]


def _fast() -> list[str]:
    return [name for name in _ours() if name not in SEARCHES and name != "pooler-features"]


@pytest.mark.parametrize("name", _ours())
def test_an_attack_states_its_false_rate_under_noise(name: str) -> None:
    """The rate is at most the default.

    `pooler-features`, which needs an active server, has LAMP's.
    """
    assert 0 <= attacks[name].false_event_rate <= FALSE_EVENTS


@pytest.mark.parametrize("name", _fast())
def test_under_pure_noise_an_attack_has_no_event_above_its_stated_false_rate(name: str, auxiliary: Path) -> None:
    """A thousand draws over models, kinds of noise and strengths.

    The batches are those that chance hits most often.
    """
    attack = made(name, auxiliary)
    fitting = [what for what in STEPS if attack.applies(_made(what)[1])]
    assert fitting, "an attack that applies nowhere would pass without having been tried"
    rng = torch.Generator().manual_seed(0)
    events = 0
    for number, (kind, strength) in enumerate(islice(settings(), DRAWS)):
        step, seen, size = _made(fitting[number // 12 % len(fitting)])
        noisy = pure_noise(seen, kind, strength * size, rng)
        if not attack.applies(noisy):
            continue  # an attack that says that it does not apply claims nothing
        with suppress(AnatomyError):  # the battery takes it for `not applicable`
            events += bool(scored(step, attack, noisy, number).events)
    assert not refuted(events, DRAWS, attack.false_event_rate), f"{events} events in {DRAWS} draws"


@pytest.mark.parametrize("name", SEARCHES)
def test_under_pure_noise_a_search_guesses_nothing_that_counts(name: str) -> None:
    """Few draws of few steps; SEARCHES says what they bound.

    Only lengths are granted, which noise hides.
    """
    step, seen, size = next(
        _made(what) for what in ("two classes", "language model", "untied") if attacks[name]().applies(_made(what)[1])
    )
    lengths = tuple(len(ids) for ids in step.truth.sequences())
    rng, draws = torch.Generator().manual_seed(0), SEARCHES[name]
    events: list[str] = []
    for number, (kind, strength) in enumerate(islice(settings(), draws)):
        noisy = pure_noise(seen, kind, strength * size, rng).granting(Granted(lengths=lengths))
        attack = attacks[name](**SHORT.get(name, {}))
        assert attack.applies(noisy)
        events += scored(step, attack, noisy, number, seconds=2.0).events
    assert events == []


@pytest.mark.parametrize("strength", [0.1, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize(("name", "what"), [("embedding-rows", "five classes"), ("target-tokens", "language model")])
def test_noise_never_makes_an_attack_name_more_wrong_words(name: str, what: str, kind: str, strength: float) -> None:
    """Words beyond the batch stay within `false_rows` on average."""
    _, seen, size = _made(what)
    clean = set(attacks[name]()(seen, torch.Generator().manual_seed(0), Budget(600)).tokens)
    rng, draws = torch.Generator().manual_seed(0), 100
    wrong = 0
    for number in range(draws):
        noise = pure_noise(seen, kind, strength * size, rng)
        noisy = replace(noise, update={key: seen.update[key] + tensor for key, tensor in noise.update.items()})
        found = attacks[name]()(noisy, torch.Generator().manual_seed(number), Budget(600))
        wrong += len(set(found.tokens) - clean)
    assert wrong <= binom.isf(REFUTED, draws * len(tiny.VOCABULARY), FALSE_EVENTS)


@pytest.mark.parametrize("kind", NOISES)
def test_words_are_not_named_in_noise_that_nobody_declares(kind: str) -> None:
    """A table without a single zero row is no gradient of a few words."""
    _, seen, size = _made("five classes")
    rng = torch.Generator().manual_seed(0)
    named = 0
    for number in range(200):
        noise = replace(seen, update=pure_noise(seen, kind, size, rng).update)
        named += bool(attacks["embedding-rows"]()(noise, torch.Generator().manual_seed(number), Budget(600)).tokens)
    assert not refuted(named, 200, FALSE_EVENTS)


@pytest.mark.parametrize("name", ["idlg", "llg", "llg-star", "ilrg", "rlu"])
def test_labels_are_still_told_where_noise_is_small(name: str) -> None:
    """The rule hides no leak: under tiny noise the label is still an event."""
    step, seen, size = _made("five classes")
    noise = pure_noise(seen, "gaussian", 1e-3 * size, torch.Generator().manual_seed(0))
    noisy = replace(noise, update={key: seen.update[key] + tensor for key, tensor in noise.update.items()})
    assert scored(step, attacks[name](), noisy, 0).events == ("label_counts",)


@pytest.mark.parametrize("name", ["idlg", "llg", "llg-star", "ilrg", "rlu"])
@pytest.mark.parametrize("after", ["sign", "quantize", "round", "prune"])
def test_a_defence_after_the_noise_makes_no_attack_tell_labels_from_it(name: str, after: str) -> None:
    """Signs have a size of their own, whatever the size of the noise in them."""
    step, seen, size = _made("two classes")
    rng, draws, events = torch.Generator().manual_seed(0), 20, 0
    for number in range(draws):
        noisy = pure_noise(seen, ("gaussian", "laplace")[number % 2], size, rng)
        sent = defenses[after]()(step, noisy, rng)
        with suppress(AnatomyError):
            events += bool(scored(step, attacks[name](), sent, number).events)
    assert not refuted(events, draws, attacks[name].false_event_rate), f"{events} events in {draws} draws"


def test_what_is_known_of_an_observation_s_noise_is_computed_once() -> None:
    """Attacks ask in loops, and relative noise is measured on the whole update."""
    _, seen, size = _made("two classes")
    reads: list[str] = []

    class Counted(dict[str, Tensor]):
        def values(self) -> Any:
            reads.append("values")
            return super().values()

    noisy = replace(
        seen,
        update=Counted(seen.update),
        facts=seen.facts.model_copy(update={"defenses": (DeclaredDefense(name="?"),)}),
    )
    assert noisy.noise_sigma == pytest.approx(size) and noisy.zeroed and noisy.resized
    once = len(reads)
    assert noisy.noise_sigma == pytest.approx(size) and len(reads) == once
