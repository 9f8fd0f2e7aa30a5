"""Defences of two papers, beside what their attacks and today's ones read.

    python -m tests.benchmarks.defense_tables lamp-5 --data cola/paper100.jsonl --steps 3 --seeds 1 2
    python -m tests.benchmarks.defense_tables film-4 --model FOLDER --data wikitext/dev.jsonl --batch-size 16

- `lamp-5`: Gaussian noise on the update of a classifier. LAMP (Balunovic et al. 2022), Table 5.
- `lamp-8`: random entries of the update set to zero. LAMP, Appendix C.2, Table 8.
- `film-4`: pruning, DP-SGD and frozen word embeddings for a language model. FILM (Gupta et al. 2022), Section 6.3, Table 4.

Every attack sees the same steps under every defence; each step has noise and masks of its own. The unit of the intervals is one step.
`--keep FILE` writes each attempt's numbers, never its text, and a later run with the same file does only what is missing. `--minutes` starts no
further step after so long. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from scipy import stats

from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.audit import PluginSpec
from leakaudit.config.simulation import Simulation
from leakaudit.models.loading import load_tokenizer
from leakaudit.models.structure import word_embedding
from leakaudit.plugins import Budget
from leakaudit.registry import attacks
from leakaudit.results import bounds
from tests.benchmarks.defense_tables_published import (
    FILM_4_DP_SGD,
    FILM_4_NOISE,
    FILM_4_PRUNING,
    LAMP_5,
    LAMP_5_MCC,
    LAMP_8,
    LAMP_8_MCC,
)
from tests.benchmarks.film import printed_bag
from tests.benchmarks.film_published import TABLE_4_DP_SGD, TABLE_4_PRUNING
from tests.benchmarks.lm_clients import attacked, defended, line
from tests.benchmarks.sentences import kept_rows, read_rows, write_rows
from tests.benchmarks.span import arguments

METRICS = ("rouge1", "rouge2", "rougeL", "exact", "found")
CONFIDENCE = 0.95
"""Two-sided, of every interval."""


@dataclass(frozen=True)
class Defence:
    """A row of a paper's table: a defence at one strength."""

    spec: PluginSpec
    published: Mapping[str, str] = field(default_factory=dict)
    """Attack of the paper -> its numbers, as they are shown."""
    utility: str = "-"
    """The paper's number of how well the model trains under the defence."""


@dataclass(frozen=True)
class Contender:
    """An attack and what it knows."""

    spec: PluginSpec
    granted: tuple[str, ...] = ()
    aware: bool = True
    """Whether it knows the defence and its strength."""

    @property
    def knows(self) -> str:
        """Return in words what the attack knows besides update and weights."""
        return ", ".join((*self.granted, "the defence")) if self.aware else ", ".join(self.granted) or "nothing"


@dataclass(frozen=True)
class Table:
    """A paper's table: its defences, and the attacks that are run on them."""

    defences: tuple[Defence, ...]
    contenders: tuple[Contender, ...]
    task: str = "classification"
    freeze: tuple[str, ...] = ()
    bags: bool = False
    """Whether the paper counts the tokens that are read, without a sentence."""


@dataclass(frozen=True)
class Kept:
    """What is kept of one attempt on one step: numbers only."""

    defence: str
    attack: str
    scores: Mapping[str, float]
    """Means over the step's texts, from 0 to 1."""
    seconds: float
    """Of computing, on one core."""
    remark: str = ""


def three(numbers: Sequence[float]) -> str:
    """Return R-1, R-2 and R-L as the paper prints them.

    >>> three((43.3, 9.45, 39.7))
    '43.3 / 9.45 / 39.7'
    """
    return " / ".join(map(str, numbers))


