"""Tables of FILM on language-model clients, beside the tables of its paper.

Run: `python -m tests.benchmarks.film TABLE --victims FOLDER [...] --data FILE.jsonl [...] [--sizes B:batches ...]`.

Victims are folders of `tests.benchmarks.decoder_victims` or any causal language model; they are not the paper's. Tables:

- `sentences`: ROUGE and named entities of every attack by batch size (the paper's Tables 9 and 10, Figures 3 to 6). With `--victims` it
  compares stages of training, with `--freeze` frozen embeddings, with `--defenses` defences, with `--ablation` settings of FILM.
- `bags`: precision and recall of words under pruning and DP-SGD (Table 4), or under `--defenses`, read as printed and by `embedding-rows`.
- `repetition`: recall and precision of sentences after so many beam searches (Table 3).

Every attack sees the same steps. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median

import torch

from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.audit import PluginSpec
from leakaudit.models.structure import word_embedding
from leakaudit.plugins import Budget
from leakaudit.registry import attacks
from tests.benchmarks.decoder_victims import described
from tests.benchmarks.film_published import (
    SENTENCES,
    STEPS,
    TABLE_3,
    TABLE_4_DP_SGD,
    TABLE_4_PRUNING,
    TABLE_9,
    TABLE_10,
)
from tests.benchmarks.lm_clients import (
    ROUGES,
    Client,
    Found,
    attacked,
    cells,
    defended,
    found_by_any,
    line,
    means,
    tokens_of,
)
from tests.benchmarks.sentences import LEAST, MOST, entities_in, kept_rows, read_rows, write_rows

RELEASED = "film(preset=released)"
GRANTED: dict[str, tuple[str, ...]] = {RELEASED: ("words", "lengths")}
"""Attack -> what it is granted, as the published code takes it; every other attack gets the update alone."""
SEARCH_ALONE = "film(preset=paper, phrase_steps=0, token_steps=0)"
"""FILM without reordering. Beam size and penalty belong to the search, which takes a hundredth of the time of the reordering."""
ATTACKS = ("film(preset=paper)", SEARCH_ALONE, RELEASED, "film(preset=honest)", "rare-rows", "span")
MATCHING = ("dlg", "tag", "lamp-cos")
"""They are tried on batches of one sentence only: the paper's own figures say that they fail on larger ones."""
ABLATIONS = {
    "beam": tuple(SEARCH_ALONE.replace(")", f", beam={size})") for size in (1, 8, 32, 64)),
    "gram": tuple(SEARCH_ALONE.replace(")", f", gram={size})") for size in (0, 2, 3)),
    "beta": tuple(f"film(preset=paper, norm_weight={beta})" for beta in (0, 1, 10, 50)),
}
"""FILM's Figures 5 and 6."""
COLUMNS = (*ROUGES, "nerr")
OF_BATCH = ("best", "found", "precision", "exact")
NONE = PluginSpec(name="none")
Named = Mapping[str, Sequence[str]]
"""True text -> its named entities."""


def sentences(options: argparse.Namespace, folder: Path) -> None:
    """Print scores of sentences by victim, data, batch size, defence and attack."""
    print(
        "| victim | data | B | n | tokens / D | defence | attack | granted | first guess, nearest text: R-1 / R-2 / R-L / NERR "
        "| whole batch: R-1 / R-2 / R-L / NERR | best R-L | found | precision | exact | s of computing a batch | remark |"
    )
    print(f"|{' --- |' * 16}")
    for client, named in clients(options, folder):
        _print_published(client)
        plain = _simulator(client)
        ratio = fmean(tokens_of(plain)) / int(plain.model.get_parameter(str(word_embedding(plain.model))).shape[1])
        for defense in map(PluginSpec.parse, options.defenses):
            for attack in _chosen(options, client.batch_size):
                grant = GRANTED.get(attack, ())
                found = _attempts(client, grant, PluginSpec.parse(attack), defense, options.budget, named)
                where = (client.victim.name, client.data.parent.name, client.batch_size, len(found), f"{ratio:.2f}")
                print(
                    line((*where, defense.label, attack, ", ".join(grant) or "nothing", *_numbers(found))), flush=True
                )
                _show(found, options.show)


@lru_cache(maxsize=2)
def _simulator(client: Client, grant: tuple[str, ...] = ()) -> Simulator:
    return client.simulator(grant)


def _attempts(
    client: Client, grant: tuple[str, ...], attack: PluginSpec, defense: PluginSpec, budget: float, named: Named
) -> list[Found]:
    if attack.name not in attacks.names():
        return [Found(reason="there is no such attack")]
    simulator = _simulator(client, grant)
    return [attacked(snapshot, simulator, attack, defense, budget, named) for snapshot in simulator]


