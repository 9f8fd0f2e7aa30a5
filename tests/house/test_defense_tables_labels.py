"""The defence tables of LLG and GRAB.

The papers' rows, and the published compression.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakaudit.config.audit import PluginSpec
from leakaudit.registry import defenses
from tests.benchmarks.defense_tables_labels import FIGURE_7, TABLE_6, TABLE_7, WIDTH, as_released, defense_of, grab_rows

TABLE_1_SGD = "93.4 89.9 <= 10.1 89 86.1 <= 52.4 93.4 93.7 91.9"
TABLE_1_AVERAGE = "94.6 91.4 <= 13.5 91.2 90.5 52.5 92.8 91.6 89.3"
GRAB_4 = "89.2 65.8 78.8 89.4 67.8 80.8 87.6 65.3 78.0 85.9 60.2 75.4"
GRAB_3 = "0.8 0.0 0.7 0.9 0.0 0.9 0.9 0.0 0.9 0.7 0.0 0.7"
LAMP_COS = "27.9 8.8 21.3 7.9 1.8 6.7 0.1 0.0 0.1 0.0 0.0 0.0"


def test_the_accuracies_are_those_of_llg_table_1() -> None:
    """The lines are typed as the paper prints them: noise, clipping, compression."""
    for number, printed in enumerate((TABLE_1_SGD, TABLE_1_AVERAGE)):
        assert " ".join(row.accuracy[number] for row in FIGURE_7) == printed


def test_the_rows_are_those_of_grab_table_7() -> None:
    """Each line of the paper has R-1, R-2 and R-L of the four shares."""
    for printed, lines in ((GRAB_4, [row.grab for row in TABLE_7]), (GRAB_3, [row.unmasked for row in TABLE_7])):
        assert [float(word) for word in printed.split()] == [value for line in lines for value in line]
    assert [float(word) for word in LAMP_COS.split()] == [value for row in TABLE_7 for value in row.lamp]
    assert [(row.share, row.mcc) for row in TABLE_7] == [(0.75, 0.72), (0.9, 0.67), (0.95, 0.61), (0.99, 0.45)]


def test_the_rows_are_those_of_grab_table_6() -> None:
    """The lines are typed as the paper prints them."""
    assert [row.sigma for row in TABLE_6] == [0.001, 0.002, 0.005, 0.01, 0.02, 0.05]
    assert [row.mcc for row in TABLE_6] == [0.74, 0.68, 0.60, 0.51, 0.45, 0.25]
    assert [f"{row.epsilon:.2e}" for row in TABLE_6] == [
        "1.10e+10",
        "2.75e+09",
        "4.38e+08",
        "1.08e+08",
        "2.55e+07",
        "2.37e+06",
    ]


@pytest.mark.parametrize("table", ["grab-6", "grab-7"])
def test_every_row_of_grab_is_a_defence_that_can_be_made(table: str) -> None:
    """The row names a defence and its strength, and has the paper's cells."""
    rows = grab_rows(table)
    assert len(rows) == 1 + len(TABLE_6 if table == "grab-6" else TABLE_7)
    for spec, cells in rows.items():
        one = PluginSpec.parse(spec)
        assert defenses.create(one.name, one.options) is not None
        assert one.label == spec
        assert cells.count("|") == 5


def test_noise_of_grab_has_the_size_that_it_has_in_bert_base() -> None:
    """A normalised matrix of 768 x 768 has entries of 1/768; sigma 0.01 is 7.68."""
    matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    size = float((matrix / matrix.norm()).square().mean().sqrt())
    assert "gaussian-noise(scale=7.68)" in grab_rows("grab-6")
    assert 0.01 / size == pytest.approx(7.68, rel=1e-3)


def test_the_noise_of_fedavg_is_that_of_the_sum_of_ten_gradients() -> None:
    """An update is the mean of the ten, so its noise is a tenth."""
    update = {"w": torch.zeros(400, 100)}
    for steps in (1, 10):
        sent = defense_of(FIGURE_7[1], steps).changed(update, torch.Generator().manual_seed(0))
        assert float(sent["w"].std()) == pytest.approx(0.1 / steps, rel=0.02)


def _update(row_sums: list[float]) -> dict[str, Tensor]:
    """Return a network's update: one more tensor, and a head of four classes."""
    head = torch.tensor(row_sums)[:, None].expand(4, 2) / 2
    return {
        "first": torch.tensor([-0.1]),
        "second": torch.tensor([9.0]),
        "weight": head,
        "bias": torch.tensor([1.0, -1.0, 0.0, 0.0]),
    }


def test_the_published_compression_withholds_a_tensor_by_the_class_of_its_number() -> None:
    """The head's weight is tensor 2, so the row sum of class 2 decides.

    Its own entries do not.
    """
    sent = as_released(_update([3.0, -4.0, 0.5, 0.5]), 0.5)
    assert not sent["weight"].any()
    assert not sent["bias"].any()
    sent = as_released(_update([0.5, 0.5, 3.0, -4.0]), 0.5)
    assert sent["weight"].equal(_update([0.5, 0.5, 3.0, -4.0])["weight"])
    assert not sent["first"].any()


def test_the_published_compression_sends_a_tensor_with_a_large_sum() -> None:
    """Its cache sends what has grown above the bar, which a head's gradient cannot.

    It adds up to 0.
    """
    sent = as_released(_update([0.5, 0.5, 3.0, -4.0]), 0.5)
    assert float(sent["second"]) == 9.0
