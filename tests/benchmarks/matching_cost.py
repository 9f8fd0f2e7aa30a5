"""Cost of a step of gradient matching.

Run `python -m tests.benchmarks.matching_cost --data FILE.jsonl --sentences 4`.

Prints, for each sentence, CPU milliseconds of one thread, medians of `--repeats`: a step and a score of one candidate as they are usually written (every
parameter's gradient formed, a backward pass through the backward pass), and those of this project, for one candidate and for many side by side.
The last column is what LAMP's settings in the paper cost as usually written: 1,000 scores to start, 2,000 steps, 26 rounds of 200 scores. Eval mode,
embeddings frozen, lengths and labels granted, cosine distance with the length regulariser. Not collected by pytest.

With `--decoders` it prints the cost of a causal language model beside a classifier instead: an encoder with two classes, and decoders with the same
number of blocks, hidden size and vocabulary whose labels are the next tokens. All weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.config.simulation import Simulation
from leakaudit.plugins.testing.small_models import (
    TEXT_WORDS,
    bert_tokenizer,
    client_step,
    gpt2_config,
    gpt2_tokenizer,
    hf,
)
from tests.benchmarks.span import arguments

SCORES, STEPS = 1000 + 26 * 200, 2000
"""LAMP, Sec. 5 and App. D: n_init, permutations, rounds every 75 steps, for one sentence."""


class Plain:
    """The usual way: gradients of all parameters formed, and differentiated again."""

    def __init__(self, seen: Observation, label: int) -> None:
        """Take what is shared of the model."""
        self._model: nn.Module = seen.model
        named = dict(seen.model.named_parameters())
        self._parameters = [named[name].requires_grad_() for name in seen.update]
        self._targets = list(seen.update.values())
        self._label = torch.tensor([label])

    def loss(self, embeddings: Tensor, *, graph: bool) -> Tensor:
        """Return one minus the mean cosine for (1, T, D) embeddings."""
        logits = self._model(inputs_embeds=embeddings).logits
        loss = functional.cross_entropy(logits, self._label)
        gradients = torch.autograd.grad(loss, self._parameters, create_graph=graph)
        pairs = zip(gradients, self._targets, strict=True)
        return 1 - torch.stack([functional.cosine_similarity(g.flatten(), t.flatten(), dim=0) for g, t in pairs]).mean()

    def step(self, embeddings: Tensor) -> None:
        """Take the loss's derivative by the embeddings."""
        live = embeddings.detach().requires_grad_()
        torch.autograd.grad(self.loss(live, graph=True), live)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of some work, once more than it is counted."""
    spent = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work()
        spent.append(1000 * (time.process_time() - began))
    return median(spent[1:])


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__.splitlines()[0], sentences=4)
    parser.set_defaults(seeds=[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decoders", action="store_true", help="compare language models with a classifier instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.decoders:
        compare_decoders(options.repeats)
    else:
        compare_with_usual(options)


BLOCKS, HIDDEN, ROWS, TOKENS = 4, 384, 30522, (8, 16, 28)
"""The shape of both models, that of the trained decoders of `tests.benchmarks.decoders`, and the lengths that are timed."""


def compare_decoders(repeats: int) -> None:
    """Print a row for each length: steps, scores and their ratios to the encoder's."""
    print(f"{BLOCKS} blocks, hidden size {HIDDEN}, vocabulary {ROWS}")
    print("| tokens | encoder, two classes: step, score | decoder, head tied: step, score (ratios) | head untied |")
    print("| --- | --- | --- | --- |")
    for tokens in TOKENS:
        costs = [_cost(_seen(kind, tokens), tokens, repeats) for kind in ("encoder", "tied", "untied")]
        cells = [f"{costs[0][0]:.0f}, {costs[0][1]:.0f}"]
        for step, score in costs[1:]:
            cells.append(f"{step:.0f}, {score:.0f} ({step / costs[0][0]:.1f}, {score / costs[0][1]:.1f})")
        print(f"| {tokens} | {' | '.join(cells)} |", flush=True)


def _seen(kind: str, tokens: int) -> Observation:
    """Return what is seen of a step on one text of that many tokens."""
    words = (TEXT_WORDS.split() * 2)[: tokens - 2 * (kind == "encoder")]
    text = " ".join(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "encoder":
            model = hf.BertForSequenceClassification(_encoder_config()).eval()
            return client_step(model, bert_tokenizer(), [text], [0]).observe()
        shape = gpt2_config(tie_word_embeddings=kind == "tied")
        shape.update({"n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": 12, "vocab_size": ROWS})
        decoder = hf.GPT2LMHeadModel(shape).eval()
    return client_step(decoder, gpt2_tokenizer(), [text], task="causal-lm").observe()


def _encoder_config() -> Any:
    return hf.BertConfig(
        vocab_size=ROWS,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=12,
        max_position_embeddings=32,
        attn_implementation="eager",
    )


def _cost(seen: Observation, tokens: int, repeats: int) -> list[float]:
    """Return the milliseconds of a step and of a score of one candidate."""
    granted = Granted(lengths=(tokens,), labels=(0,) if seen.facts.task == "classification" else None)
    matcher = Matcher(seen.granting(granted), (tokens,), Objective("cosine"), Matching(length_weight=1.0))
    one = matcher.candidates.random(1, torch.Generator().manual_seed(0))
    return _both(matcher, one, one, repeats)


def compare_with_usual(options: argparse.Namespace) -> None:
    """Print a row for each sentence: the usual way and ours."""
    print(
        "| tokens | usual: step, score | ours, N = 1: step, score | ours, side by side, each: step (N = 4), score | paper's settings, usual, s |"
    )
    print("| --- | --- | --- | --- | --- |")
    for seed in options.seeds:
        simulation = Simulation(
            model=options.model,
            data=options.data,
            batch_size=1,
            steps=max(1, options.sentences // len(options.seeds)),
            seed=seed,
            freeze=("embeddings",),
            grant=("labels", "lengths"),
            mode="eval",
        )
        for snapshot in Simulator(simulation):
            seen = ClientStep.of(snapshot).observe()
            lengths, labels = seen.facts.granted.lengths, seen.facts.granted.labels
            assert lengths is not None and labels is not None
            matcher = Matcher(seen, lengths, Objective("cosine"), Matching(length_weight=1.0))
            plain = Plain(seen, labels[0])
            rng = torch.Generator().manual_seed(0)
            one, four, many = (matcher.candidates.random(count, rng) for count in (1, 4, matcher.at_once))
            usual = [
                milliseconds(partial(plain.step, one.embeddings[0]), options.repeats),
                milliseconds(partial(plain.loss, one.embeddings[0], graph=False), options.repeats),
            ]
            cells = [_both(matcher, one, one, options.repeats), _both(matcher, four, many, options.repeats)]
            paper = (STEPS * usual[0] + SCORES * usual[1]) / 1000
            rows = [f"{step:.0f}, {score:.0f}" for step, score in [usual, *cells]]
            print(f"| {lengths[0]} | {' | '.join(rows)} (N = {matcher.at_once}) | {paper:.0f} |", flush=True)


def _both(matcher: Matcher, stepped: Candidate, scored: Candidate, repeats: int) -> list[float]:
    """Return a candidate's milliseconds of a step and of a score."""
    return [
        milliseconds(lambda: matcher.losses_and_derivatives(stepped), repeats) / len(stepped.embeddings),
        milliseconds(lambda: matcher.losses(scored), repeats) / len(scored.embeddings),
    ]


if __name__ == "__main__":
    main()
