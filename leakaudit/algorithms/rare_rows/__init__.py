"""Sentences from rows that few occurrences of a word wrote, in any batch size.

Encoders (`encoder`): a word that occurs once leaves in its row of the word embedding's update the gradient at its place and nothing else.
`rows` finds these words and their places, and `dropped_inputs` their dropout. `sentences` simulates drafts of one sentence alone, and
`agreement` compares them with the rows. `same_sentence` and `grouping` find the rare words of one sentence, `filling` and `exchange` the
words between them; under dropout `insertion` adds frequent words.

Language models (`decoder_reader`): the head's row of a token holds the final states of the prefixes that the token follows.
`next_token_rows` tests prefixes against them, and `update_pull` against the update of the attention's output layers. `sentence_beam` grows sentences,
`sentence_scores` judges them by what they would add to the rows, `sentence_rows` and `decoder_rest` take found sentences out of all rows.

The package may import `plugins`, `models`, the public half of `client`, and other algorithms.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
