"""Readers of the span attack: one for each kind of update.

A reader may import the modules of `algorithms.span`, and never another reader's private names.
"""

__all__ = ["bag_of_words", "decoder", "dropout", "early_dropout", "encoder", "local_steps", "lora", "noisy"]
