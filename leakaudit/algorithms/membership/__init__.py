"""Who was in this round: scores of candidate texts, read from an update.

The adversary knows the model before the round, the update and candidate texts, and other texts of the same source that were not in the round
(the calibration texts). Whether a candidate was in the round is not known.

1. `candidates`: a text, with its label where that is known.
2. `readings`: the gradient and the loss of each text at the weights before the round.
3. `alignment`: how far the update points along a text's own gradient, beyond what other texts share with it.
4. `scores`: both together, in standard deviations of texts that were not in the round.

Letters: N candidates, M calibration texts, P read entries of the update.

The package may import `plugins`, `models`, the public half of `client`, and other algorithms.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
