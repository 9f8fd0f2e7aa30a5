"""Numbers that the papers of `tests.benchmarks.defense_tables` print.

LAMP (Balunovic et al., NeurIPS 2022) attacks BERT-base on CoLA with B = 1 and n = 100; its prior is GPT-2. FILM (Gupta et al. 2022, arXiv
2205.08514) attacks GPT-2 base on WikiText-103 with B = 16. The rates of FILM's Table 4 stand in `tests.benchmarks.film_published`.
"""

from __future__ import annotations

UNDEFENDED = {
    "DLG": (59.3, 7.7, 46.2),
    "TAG": (78.9, 10.2, 53.3),
    "LAMP, cosine": (89.6, 51.9, 76.2),
    "LAMP, L2+L1": (87.5, 47.5, 73.2),
}
"""LAMP, Table 1, CoLA, BERT-base, B = 1, n = 100: attack -> R-1, R-2, R-L in per cent."""
LAMP_5: dict[float, dict[str, tuple[float, float, float]]] = {
    0.0: UNDEFENDED,
    0.001: {
        "DLG": (60.0, 7.2, 46.3),
        "TAG": (70.7, 6.0, 50.8),
        "LAMP, cosine": (81.2, 42.7, 69.4),
        "LAMP, L2+L1": (79.2, 32.8, 64.1),
    },
    0.002: {
        "DLG": (61.3, 7.5, 47.0),
        "TAG": (67.1, 8.4, 49.9),
        "LAMP, cosine": (70.6, 29.5, 60.9),
        "LAMP, L2+L1": (74.3, 31.0, 61.9),
    },
    0.005: {
        "DLG": (58.8, 8.0, 46.4),
        "TAG": (64.1, 6.5, 47.6),
        "LAMP, cosine": (43.3, 9.45, 39.7),
        "LAMP, L2+L1": (73.5, 29.7, 60.9),
    },
    0.01: {
        "DLG": (56.4, 6.3, 44.8),
        "TAG": (59.6, 6.5, 46.2),
        "LAMP, cosine": (27.7, 2.0, 27.6),
        "LAMP, L2+L1": (69.6, 29.4, 60.6),
    },
}
"""LAMP, Table 5: sigma, in the units of the gradient -> attack -> R-1, R-2, R-L. Sigma 0 is Table 1."""
LAMP_5_MCC = {0.0: 0.557, 0.001: 0.551, 0.002: 0.526, 0.005: 0.464, 0.01: 0.364}
"""Sigma -> Matthews correlation of the model that was trained with this noise (LAMP, Table 5 and Section 5)."""
LAMP_8: dict[float, tuple[float, float, float]] = {
    0.0: (89.6, 51.9, 76.2),
    0.75: (79.4, 34.5, 66.3),
    0.9: (61.9, 20.1, 53.9),
    0.95: (39.0, 5.8, 37.4),
    0.99: (24.7, 0.0, 24.7),
}
"""LAMP, Table 8: share of zeroed entries -> R-1, R-2, R-L of LAMP with the cosine."""
LAMP_8_MCC = {0.0: 0.557, 0.75: 0.557, 0.9: 0.534, 0.95: 0.515, 0.99: 0.371}
"""Share of zeroed entries -> Matthews correlation."""
FILM_4_PRUNING = {0.0: 11.46, 0.9: 11.57, 0.99: 12.77, 0.999: 15.34, 0.9999: 19.21}
"""FILM, Table 4 a: share of pruned entries -> perplexity of the model that was trained so."""
FILM_4_DP_SGD = {1.0: 16.31, 5.0: 14.32, 10.0: 12.86, 15.0: 11.98}
"""FILM, Table 4 b: epsilon -> perplexity; 11.46 without a defence."""
FILM_4_NOISE = {1.0: 0.754, 5.0: 0.44, 10.0: 0.368, 15.0: 0.335}
"""Epsilon -> noise multiplier. Not in the paper: what `tests.benchmarks.film.noise_of` returns, kept because its search takes half a minute."""
