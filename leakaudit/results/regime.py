"""The regime of a run in words: what decides which attack can read its updates."""

from __future__ import annotations

from leakaudit.results.recovery import join
from leakaudit.results.schema import AttackEntry, Regime, Results
from leakaudit.results.wording import counted


def regime_in_words(results: Results) -> list[str]:
    """Return sentences on how the audited steps stand to what attacks need.

    They never present a large batch as protection. Results before 1.4 have no such sentences.
    """
    return [*_about_size(results), *_about_training(results.regime)]


def _about_size(results: Results) -> list[str]:
    """Compare the tokens of a step with the hidden size of the model."""
    regime = results.regime
    known = [step for step in results.steps if step.beyond_hidden is not None]
    if not known or not regime.tokens or regime.hidden is None:
        return []
    beyond = sum(bool(step.beyond_hidden) for step in known)
    size = f"The largest step has {regime.tokens} tokens, and the hidden size of the model is {regime.hidden}."
    if not beyond:
        return [
            f"{size} Every step has fewer different tokens than that. Larger batches were not tested, and they are no protection."
        ]
    which = f"{beyond} of {counted(len(known), 'step')} {'has' if beyond == 1 else 'have'} as many or more."
    return [f"{size} {which} That is no protection. {_who_reads(results)}"]


def _who_reads(results: Results) -> str:
    """Say which attacks on texts end at the hidden size, and which do not."""
    of_texts = {
        name: entry
        for name, entry in results.catalogue.attacks.items()
        if entry.goal != "labels" and name in results.run.battery.attacks
    }
    limited = [name for name, entry in of_texts.items() if entry.token_limit]
    others = [name for name, entry in of_texts.items() if not entry.token_limit and _ran(results, name)]
    said = f"There {join(limited)} can say nothing. " if limited else ""
    if not others:
        return f"{said}No other attack of this battery read these steps, so they were not tested."
    kinds = [f"{name} ({_what(of_texts[name])})" for name in others]
    verb = "does" if len(others) == 1 else "do"
    return f"{said}{join(kinds)} {verb} not end there and ran."


def _what(entry: AttackEntry) -> str:
    return {"text": "texts", "words": "words only"}.get(entry.goal, entry.goal)


def _ran(results: Results, attack: str) -> bool:
    """Return whether an attack ran on a step beyond the hidden size."""
    beyond = {step.id for step in results.steps if step.beyond_hidden}
    return any(a.attack == attack and a.finished and a.step in beyond for a in results.attempts)


def _about_training(regime: Regime) -> list[str]:
    """Say which parts are trained, and what their updates give away."""
    said = []
    if regime.adapters_rank is not None:
        rank = f" of rank {regime.adapters_rank}" if regime.adapters_rank else ""
        said.append(f"Only adapters{rank}, and parts that are trained beside them, are sent.")
    if regime.embeddings == "frozen":
        said.append("The word embeddings are frozen, so no rows of theirs name words; other layers still tell texts.")
    elif regime.embeddings == "trained" and regime.head == "tied":
        said.append(
            "The word embeddings are trained and are also the output head: every row is filled, and rows of words of the batch stand out "
            "in batches of any size."
        )
    elif regime.embeddings == "trained":
        said.append("The word embeddings are trained, so their rows name the words of a batch of any size.")
    if regime.head == "trained":
        said.append(
            "The output head is trained, so its update tells labels; of a language model, the words to predict."
        )
    return said