def table_of(name: str, short: int | None = None) -> Table:
    """Return one of the three tables.

    Args:
        name: `lamp-5`, `lamp-8` or `film-4`.
        short: steps of LAMP's own attack, for which it also has a quarter as many starts and orders a round; None for its full length.
    """
    if name == "film-4":
        return _film_4()
    released = PluginSpec.parse("lamp-cos(preset=released)")
    if short is not None:
        few = max(1, short // 4)
        released = released.model_copy(
            update={"options": {**released.options, "steps": short, "n_init": few, "n_permutations": few}}
        )
    contenders = (
        Contender(released, ("labels", "lengths"), aware=False),
        Contender(PluginSpec.parse("lamp-cos(preset=fast)"), ("labels", "lengths")),
        Contender(PluginSpec.parse("span")),
    )
    return Table(_lamp_5() if name == "lamp-5" else _lamp_8(), contenders, freeze=("embeddings",))


def _lamp_5() -> tuple[Defence, ...]:
    return tuple(
        Defence(
            PluginSpec(name="gaussian-noise", options={"sigma": sigma}) if sigma else PluginSpec(name="none"),
            {attack: three(numbers) for attack, numbers in found.items()},
            f"MCC {LAMP_5_MCC[sigma]}",
        )
        for sigma, found in LAMP_5.items()
    )


def _lamp_8() -> tuple[Defence, ...]:
    return tuple(
        Defence(
            PluginSpec(name="prune", options={"share": share, "choose": "random"})
            if share
            else PluginSpec(name="none"),
            {"LAMP, cosine": three(found)},
            f"MCC {LAMP_8_MCC[share]}",
        )
        for share, found in LAMP_8.items()
    )


def _film_4() -> Table:
    def row(spec: PluginSpec, rates: tuple[float, float], utility: str) -> Defence:
        return Defence(spec, {"FILM, bag": f"{rates[0]:.2f} / {rates[1]:.2f}"}, utility)

    pruned = (
        row(
            PluginSpec(name="prune", options={"share": share}) if share else PluginSpec(name="none"),
            rates,
            f"perplexity {FILM_4_PRUNING[share]}",
        )
        for share, rates in TABLE_4_PRUNING.items()
    )
    private = (
        row(
            PluginSpec(name="dp-sgd", options={"noise_multiplier": FILM_4_NOISE[epsilon]}),
            rates,
            f"epsilon {epsilon:g}, perplexity {FILM_4_DP_SGD[epsilon]}",
        )
        for epsilon, rates in TABLE_4_DP_SGD.items()
    )
    frozen = row(
        PluginSpec(name="freeze-embeddings", options={"tables": "words"}),
        (0.0, 0.0),
        "perplexity 11.48 (Table 5; 118.69 from scratch)",
    )
    contenders = (
        Contender(PluginSpec.parse("film(preset=paper, phrase_steps=0, token_steps=0)")),
        Contender(PluginSpec.parse("film(preset=honest)")),
        Contender(PluginSpec.parse("rare-rows")),
        Contender(PluginSpec.parse("span")),
    )
    return Table((*pruned, *private, frozen), contenders, task="causal-lm", bags=True)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean of numbers from 0 to 1; None for one number.

    It is Student's, cut at 0 and 1. If all numbers are equal, the spread says nothing, and the exact bounds of `bounds.mean_bounds` are taken:
    at most a share u of all steps has a larger number, where u is the Clopper-Pearson bound for none of n.

    >>> [round(end, 3) for end in interval([0.0, 0.0, 0.0])]
    [0.0, 0.708]
    """
    if len(values) < 2:
        return None
    mean, spread = fmean(values), stdev(values)
    if spread == 0:
        share = bounds.upper_bound(0, len(values), (1 + CONFIDENCE) / 2)
        return mean * (1 - share), mean + (1 - mean) * share
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * spread / math.sqrt(len(values))
    return max(0.0, mean - reach), min(1.0, mean + reach)


def in_percent(values: Sequence[float], *, ends: bool = False) -> str:
    """Return a mean in per cent, and its interval if `ends`; a dash for no number.

    >>> in_percent([0.5, 0.7]), in_percent([0.0, 1.0], ends=True), in_percent([])
    ('60.0', '50.0 (0 to 100)', '-')
    """
    if not values:
        return "-"
    found = interval(values) if ends else None
    return f"{100 * fmean(values):.1f}" + (f" ({100 * found[0]:.0f} to {100 * found[1]:.0f})" if found else "")


def kept_of(table: Table, options: argparse.Namespace, data: Path) -> Iterator[Kept]:
    """Attack one step after another; yield each attempt, or what a file kept of it."""
    started, known = time.monotonic(), _read(options.keep)
    for seed in options.seeds:
        for number in range(options.steps):
            if options.minutes and time.monotonic() - started > 60 * options.minutes:
                return
            for defence in table.defences:
                for contender in (*table.contenders, *((None,) if table.bags else ())):
                    key = _key(options, seed, number, defence, contender)
                    if key not in known and options.kept_only:
                        continue
                    if key not in known:
                        found = _attempt(table, options, data, seed, number, defence, contender)
                        known[key] = found
                        _write(options.keep, key, found)
                    yield from known[key]


def _attempt(
    table: Table,
    options: argparse.Namespace,
    data: Path,
    seed: int,
    number: int,
    defence: Defence,
    by: Contender | None,
) -> list[Kept]:
    simulator, snapshots = _steps(table, options, data, seed, by.granted if by else ())
    if by is None:
        return list(bags_of(snapshots[number], defence, seed, number))
    found = attacked(
        snapshots[number], simulator, by.spec, defence.spec, options.budget, {}, draw=number, aware=by.aware
    )
    scores = {name: found.whole.get(name, 0.0) for name in METRICS}
    used_up = "" if found.seconds < options.budget else "budget"
    return [Kept(defence.spec.label, by.spec.label, scores, found.seconds, found.reason or used_up)]


def bags_of(snapshot: Snapshot, defence: Defence, seed: int, number: int) -> Iterator[Kept]:
    """Yield precision and recall of the words that two readers name.

    The first reads the word embedding's rows as FILM prints it, the second is `embedding-rows`. A client that sends no such rows shows none.
    """
    rng = torch.Generator().manual_seed(seed + number)
    seen, started = defended(snapshot, defence.spec, rng), time.process_time()
    true = {token for ids in snapshot.truth.sequences() for token in ids}
    rows = seen.update.get(str(word_embedding(seen.model)))
    bag = set() if rows is None else printed_bag(rows, seen.noise_sigma)
    yield Kept(defence.spec.label, "bag as printed", _rates(bag, true), time.process_time() - started)
    plugin, fits, own = attacks.create("embedding-rows"), None, set[int]()
    fits = plugin.applies(seen)
    if fits:
        own = set(plugin(seen, rng, Budget(60.0)).tokens or ())
    remark = "" if fits else fits.reason
    yield Kept(defence.spec.label, "embedding-rows", _rates(own, true), time.process_time() - started, remark)


def _rates(bag: set[int], true: set[int]) -> dict[str, float]:
    right = len(bag & true)
    return {"recall": right / len(true)} | ({"precision": right / len(bag)} if bag else {})


@lru_cache(maxsize=4)
def _made(what: Simulation) -> tuple[Simulator, list[Snapshot]]:
    simulator = Simulator(what)
    return simulator, list(simulator)


def _steps(
    table: Table, options: argparse.Namespace, data: Path, seed: int, granted: tuple[str, ...]
) -> tuple[Simulator, list[Snapshot]]:
    more: dict[str, Any] = {"task": table.task, "freeze": table.freeze, "grant": granted}
    return _made(
        Simulation(
            model=options.model, data=data, batch_size=options.batch_size, steps=options.steps, seed=seed, **more
        )
    )


def _key(options: argparse.Namespace, seed: int, number: int, defence: Defence, by: Contender | None) -> str:
    """Return what an attempt depends on, without a path of the machine."""
    data, model = Path(options.data), Path(options.model)
    return " ".join(
        map(
            str,
            (
                f"{data.parent.name}/{data.name}",
                model.name,
                f"B={options.batch_size} n={options.steps} budget={options.budget:g}",
                f"seed={seed} step={number}",
                defence.spec.label,
                f"{by.spec.label}, {by.knows}" if by else "bags",
            ),
        )
    )


def _read(keep: Path | None) -> dict[str, list[Kept]]:
    if keep is None or not keep.is_file():
        return {}
    rows = map(json.loads, keep.read_text(encoding="utf-8").splitlines())
    return {row["key"]: [Kept(**one) for one in row["kept"]] for row in rows}


def _write(keep: Path | None, key: str, found: Sequence[Kept]) -> None:
    if keep is not None:
        with keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "kept": [asdict(one) for one in found]}) + "\n")


def rows_of(table: Table, kept: Sequence[Kept]) -> Iterator[str]:
    """Yield the rows of the table: each defence's printed numbers, then ours.

    R-1, R-2 and R-L are in per cent; so are precision and recall of words, which stand in their own columns.
    """
    yield line(
        ("defence", "attack", "knows", "n", "R-1 / R-2 / R-L", "R-L (95 %)", "exact", "found")
        + (("precision / recall of words",) if table.bags else ())
        + ("CPU s", "remark")
    )
    yield "|" + " --- |" * (11 if table.bags else 10)
    for defence in table.defences:
        label = f"`{defence.spec.label}`"
        for attack, numbers in defence.published.items():
            words, sentences = (numbers, "-") if table.bags else ("-", numbers)
            cells = (label, f"in print: {attack}", "-", 20 if table.bags else 100, sentences, "-", "-", "-")
            yield line(cells + ((words,) if table.bags else ()) + ("-", defence.utility))
        knows = {each.spec.label: each.knows for each in table.contenders}
        for attack in dict.fromkeys(each.attack for each in kept):
            mine = [each for each in kept if (each.defence, each.attack) == (defence.spec.label, attack)]
            if mine:
                yield _row(table, label, attack, knows.get(attack, "the defence"), mine)


def _row(table: Table, label: str, attack: str, knows: str, mine: Sequence[Kept]) -> str:
    def of(name: str) -> list[float]:
        return [each.scores[name] for each in mine if name in each.scores]

    rouge = " / ".join(in_percent(of(name)) for name in METRICS[:3]) if of("rouge1") else "-"
    words = " / ".join(in_percent(of(name)) for name in ("precision", "recall")) if of("recall") else "-"
    cells = (
        label,
        f"`{attack}`",
        knows,
        len(mine),
        rouge,
        in_percent(of("rougeL"), ends=True),
        in_percent(of("exact")),
        in_percent(of("found")),
    )
    remarks = [each.remark for each in mine if each.remark]
    said = "; ".join(f"{text} ({remarks.count(text)} of {len(mine)})" for text in dict.fromkeys(remarks)) or "-"
    seconds = f"{median(each.seconds for each in mine):.1f}"
    return line(cells + ((words,) if table.bags else ()) + (seconds, said))


def head(table: Table, options: argparse.Namespace, data: Path) -> str:
    """Return a sentence on the steps, with the size of an entry of their updates."""
    sizes = []
    for seed in options.seeds:
        for snapshot in _steps(table, options, data, seed, ())[1]:
            entries = [each.double().pow(2) for each in snapshot.observation.update.values()]
            sizes.append(math.sqrt(sum(float(e.sum()) for e in entries) / sum(e.numel() for e in entries)))
    source = Path(options.data)
    return (
        f"{options.table}: {source.parent.name}/{source.name}, seeds {options.seeds}, at most {options.steps} steps a seed, B = {options.batch_size}, "
        f"dropout off, frozen: {', '.join(table.freeze) or 'nothing'}; budget {options.budget:g} s of computing an attempt. "
        f"Root mean square of an update's entries, before a defence: {min(sizes):.2g} to {max(sizes):.2g}.\n"
    )


def main(given: Sequence[str] | None = None) -> None:
    """Print one table."""
    shared = arguments((__doc__ or "").splitlines()[0], sentences=None)
    parser = argparse.ArgumentParser(description=shared.description, parents=[shared], conflict_handler="resolve")
    parser.add_argument("table", choices=["lamp-5", "lamp-8", "film-4"])
    parser.add_argument("--steps", type=int, default=3, help="client steps a seed")
    parser.add_argument("--batch-size", type=int, default=1, help="texts of one step; FILM's table has 16")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds of computing an attempt")
    parser.add_argument("--paper-steps", type=int, help="shortens LAMP's own attack; default: its 2,000 steps")
    parser.add_argument("--only", default="", help="attacks whose description contains this")
    parser.add_argument("--defenses", default="", help="other defences, separated by `;`, without printed numbers")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no further step after so long; 0: no limit")
    parser.add_argument("--keep", type=Path, help="file for the numbers of each attempt")
    parser.add_argument("--kept-only", action="store_true", help="print what the file holds; attack nothing")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    table = table_of(options.table, options.paper_steps)
    table = replace(table, contenders=tuple(each for each in table.contenders if options.only in each.spec.label))
    if options.defenses:
        table = replace(table, defences=tuple(Defence(PluginSpec.parse(each)) for each in options.defenses.split(";")))
    with tempfile.TemporaryDirectory() as folder:
        data = options.data
        if table.bags:
            kept = kept_rows(read_rows(data), load_tokenizer(options.model))
            data = write_rows(Path(folder) / data.name, kept)
        print(head(table, options, data))
        for row in rows_of(table, list(kept_of(table, options, data))):
            print(row, flush=True)


if __name__ == "__main__":
    main()