def _numbers(found: Sequence[Found]) -> list[str]:
    reasons = dict.fromkeys(each.reason for each in found if each.reason)
    first, whole = means(each.first for each in found), means(each.whole for each in found)
    seconds = f"{median(each.seconds for each in found):.1f}"
    scores = [" / ".join(cells(numbers, COLUMNS)) for numbers in (first, whole)]
    return [*scores, *cells(whole, OF_BATCH), seconds, "; ".join(reasons) or "-"]


def _show(found: Sequence[Found], count: int) -> None:
    for each in found[:count]:
        print(*(f"    {text}" for text in each.guesses[:count]), sep="\n", flush=True)


def _chosen(options: argparse.Namespace, batch_size: int) -> tuple[str, ...]:
    if options.ablation:
        return ABLATIONS[options.ablation]
    if options.attacks:
        return tuple(options.attacks)
    return (*ATTACKS, *(MATCHING if batch_size == 1 else ()))


def _print_published(client: Client) -> None:
    for number, table in ((9, TABLE_9), (10, TABLE_10)):
        published = table.get((client.data.parent.name, client.batch_size))
        if published:
            where = ("GPT-2 base, trained", client.data.parent.name, client.batch_size, 20, "-", "none")
            printed = " / ".join(cells(published._asdict(), COLUMNS))
            print(line((*where, f"FILM, Table {number}", "-", printed, *["-"] * (len(OF_BATCH) + 3))))


def bags(options: argparse.Namespace, folder: Path) -> None:
    """Print precision and recall of distinct tokens under pruning and DP-SGD."""
    print(
        "| victim | data | B | n | defence | paper, Table 4: precision | recall | as printed: precision | recall ",
        end="",
    )
    print("| embedding-rows: precision | recall |")
    print(f"|{' --- |' * 11}")
    for client, _ in clients(options, folder):
        simulator = client.simulator()
        for name, defense, published in _defences(options.defenses):
            rates = [_rates(snapshot, simulator, defense) for snapshot in simulator]
            ours = [means(rate[side] for rate in rates) for side in (0, 1)]
            printed = [cells(rate, ("precision", "recall")) for rate in ours]
            where = (client.victim.name, client.data.parent.name, client.batch_size, len(rates), name)
            of_paper = [f"{value:.2f}" for value in published] or ["-", "-"]
            print(line((*where, *of_paper, *printed[0], *printed[1])), flush=True)


def _defences(named: Sequence[str]) -> Iterator[tuple[str, PluginSpec, tuple[float, ...]]]:
    """Yield label, defence and the paper's figures, of Table 4 or of named defences."""
    if list(named) != [NONE.name]:
        for spec in map(PluginSpec.parse, named):
            yield spec.label, spec, ()
        return
    for share, published in TABLE_4_PRUNING.items():
        yield f"pruned {share:g}", PluginSpec(name="prune", options={"share": share}), published
    for epsilon, published in TABLE_4_DP_SGD.items():
        multiplier = noise_of(epsilon)
        name = f"DP-SGD, epsilon {epsilon:g} (z = {multiplier:.2f})"
        yield name, PluginSpec(name="dp-sgd", options={"noise_multiplier": multiplier}), published


def noise_of(epsilon: float) -> float:
    """Return the noise multiplier of DP-SGD for an epsilon.

    Batch size 16, sentences and steps are FILM's; delta is 1 / sentences.
    The paper prints neither delta nor the multiplier.
    """
    from opacus.accountants.utils import get_noise_multiplier

    return float(
        get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=1 / SENTENCES,
            sample_rate=16 / SENTENCES,
            steps=STEPS,
            accountant="rdp",
        )
    )


def _rates(snapshot: Snapshot, simulator: Simulator, defense: PluginSpec) -> tuple[dict[str, float], dict[str, float]]:
    """Return precision and recall of the bag as printed, and of `embedding-rows`."""
    rng = torch.Generator().manual_seed(simulator.what.seed)
    seen = defended(snapshot, defense, rng)
    true = {token for ids in snapshot.truth.sequences() for token in ids}
    table = str(word_embedding(seen.model))
    rows = seen.update[table]  # (V, D)
    plugin = attacks.create("embedding-rows")
    own = rates_of(set(plugin(seen, rng, Budget(60.0)).tokens or ()), true) if plugin.applies(seen) else {}
    return rates_of(printed_bag(rows, seen.noise_sigma), true), own


def printed_bag(rows: torch.Tensor, sigma: float) -> set[int]:
    """Return the tokens whose row has an entry above FILM's threshold.

    Args:
        rows: (V, D) update of the word embedding.
        sigma: standard deviation of declared noise; 0 without noise. The threshold is sigma sqrt(2 ln D) (Sec. 6.3).
    """
    above = rows.abs().amax(dim=1) > sigma * math.sqrt(2 * math.log(rows.shape[1]))
    return set(above.nonzero().flatten().tolist())


