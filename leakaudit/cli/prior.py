"""`leakaudit prior`: list, train and try priors of language."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leakaudit.cli.common import EXISTING, clear_errors
from leakaudit.errors import ConfigError

if TYPE_CHECKING:
    from leakaudit.algorithms.language_models.training import Progress


@click.group(short_help="Make and try priors of language.")
def prior() -> None:
    """Make and try priors, which tell an attack how likely a text is."""


@prior.command("list", short_help="List the priors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@clear_errors
def list_command(as_json: bool) -> None:
    """List the priors: what each knows, what it needs, and its source."""
    from leakaudit.cli.catalogue import catalogue

    catalogue("priors", ("knows", "source"), as_json)


@prior.command(short_help="Train a prior on a text file.")
@click.option("--text", "text", type=EXISTING, required=True, help="Text file, or JSONL with the field `text`.")
@click.option(
    "--tokenizer",
    type=EXISTING,
    required=True,
    help="Folder of the victim's tokenizer; the prior counts its tokens.",
)
@click.option("--out", type=EXISTING, required=True, help="File for an n-gram model, folder for a language model.")
@click.option(
    "--kind",
    type=click.Choice(["causal-lm", "ngram"]),
    default="causal-lm",
    show_default=True,
    help="Language model to train.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Minutes of training.",
)
@click.option("--order", type=click.IntRange(min=1), default=4, show_default=True, help="Tokens of the longest n-gram.")
@click.option(
    "--held-out",
    "share",
    type=click.FloatRange(min=0, max=0.5),
    default=0.02,
    show_default=True,
    help="Share of the texts that are kept out of training, to measure perplexity; 0 measures none.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the held-out texts and of the training.")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as one JSON document.")
@clear_errors
def train(
    text: Path,
    tokenizer: Path,
    out: Path,
    kind: str,
    minutes: float,
    order: int,
    share: float,
    seed: int,
    as_json: bool,
) -> None:
    """Make a prior from the texts in a file.

    A small language model takes minutes, an n-gram model seconds.

    The printed perplexity is measured on texts that were kept out of training.
    """
    from leakaudit.algorithms.language_models.training import held_out, save_causal_lm, train_causal_lm
    from leakaudit.models.loading import load_tokenizer
    from leakaudit.plugins.prior_loading import read_texts
    from leakaudit.priors.ngram import build_ngram, write_ngram

    theirs = load_tokenizer(tokenizer)
    learn, judge = held_out(read_texts(text), share, seed)
    if kind == "ngram":
        out.parent.mkdir(parents=True, exist_ok=True)
        write_ngram(out, build_ngram(learn, theirs, order), theirs)
    else:
        if out.is_file():
            raise ConfigError(f"--out {out}: is a file; a language model is a folder")
        save_causal_lm(out, train_causal_lm(learn, theirs, minutes, seed=seed, report=_progress()), theirs)
    facts: dict[str, Any] = {"kind": kind, "out": str(out), "texts": len(learn)}
    if judge:
        facts |= {"held_out_texts": len(judge), "perplexity": round(_judged(out, theirs, judge), 1)}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(f"{out}: {kind} of {len(learn)} texts")
    if judge:
        click.echo(f"perplexity {facts['perplexity']:g} a token on {len(judge)} texts that it has not seen")


def _judged(prior_path: Path, tokenizer: Any, texts: list[str]) -> float:
    """Return a prior's perplexity on texts, including the ends of texts."""
    from leakaudit.algorithms.language_models.training import perplexity
    from leakaudit.plugins.prior_loading import load_prior
    from leakaudit.plugins.prior_protocol import tokenizer_vocabulary

    scorer = load_prior(str(prior_path), vocabulary=tokenizer_vocabulary(tokenizer))
    ids = [row for row in tokenizer(texts, add_special_tokens=False)["input_ids"] if row]
    return perplexity(scorer.nll(ids), [len(row) + 1 for row in ids])


def _progress() -> Any:
    """Return a function that prints a line on stderr after each tenth of training."""
    shown = -1

    def line(now: Progress) -> None:
        nonlocal shown
        tenth = int(10 * now.share)
        if tenth > shown:
            shown = tenth
            click.echo(f"{now.share:4.0%}  step {now.step}  {now.nats:.2f} nats a token", err=True)

    return line


@prior.command(short_help="Score texts with a prior.")
@click.option("--prior", "what", default="ngram", show_default=True, help="Name with knobs, file or folder.")
@click.option("--tokenizer", type=EXISTING, required=True, help="Folder of the victim's tokenizer.")
@click.option("--text", "text", type=EXISTING, help="Text file or JSONL; prints the perplexity over all of it.")
@click.argument("sentences", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON document.")
@clear_errors
def score(what: str, tokenizer: Path, text: Path | None, sentences: tuple[str, ...], as_json: bool) -> None:
    """Print the nats a token and the perplexity of SENTENCES, or of a file.

    If neither is given, sentences are read from stdin, one per line.
    """
    import math

    from leakaudit.algorithms.language_models.training import perplexity
    from leakaudit.models.loading import load_tokenizer
    from leakaudit.plugins.prior_loading import load_prior, read_texts
    from leakaudit.plugins.prior_protocol import tokenizer_vocabulary

    if text is not None and sentences:
        raise ConfigError("give sentences or --text, not both")
    given = read_texts(text) if text else list(sentences) or [line.strip() for line in sys.stdin if line.strip()]
    if not given:
        raise ConfigError("nothing to score: give sentences, --text, or lines on stdin")
    theirs = load_tokenizer(tokenizer)
    scorer = load_prior(what, vocabulary=tokenizer_vocabulary(theirs))
    ids = theirs(given, add_special_tokens=False)["input_ids"]
    nats = scorer.nll(ids)
    over_all = perplexity(nats, [len(row) + 1 for row in ids])
    if as_json:
        click.echo(json.dumps({"nats": [] if text else nats, "texts": len(given), "perplexity": over_all}, indent=1))
        return
    if text is None:
        for sentence, value in zip(given, nats, strict=True):
            click.echo(f"{value:6.2f} nats a token, perplexity {math.exp(value):9.1f}  {sentence}")
    click.echo(f"perplexity {over_all:.1f} a token over {len(given)} texts")
