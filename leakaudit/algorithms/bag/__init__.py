"""The bag of words of a step: from the rows of tables to the words of the batch.

`word_bag` is the one function for other algorithms. It takes the word embedding's rows where every other row is zero, and tells the rows of
a tied table or of an output head from what the softmax does to all rows (`softmax_background`, `softmax_mixture`). An untied head also tells how often
each token is a target (`target_counts`). The rows of the position
embedding give the longest text (`leakaudit.algorithms.position_rows`).

The package may import `plugins`, `models`, the public half of `client`, and the parts that all families share (`above_noise`,
`embedding_rows`, `gradient_estimate`, `position_rows`).
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