def rates_of(bag: set[int], true: set[int]) -> dict[str, float]:
    """Return precision and recall of a set of tokens; an empty set has no precision.

    >>> rates_of({1, 2, 3, 4}, {1, 9})
    {'recall': 0.5, 'precision': 0.25}
    """
    right = len(bag & true)
    return {"recall": right / len(true)} | ({"precision": right / len(bag)} if bag else {})


def repetition(options: argparse.Namespace, folder: Path) -> None:
    """Print recall and precision of sentences after so many beam searches."""
    print(
        "| victim | data | B | n | attack | beam searches | paper, Table 3: recall | precision | here: recall | precision | s of computing a batch |"
    )
    print(f"|{' --- |' * 11}")
    for client, named in clients(options, folder):
        simulator = client.simulator()
        for preset in ("paper", "honest"):
            for count, published in TABLE_3.items():
                if count > options.most_beams:
                    continue
                spec = PluginSpec.parse(f"film(preset={preset}, sentences={count}, phrase_steps=0, token_steps=0)")
                rates, seconds = [], []
                for snapshot in simulator:
                    found = attacked(snapshot, simulator, spec, NONE, options.budget, named)
                    texts = [simulator.tokenizer.decode(ids) for ids in snapshot.truth.sequences()]
                    rates.append(dict(zip(("recall", "precision"), found_by_any(found.guesses, texts), strict=True)))
                    seconds.append(found.seconds)
                where = (
                    client.victim.name,
                    client.data.parent.name,
                    client.batch_size,
                    len(rates),
                    f"film, {preset}, beams only",
                )
                of_paper = [f"{value:.2f}" for value in published]
                here = cells(means(rates), ("recall", "precision"))
                print(line((*where, count, *of_paper, *here, f"{median(seconds):.1f}")), flush=True)


def clients(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Client, Named]]:
    """Yield each client of the table, and the named entities of its texts."""
    from leakaudit.models.loading import load_tokenizer

    for victim in options.victims:
        tokenizer = load_tokenizer(victim)
        files = []
        for path in options.data:
            rows = kept_rows(read_rows(path), tokenizer, options.min_tokens, options.max_tokens)
            files.append((write_rows(folder / victim.name / path.parent.name / path.name, rows), rows))
        for file, rows in files:
            named = {row["text"]: entities_in(row) for row in rows}
            for size, batches in map(_size, options.sizes):
                yield Client(victim, file, size, batches, options.seed, tuple(options.freeze), options.mode), named


def _size(text: str) -> tuple[int, int]:
    size, _, batches = text.partition(":")
    return int(size), int(batches or 1)


def head(options: argparse.Namespace, folder: Path) -> None:
    """Print what holds for every row."""
    print(f"seeds [{options.seed}]; {options.min_tokens} to {options.max_tokens} tokens a sentence; ", end="")
    tagged = any(entities_in(row) for path in options.data for row in read_rows(path))
    print("at least one named entity; " if tagged else "no filter on named entities; ", end="")
    print("FILM's filter on GPT-2's perplexity is not applied. ", end="")
    print(
        f"Budget {options.budget:g} s of computing an attempt, frozen: {options.freeze or 'nothing'}, mode: {options.mode}.\n"
    )
    print(
        "Victims (other weights than the paper's, whose GPT-2 base has 117 M parameters and a perplexity of about 11):\n"
    )
    for victim in options.victims:
        files = list(dict.fromkeys(client.data for client, _ in clients(_only(options, victim), folder)))
        print(f"- {described(victim, files)}")
    print()


def _only(options: argparse.Namespace, victim: Path) -> argparse.Namespace:
    return argparse.Namespace(**(vars(options) | {"victims": [victim]}))


TABLES: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "sentences": sentences,
    "bags": bags,
    "repetition": repetition,
}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--victims", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="JSONL with text; spans or entities where known"
    )
    parser.add_argument("--sizes", nargs="+", default=["1:20", "16:5", "64:2", "128:1"], help="batch size:batches")
    parser.add_argument("--attacks", nargs="+", default=[], help="default: every attack that the table knows")
    parser.add_argument("--ablation", choices=list(ABLATIONS), help="settings of FILM instead of attacks")
    parser.add_argument("--defenses", nargs="+", default=["none"])
    parser.add_argument("--freeze", nargs="*", default=[])
    parser.add_argument("--mode", choices=["eval", "train"], default="eval", help="train: dropout on")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of computing an attempt")
    parser.add_argument("--most-beams", type=int, default=100, help="of the table repetition")
    parser.add_argument("--min-tokens", type=int, default=LEAST)
    parser.add_argument("--max-tokens", type=int, default=MOST)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--show", type=int, default=0, help="guesses to print of as many batches, for a look at one's own texts"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        head(options, Path(folder))
        TABLES[options.table](options, Path(folder))


if __name__ == "__main__":
    main()
