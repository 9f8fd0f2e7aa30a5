"""`leakaudit attacks NAME`, and the headings of long help pages."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.cli.battery import specs_of
from leakaudit.config.audit import DEFAULT_ATTACKS, LABEL_ATTACKS, PluginSpec
from leakaudit.errors import ConfigError


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


def test_one_attack_tells_what_it_reads_every_option_and_an_example() -> None:
    """With the value of the preset where an option is not set."""
    said = " ".join(_run("attacks", "tag").stdout.split())
    for part in ("a search: it may use its whole --budget", "recovers: text", "adversary: Sees one", "source: TAG"):
        assert part in said
    assert "learning_rate (float | None; default: that of the preset, " in said
    assert '--attacks "tag(alpha=0.01)"' in said
    row = json.loads(_run("attacks", "tag", "--json").stdout)
    assert row["search"] and row["battery"] == [] and row["knobs"][0]["sentence"]


def test_one_defence_is_compared_with_none_and_found_by_its_old_name() -> None:
    """As old configurations spell it."""
    assert '--defenses "none,gaussian-noise(scale=1.0)"' in _run("defenses", "gaussian-noise").stdout
    assert _run("defenses", "clip-difference").stdout.startswith("clip-noise")
    assert _run("defenses", "none").stdout.rstrip().endswith('--defenses "none"')


def test_an_unknown_name_suggests_the_nearest() -> None:
    """In one line."""
    done = _run("attacks", "spam")
    assert done.exit_code == 2 and "did you mean 'span'?" in done.stderr


def test_the_list_marks_the_default_battery() -> None:
    """For texts and for arrays."""
    rows = json.loads(_run("attacks", "--json").stdout)
    for data, specs in (("texts", DEFAULT_ATTACKS), ("arrays", LABEL_ATTACKS)):
        assert {row["name"] for row in rows if data in row["battery"]} == {spec.name for spec in specs}
    assert "idlg  (in the default battery for texts and arrays)" in _run("attacks").stdout


@pytest.mark.parametrize("command", ["simulate", "frontier"])
def test_every_option_of_a_long_help_stands_below_a_heading(command: str) -> None:
    """A new option needs one; only `--help` has none."""
    said = _run(command, "--help").stdout
    headings = [line[:-1] for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:2] == ["Model and data", "Client"] and headings[-1] == "Other options"
    assert said.partition("Other options:")[2].split()[::2][0] in ("-h,", "--help")
    assert "--" not in said.partition("Other options:")[2].replace("--help", "")
    assert said.count("--text-field TEXT") == 1


def test_a_value_without_a_name_is_told_the_name() -> None:
    """Positions have no meaning."""
    with pytest.raises(
        ConfigError, match=r"0.1 stands without the name .* Did you mean gaussian-noise\(scale=0.1\)\?$"
    ):
        specs_of("none,gaussian-noise(0.1)")
    with pytest.raises(ConfigError, match=r"lists the options$"):
        specs_of("nonsense(0.1)")
    with pytest.raises(ValueError, match=r"7 stands without the name of an option; expected name\(key=value"):
        PluginSpec.parse("tag(steps=3, 7)")
