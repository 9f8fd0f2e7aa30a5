"""Sentences from the rows of the word embedding that one occurrence of a word wrote.

A word that occurs once in a batch leaves, in its row of the word embedding's update, the gradient at its place and nothing else: D exact
numbers, whatever the number of other texts. Guesses of one sentence alone are simulated until all such rows agree with it.
"""
