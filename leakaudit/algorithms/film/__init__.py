"""FILM: sentences from a bag of words, a language model and gradient norms.

Source: Gupta et al., "Recovering Private Text in Federated Learning of Language Models", NeurIPS 2022. The bag (`bag`) comes from the word
embedding's update; beams over it (`beam`) are grown by a causal language model (`continuations`); perplexity and gradient norm
(`candidate_scores`) choose among reordered texts (`reordering`); `recovery` does all of it for several sentences.

The package may import `plugins`, `models`, `client.observation` and other algorithms.
"""

__all__ = ["bag", "beam", "candidate_scores", "continuations", "recovery", "reordering"]
