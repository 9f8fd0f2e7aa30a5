"""Each block of README's "One paste" runs in an environment of its own.

Its first line alone makes that environment.

    python -m pytest -m integrations tests/integrations/test_one_paste.py -s

With `-s` a test prints a row of the table in docs/measurements/one_paste.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.one_paste import built_wheel, run
from tests.support.one_paste import STACKS

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built wheel, which takes the place of the one in a package index."""
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("stack", STACKS)
def test_a_block_alone_leads_to_a_verdict(stack: str, wheel: Path, tmp_path: Path) -> None:
    """Every kept step is verified, and the policy judges."""
    row = run(stack, wheel, tmp_path)
    print(f"\n{row}")
    assert set(row.stamps) == {"verified"}
    assert row.verdict in ("PASS", "FAIL", "INCONCLUSIVE")
