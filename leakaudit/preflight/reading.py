"""What is read of an update: which attacks run on it, and how far they reach."""

from __future__ import annotations

from collections.abc import Iterator

from leakaudit.preflight.attack_table import READ_SENTENCES, READ_WORDS, RUNS_ON
from leakaudit.preflight.recipe import Reads, Recipe
from leakaudit.preflight.rules import optimizer_rule


def reads(recipe: Recipe) -> Reads:
    """Return what is read of the update that a configuration leads to."""
    column = column_of(recipe)
    attacks = set(RUNS_ON[column])
    if recipe.adapter is not None and recipe.trains_tables:
        attacks |= (
            READ_WORDS & RUNS_ON[column.removeprefix("adapters, ")] if recipe.rounds is None else {"embedding-rows"}
        )
    return Reads(column, tuple(sorted(attacks)), tuple(_lines(recipe, attacks)))


def column_of(recipe: Recipe) -> str:
    """Return the column of docs/attacks_by_update.md nearest to an update.

    It errs on the careful side.

    An optimizer whose rule is not known, and a number of local steps that is not known, count as several steps of AdamW.
    """
    adapters = recipe.adapter is not None
    if recipe.rounds is None:
        return "adapters, gradient" if adapters else "gradient"
    rule, one = optimizer_rule(recipe.optimizer), recipe.rounds.local_steps == 1
    if adapters:
        return "adapters, AdamW, K = 1" if one and rule in ("SGD", "AdamW") else "adapters, AdamW, K = 10"
    if rule == "SGD":
        return "SGD, K = 1" if one else "SGD, K = 4"
    return "AdamW, K = 1" if one and rule == "AdamW" else "AdamW, K = 4"


def _lines(recipe: Recipe, attacks: set[str]) -> Iterator[str]:
    for kind, names in (
        ("sentences", attacks & READ_SENTENCES),
        ("words", attacks & READ_WORDS),
        ("labels, of a classifier", attacks - READ_SENTENCES - READ_WORDS),
    ):
        if names:
            yield f"{kind}: {', '.join(sorted(names))}"
    yield _tokens(recipe)
    if recipe.adapter is not None and recipe.adapter.rank is not None:
        yield f"adapters of rank {recipe.adapter.rank}: an update of each matrix has at most {recipe.adapter.rank} directions"
    if recipe.trains_tables:
        yield "the word embedding is trained: its rows tell the words of a batch of any size, and `rare-rows` reads beyond 1 D"
    elif recipe.trains_tables is None:
        yield "whether the word embedding is trained is not known here; if it is, its rows tell the words of a batch"
    if recipe.rounds is not None:
        yield _rounds(recipe)


def _tokens(recipe: Recipe) -> str:
    most = recipe.most_tokens
    if most is None:
        return "tokens of a step: not known here (texts of a pass, or their length, are not in the file)"
    size = f"{recipe.texts} x {recipe.tokens} tokens" + (f" x {recipe.passes} passes" if recipe.passes > 1 else "")
    filled = "packed, so about" if recipe.packing else "at most"
    if recipe.hidden_size is None:
        return f"tokens of a step: {filled} {most:,} ({size}); the hidden size D is not known here (--model or --hidden-size)"
    share = most / recipe.hidden_size
    where = (
        "in reach of `span`" if share < 1 else "`span` reads steps below 1 D; shorter texts than the longest make fewer"
    )
    return f"tokens of a step: {filled} {most:,} ({size}) = {share:.2g} D, D = {recipe.hidden_size:,}: {where}"


def _rounds(recipe: Recipe) -> str:
    assert recipe.rounds is not None
    steps = recipe.rounds.local_steps
    if steps is None:
        return "local steps of a round: not known here; after several steps words were read, and no sentence"
    if steps == 1:
        return "one local step a round: whole texts were read after it"
    return f"{steps} local steps a round: words were read after several steps, and no sentence"
