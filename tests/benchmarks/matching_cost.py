"""Cost of a step of gradient matching.

Run `python -m tests.benchmarks.matching_cost --data FILE.jsonl --sentences 4`.

Prints, for each sentence, CPU milliseconds of one thread, medians of `--repeats`: a step and a score of one candidate as they are usually written (every
parameter's gradient formed, a backward pass through the backward pass), and those of this project, for one candidate and for many side by side.
The last column is what LAMP's settings in the paper cost as usually written: 1,000 scores to start, 2,000 steps, 26 rounds of 200 scores. Eval mode,
embeddings frozen, lengths and labels granted, cosine distance with the length regulariser. Not collected by pytest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Objective
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.config.simulation import Simulation
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
    options = parser.parse_args()
    torch.set_num_threads(1)
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
            matcher = Matcher(seen, lengths, Objective("cosine"), length_weight=1.0)
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
