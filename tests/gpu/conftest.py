"""Tests on a GPU are skipped without one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.record import DEVICE

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, and needed for repeatable products of matrices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu`, unless a GPU is here or a CPU was asked for."""
    if DEVICE == "cpu" or torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="torch finds no GPU; LEAKAUDIT_GPU_TESTS_DEVICE=cpu tries the tests on a CPU")
            )
