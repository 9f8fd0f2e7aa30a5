"""Algorithms that several attacks share: one package per family.

An attack in `leakaudit.attacks` is a short plugin that calls one of them. The data flow is the same in every family: an
`Observation` (the update and the public model) goes in, a `Reconstruction` (texts, words or label counts) comes out.

- `span`: exact recovery by linear algebra. Its `__init__` describes the steps.
- `matching`: search for the batch whose gradient matches the update.
- `film`: sentences that a language model writes with the words of the batch.
- `rare_rows`: sentences from rows that few occurrences of a word wrote, in batches of any size.
- `bag`: the words of the batch, from the rows of tables.
- `labels`: label counts from the output layer.
- `language_models`: priors over texts.
- `membership`: which candidate texts were in a round.
- `adam_step`: guesses compared with the first step of Adam.
- `gradient_estimate`: the gradient that a difference of weights hides.
- `above_noise`, `embedding_rows`, `least_squares`, `noise_entries`, `padding`, `position_rows`, `precision`, `resimulation`: parts that the families share.

An algorithm never sees `Truth`, the client's step, stored snapshots or another attack.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
