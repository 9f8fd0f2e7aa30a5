"""Numbers that FILM's paper prints (Gupta et al. 2022, arXiv 2205.08514).

Its victims are GPT-2 base (117 M parameters), trained on the private sentences, with a perplexity of about 11 on them.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Mean ROUGE F and named entity recovery ratio of 20 batches."""

    rouge1: float
    rouge2: float
    rougeL: float
    nerr: float


TABLE_9 = {
    ("wikitext", 1): Published(0.74, 0.44, 0.54, 0.25),
    ("wikitext", 16): Published(0.38, 0.16, 0.27, 0.25),
    ("enron", 1): Published(0.83, 0.57, 0.70, 0.35),
    ("enron", 16): Published(0.44, 0.24, 0.33, 0.69),
}
"""Rows of FILM by data set and batch size; sizes 4 and 32 are left out."""

TABLE_10 = {
    ("wikitext", 1): Published(0.74, 0.44, 0.54, 0.28),
    ("wikitext", 16): Published(0.38, 0.16, 0.27, 0.26),
    ("wikitext", 64): Published(0.34, 0.14, 0.26, 0.36),
    ("wikitext", 128): Published(0.37, 0.14, 0.29, 0.28),
    ("enron", 1): Published(0.73, 0.45, 0.61, 0.34),
    ("enron", 16): Published(0.41, 0.20, 0.31, 0.40),
    ("enron", 64): Published(0.37, 0.18, 0.29, 0.35),
    ("enron", 128): Published(0.37, 0.19, 0.29, 0.38),
}

TABLE_3 = {1: (0.03, 0.50), 5: (0.13, 0.36), 10: (0.19, 0.28), 20: (0.25, 0.21), 50: (0.30, 0.12), 100: (0.34, 0.07)}
"""Beam searches -> recall and precision of sentences with ROUGE-L above 0.25; WikiText, B = 16."""

TABLE_4_PRUNING = {0.0: (1.00, 1.00), 0.9: (1.00, 1.00), 0.99: (1.00, 1.00), 0.999: (1.00, 0.98), 0.9999: (1.00, 0.90)}
"""Share of pruned entries -> precision and recall of tokens; WikiText, B = 16."""

TABLE_4_DP_SGD = {1.0: (0.00, 0.00), 5.0: (0.29, 0.01), 10.0: (0.88, 0.17), 15.0: (0.97, 0.49)}
"""Epsilon -> precision and recall of tokens; WikiText, B = 16."""

SENTENCES, STEPS = 203_456, 90_000
"""Training sentences of WikiText and training steps, which decide how much noise an epsilon needs."""
