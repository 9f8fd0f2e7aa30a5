"""Sentences from rows that few occurrences of a word wrote, in any batch size.

Encoders (`encoder`): a word that occurs once leaves in its row of the word embedding's update the gradient at its place and nothing else.
`rows` finds these words and their places, and `dropped_inputs` their dropout. `sentences` simulates drafts of one sentence alone, and
`agreement` compares them with the rows. `grouping` finds the rare words of one sentence, `filling` and `exchange` the words between
them.

Language models (`decoder_reader`): the head's row of a token holds the final states of the prefixes that the token follows.
`next_token_rows` tests prefixes against them, `sentence_beam` grows sentences, `sentence_scores` judges them by what they would add to the
rows, `sentence_rows` and `decoder_rest` take found sentences out of all rows.

The package may import `plugins`, `models`, the public half of `client`, and other algorithms.
"""

__all__ = [
    "agreement",
    "decoder_prefixes",
    "decoder_reader",
    "decoder_rest",
    "dropped_inputs",
    "encoder",
    "exchange",
    "filling",
    "grouping",
    "next_token_rows",
    "rows",
    "sentence_beam",
    "sentence_rows",
    "sentence_scores",
    "sentences",
]
