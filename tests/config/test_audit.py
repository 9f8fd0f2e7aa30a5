"""The configuration of an audit: what YAML may say, and messages on errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from leakaudit.config.audit import DEFAULT_ATTACKS, NONE, AuditConfig, PluginSpec, load_config
from leakaudit.config.described import described
from leakaudit.errors import ConfigError
from leakaudit.registry import attacks, defenses
from leakaudit.results.schema import TextMode


def _write(folder: Path, text: str) -> Path:
    path = folder / "audit.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_default_is_a_plugin_that_exists() -> None:
    """A configuration without a single key runs."""
    config = AuditConfig()
    assert config.attacks == DEFAULT_ATTACKS
    assert {spec.name for spec in config.attacks} <= set(attacks.names())
    assert {spec.name for spec in config.defenses} <= set(defenses.names())
    assert config.text is TextMode.MASKED and not config.keep_snapshots


@pytest.mark.parametrize(
    "written",
    ["prune(share=0.9)", "{name: prune, share: 0.9}", "{name: prune, options: {share: 0.9}}"],
)
def test_a_plugin_can_be_written_in_three_ways(tmp_path: Path, written: str) -> None:
    """On one line, flat, or as it is stored; values get their types later."""
    config = load_config(_write(tmp_path, f"defenses:\n  - {written}\n"))
    _, spec = config.defenses
    assert spec.name == "prune"
    assert defenses.create(spec.name, spec.options).share == 0.9


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("span", "span", {}),
        (" span ", "span", {}),
        ("tag(steps=300)", "tag", {"steps": "300"}),
        ("tag(steps=300, alpha = 0.1)", "tag", {"steps": "300", "alpha": "0.1"}),
        ("tag()", "tag", {}),
    ],
)
def test_names_with_knobs_are_parsed(text: str, name: str, options: dict[str, str]) -> None:
    """Spaces mean nothing."""
    assert PluginSpec.parse(text) == PluginSpec(name=name, options=dict(options))


@pytest.mark.parametrize("text", ["tag(steps=300", "tag(300)", "tag(steps=1)x"])
def test_half_written_knobs_are_refused(text: str) -> None:
    """The message repeats what was written and says what was expected."""
    with pytest.raises(ValueError, match=r"expected name\(key=value, \.\.\.\)"):
        PluginSpec.parse(text)


def test_the_label_shows_the_knobs() -> None:
    """As tables show it: only what differs from the defaults."""
    assert PluginSpec(name="none").label == "none"
    assert PluginSpec(name="prune", options={"share": 0.9, "layers": "all"}).label == "prune(share=0.9, layers=all)"


def test_equal_specs_have_equal_hashes_whatever_the_order_of_their_knobs() -> None:
    """Duplicates are found by hash."""
    one = PluginSpec(name="x", options={"a": 1, "b": 2})
    two = PluginSpec(name="x", options={"b": 2, "a": 1})
    assert one == two and hash(one) == hash(two)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([], ["none"]),
        (["prune"], ["none", "prune"]),
        (["prune", "none"], ["none", "prune"]),
        (["none", "prune", "prune"], ["none", "prune"]),
    ],
)
def test_the_undefended_update_comes_first_and_once(written: list[str], expected: list[str]) -> None:
    """Every defence is compared with it."""
    config = AuditConfig.model_validate({"defenses": written})
    assert [spec.name for spec in config.defenses] == expected


def test_one_defense_with_two_strengths_stays_two() -> None:
    """Equal names with different knobs are different defences."""
    config = AuditConfig.model_validate({"defenses": ["prune(share=0.5)", "prune(share=0.9)"]})
    assert [spec.label for spec in config.defenses] == ["none", "prune(share=0.5)", "prune(share=0.9)"]


def test_full_text_is_asked_for_twice(tmp_path: Path) -> None:
    """One key alone never writes training text to disk."""
    with pytest.raises(ConfigError, match=r"`text: full` writes private training text to disk: set `allow_full: true`"):
        load_config(_write(tmp_path, "text: full\n"))
    assert load_config(_write(tmp_path, "text: full\nallow_full: true\n")).text is TextMode.FULL


def test_unknown_keys_name_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    """A typo is corrected, not ignored."""
    path = _write(tmp_path, "seed: 1\nbudget: 5\n")
    with pytest.raises(ConfigError, match=r"audit\.yaml:2: unknown key 'budget'; did you mean 'budget_s'\?"):
        load_config(path)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("budget_s: 0", "budget_s"),
        ("budget_s: .inf", "budget_s"),
        ("every_n_steps: 0", "every_n_steps"),
        ("first_step: -1", "first_step"),
        ("max_snapshots: 0", "max_snapshots"),
        ("min_tokens: 0", "min_tokens"),
        ("controls: -1", "controls"),
        ("nice: 20", "nice"),
        ("attacks: []", "attacks"),
        ("text: everything", "text"),
        ("device: tpu", "device"),
    ],
)
def test_values_out_of_range_name_the_key_and_the_line(tmp_path: Path, line: str, key: str) -> None:
    """Nothing is clamped in silence."""
    with pytest.raises(ConfigError, match=rf"audit\.yaml:1.*{key}"):
        load_config(_write(tmp_path, f"{line}\n"))


def test_a_policy_path_is_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    """The audit may be started from anywhere."""
    config = load_config(_write(tmp_path, "policy: rules/gate.yaml\n"))
    assert config.policy == tmp_path / "rules" / "gate.yaml"
    absolute = load_config(_write(tmp_path, f"policy: {tmp_path / 'x.yaml'}\n"))
    assert absolute.policy == tmp_path / "x.yaml"


def test_an_object_is_taken_as_it_is() -> None:
    """The callback accepts either."""
    config = AuditConfig(seed=3)
    assert load_config(config) is config


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message holds the path."""
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    """What was digested is what ran."""
    with pytest.raises(ValidationError, match="frozen"):
        AuditConfig().seed = 1


def test_the_shipped_defense_is_none_unless_declared() -> None:
    """An undeclared defence would let attacks look weaker than they are."""
    assert AuditConfig().shipped_defense == NONE
    declared = AuditConfig.model_validate({"shipped_defense": "gaussian-noise(scale=0.1)"})
    assert declared.shipped_defense.label == "gaussian-noise(scale=0.1)"


def test_every_key_has_a_description_that_the_schema_prints() -> None:
    """`leakaudit schema config` is the reference of the keys."""
    properties = described(AuditConfig).model_json_schema()["properties"]
    assert [name for name, key in properties.items() if not key.get("description")] == []


@pytest.mark.parametrize(("written", "read"), [("false", False), ("numbers", "numbers"), ("report", "report")])
def test_what_trackers_get_is_one_of_three(tmp_path: Path, written: str, read: object) -> None:
    """Another word is refused, and the schema names the three."""
    assert load_config(_write(tmp_path, f"trackers: {written}\n")).trackers == read
    assert read in _trackers_in_schema()
    with pytest.raises(ConfigError, match="trackers"):
        load_config(_write(tmp_path, "trackers: everything\n"))


def _trackers_in_schema() -> list[object]:
    found: list[object] = AuditConfig.model_json_schema()["properties"]["trackers"]["enum"]
    return found
