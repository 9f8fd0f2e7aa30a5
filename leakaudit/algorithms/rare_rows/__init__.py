"""Sentences from the rows of word tables.

A word that occurs once in a batch leaves, in its row of the word embedding's update, the gradient at its place and nothing else: D exact
numbers, whatever the number of other texts. Guesses of one sentence alone are simulated until all such rows agree with it
(`encoder`). In a causal language model the head's rows are sums of the states of prefixes, so sentences are grown along them
(`decoder_reader`).
"""
