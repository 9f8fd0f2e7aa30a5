"""Planted mistakes of DP-SGD and correct runs, and what is said of them.

python -m tests.benchmarks.conformance mistakes
python -m tests.benchmarks.conformance correct
python -m tests.benchmarks.conformance level --audits 200
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from scipy import stats
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from leakaudit.audit.conformance.assumptions import composition
from leakaudit.audit.conformance.judge import DEFAULT_LEVEL, judge
from leakaudit.audit.conformance.measure import Measurement, measure
from leakaudit.cli import main as main_command
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.step import ClientStep
from leakaudit.models.loading import NOTHING_FOREIGN
from leakaudit.results.conformance import ConformanceCheck
from leakaudit.results.files import load_results
from leakaudit.results.schema import Privacy
from tests.support import private_training as private
from tests.support import tiny
from tests.support.pair import pair

Mistake = Callable[[Any, nn.Module], None]

MISTAKES: dict[str, tuple[Mistake, dict[str, Any]]] = {
    "no noise on one layer": (private.no_noise_on("layer.1.output.dense.weight"), {}),
    "no noise on the embedding": (private.no_noise_on("word_embeddings.weight"), {}),
    "one seed for all steps": (private.same_seed, {}),
    "bound after averaging": (private.bound_after_mean, {}),
    "bound on each micro-batch": (private.bound_of_pairs, {"physical": 2, "noise": 0.03, "steps": 6}),
    "real batch size as divisor": (private.real_size, {"poisson": True}),
    "clipping by parameter counted as flat": (private.bound_by_parameter, {}),
    "no clipping": (private.no_bound, {}),
    "float16 noise": (private.half_noise, {}),
    "noise on each example, averaged": (private.noise_times(8**-0.5), {}),
}
"""Name -> mistake and arguments of the training, for mistakes that single steps show."""

OF_RUNS: dict[str, dict[str, Any]] = {
    "shuffled batches under a Poisson accountant": {"steps": 8},
    "epsilon for fewer steps than were taken": {
        "poisson": True,
        "config": {
            "privacy": {"epsilon": 3.5, "delta": 1e-5, "accountant": "by hand", "sampling": "poisson", "steps": 2}
        },
    },
}
"""Name -> arguments of the training, for mistakes that an audit finds in what is stated on its run."""

OF_TWO = {"one seed for two processes": "same seed", "half of the noise on each of two processes": "half"}
"""Name -> training of `tests.support.two_private_processes`."""

CORRECT: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat, Poisson": {"poisson": True},
    "per layer": {"clipping": "per_layer"},
    "ghost": {"mode": "ghost"},
    "accumulated": {"physical": 4},
}
"""Name -> arguments of a correct training."""


def measured(folder: Path, mistake: Mistake | None = None, **options: Any) -> list[Measurement]:
    """Train and measure every kept step."""
    snapshots = private.train(folder, mistake, **options)
    found = (
        measure(f"st-{number:06d}", ClientStep.of(snapshot), snapshot.observation.update)
        for number, snapshot in sorted(snapshots.items())
    )
    return [one for one in found if one is not None]


def checks(mistake: Mistake | None = None, **options: Any) -> tuple[ConformanceCheck, ...]:
    """Train, measure and judge."""
    with tempfile.TemporaryDirectory() as folder:
        return judge(measured(Path(folder) / "run", mistake, **options))


def checks_of_run(**options: Any) -> tuple[ConformanceCheck, ...]:
    """Train, audit the run as its owner does, and return what the results say."""
    with tempfile.TemporaryDirectory() as folder:
        private.watched(Path(folder) / "run", **options)
        audit = Path(folder) / "run" / "audit"
        done = CliRunner().invoke(main_command, ["worker", str(audit / "spool")])
        assert done.exit_code == 0, done.output
        found = load_results(audit).conformance
    return () if found is None else found.checks


def checks_of_two(name: str) -> tuple[ConformanceCheck, ...]:
    """Return what is said of a training of two processes."""
    kept = pair("tests.support.two_private_processes").kept(name)
    found = [measure(f"st-{n:06d}", ClientStep.of(s), s.observation.update) for n, s in sorted(kept.items())]
    return judge([one for one in found if one is not None])


def _lines(found: tuple[ConformanceCheck, ...], *, every: bool) -> Iterator[str]:
    for one in found:
        if every or one.outcome == "contradicted":
            yield f"  - {one.about}: {one.outcome}: {one.sentence}"


TEXTS = ["the old dog", "a cat chased the dog .", "the cat", "an old old cat ."]
"""Four short texts of the tiny tokenizer."""


def _private_step(client: ClientStep, knobs: dict[str, Any]) -> tuple[ClientStep, Mapping[str, Tensor], float]:
    """Return a step that declares DP-SGD, its clean update and its noise level."""
    declared = DeclaredDefense(name="dp-sgd", parameters={"noise_multiplier": 1.0, "max_grad_norm": 1.0, **knobs})
    step = replace(client, facts=client.facts.model_copy(update={"defenses": (declared,)}))
    plugin = declared.known()
    clean = plugin.expected(step, step.update(), {}, 0.0)
    return step, clean, plugin.added_noise(step, clean)


def noisy_steps(
    count: int, *, processes: int = 1, factor: float = 1.0, seed: int = 0, same: bool = False
) -> list[Measurement]:
    """Return measured steps of a client that adds declared Gaussian noise.

    Args:
        count: number of steps.
        processes: over which the update is a mean.
        factor: of the noise.
        seed: of the noise.
        same: whether all steps have the same noise.
    """
    client = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), TEXTS, [0, 1, 1, 0])
    recipe = client.recipe.model_copy(update={"processes": processes})
    knobs = {"max_grad_norm": private.BOUND, "processes": processes}
    step, clean, sigma = _private_step(replace(client, recipe=recipe), knobs)
    found = []
    for number in range(count):
        rng = torch.Generator().manual_seed(seed if same else seed * 1_000 + number)
        level = factor * sigma
        sent = {name: value + level * torch.randn(value.shape, generator=rng) for name, value in clean.items()}
        one = measure(f"st-{number:06d}", step, sent)
        assert one is not None
        found.append(one)
    return found


def level(audits: int) -> Iterator[str]:
    """Yield how many audits of a correct mechanism are contradicted.

    Each has three steps whose noise is drawn anew.
    """
    wrong: Counter[str] = Counter()
    accused = 0
    for number in range(audits):
        found = judge(noisy_steps(3, seed=number))
        bad = [one.about for one in found if one.outcome == "contradicted"]
        wrong.update(bad)
        accused += bool(bad)
    limit = int(stats.binom.isf(0.05, audits, DEFAULT_LEVEL))
    yield f"{accused} of {audits} audits contradicted, {dict(wrong)}; stated: at most {DEFAULT_LEVEL:.0%} of all, so up to {limit} in 95 of 100 cases"


def messages() -> Iterator[str]:
    """Yield the least epsilon of one message under the classical formula.

    It is the formula of Flower's `LocalDpMod` (flwr 1.42, common/differential_privacy.py): sigma = sensitivity sqrt(2 ln(1.25 / delta)) / epsilon.
    """
    yield "| stated | noise over the bound | at least | |"
    yield "| --- | --- | --- | --- |"
    delta = 1e-5
    for epsilon in (0.5, 1.0, 2.0, 5.0, 8.0, 10.0, 20.0, 50.0):
        multiplier = (2 * math.log(1.25 / delta)) ** 0.5 / epsilon
        told = Privacy(epsilon=epsilon, delta=delta, covers="message", accountant="flower localdp, per message")
        (found,) = composition([told], None, None, multiplier)
        yield f"| {epsilon:g} | {multiplier:.3f} | {found.observed:.2f} | {found.outcome} |"


def cost(model: str, data: Path, sizes: tuple[int, ...] = (4, 8, 16)) -> Iterator[str]:
    """Yield the processor seconds and the memory of one measured step.

    Best of three.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, **NOTHING_FOREIGN)
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, **NOTHING_FOREIGN)
    lines = data.read_text(encoding="utf-8").splitlines()[: max(sizes)]
    rows = [json.loads(line) for line in lines]
    yield f"{sum(p.numel() for p in made.parameters()):,} parameters, {torch.get_num_threads()} thread"
    yield ""
    yield "| examples | processor s, best of three | peak of the process, MiB |"
    yield "| --- | --- | --- |"
    for size in sizes:
        texts, labels = [row["text"] for row in rows[:size]], [row["label"] for row in rows[:size]]
        step, clean, level = _private_step(tiny.client_step(made, tokenizer, texts, labels), {})
        sent = {name: value + level * torch.randn_like(value) for name, value in clean.items()}
        seconds = []
        for _ in range(3):
            start = time.process_time()
            measure("st-000000", step, sent)
            seconds.append(time.process_time() - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        yield f"| {size} | {min(seconds):.1f} | {peak:,.0f} |"


def main() -> None:
    """Print what is said of each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("mistakes", "correct", "level", "messages", "cost"))
    parser.add_argument("--only", default="")
    parser.add_argument("--all", action="store_true", help="print every check")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--audits", type=int, default=200)
    parser.add_argument("--model", help="folder of a classifier's model")
    parser.add_argument("--data", type=Path, help="JSONL of texts and labels")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.what in ("level", "messages", "cost"):
        numbers: dict[str, Callable[[], Iterator[str]]] = {
            "level": lambda: level(given.audits),
            "messages": messages,
            "cost": lambda: cost(given.model, given.data),
        }
        for line in numbers[given.what]():
            print(line, flush=True)
        return
    for line in (_of_mistakes if given.what == "mistakes" else _of_correct)(given):
        print(line, flush=True)


def _of_mistakes(given: argparse.Namespace) -> Iterator[str]:
    known: dict[str, Callable[[], tuple[ConformanceCheck, ...]]] = {
        **{name: partial(checks, mistake, **options) for name, (mistake, options) in MISTAKES.items()},
        **{name: partial(checks_of_run, **options) for name, options in OF_RUNS.items()},
        **{name: partial(checks_of_two, training) for name, training in OF_TWO.items()},
    }
    for name, said in known.items():
        if given.only in name:
            yield f"- {name}"
            yield from _lines(said(), every=given.all)


def _of_correct(given: argparse.Namespace) -> Iterator[str]:
    accused = runs = 0
    for name, options in CORRECT.items():
        for seed in range(given.seeds):
            found = checks(seed=seed, **options)
            runs, accused = runs + 1, accused + any(one.outcome == "contradicted" for one in found)
            yield f"- {name}, seed {seed}: {sum(one.outcome == 'not contradicted' for one in found)} checks not contradicted"
            yield from _lines(found, every=given.all)
    yield ""
    yield f"{accused} of {runs} correct runs contradicted"


if __name__ == "__main__":
    main()
