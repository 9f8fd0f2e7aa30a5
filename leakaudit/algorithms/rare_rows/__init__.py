"""Batches read sentence by sentence from the rows of word tables.

`decoder_reader` reads the batches of causal language models. It has no limit at the hidden size.
"""
