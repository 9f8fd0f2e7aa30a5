"""A policy as YAML: what is written is what is read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from leakaudit.config.strict_yaml import parse_document, parse_yaml
from leakaudit.gate.policy import Policy, default_policy
from leakaudit.gate.policy_text import built_in, from_file, policy_yaml, preset_names, preset_text
from leakaudit.plugins.names import own_names
from tests.gate.test_policy import POLICY


def test_what_is_written_is_read_as_the_same_policy() -> None:
    """The built-in policy, one with many keys, and every preset.

    With origins and without.
    """
    for policy in (
        default_policy(),
        parse_yaml(POLICY, Policy, "p"),
        *(parse_yaml(preset_text(n), Policy, n) for n in preset_names()),
    ):
        for text in (policy_yaml(policy), policy_yaml(policy, built_in)):
            assert parse_yaml(text, Policy, "shown") == policy


@settings(deadline=None)
@given(
    st.text(min_size=1, max_size=20), st.sampled_from(["1e-3", "no", "~", "2026-11-02", "a: b", "# x", "[a]", "007"])
)
def test_no_text_is_read_as_something_else(name: str, owner: str) -> None:
    """Whatever a name holds, from `no` to a line break, it comes back as it was."""
    policy = default_policy().model_copy(update={"name": name.replace("\ud800", ""), "owner": owner})
    again = parse_yaml(policy_yaml(policy), Policy, "shown")
    assert (again.name, again.owner) == (policy.name, owner)


def test_every_key_is_written_and_says_where_it_comes_from() -> None:
    """A default that nobody sees is the reason for the command."""
    text = "schema: leakaudit.policy/1\nname: p\nevidence:\n  min_steps: 99\nrules:\n  - id: a\n    event: all_words\n    max_count: 0\n"
    policy, document = parse_document(text, Policy, "p.yaml")
    lines = [line.strip() for line in policy_yaml(policy, from_file(document)).splitlines()]
    for line in (
        "name: p  # file line 2",
        "min_steps: 99  # file line 4",
        "max_censored: 0.2  # default",
        "- id: a  # file line 6",
        "max_count: 0  # file line 8",
        "severity: high  # default",
        "allow_full: false  # default",
    ):
        assert line in lines
    values = [line for line in lines if not line.endswith(":")]
    assert all(line.rpartition("  # ")[1] for line in values)


def test_the_balanced_preset_is_the_built_in_policy() -> None:
    """Its first line says so."""
    balanced = parse_yaml(preset_text("balanced"), Policy, "balanced")
    assert balanced.model_copy(update={"name": default_policy().name}) == default_policy()


def test_a_preset_names_only_what_exists_and_says_what_it_asks() -> None:
    """A comment at its top for a reader who has not seen the code."""
    from leakaudit.gate.policy import unknown_names

    for name in preset_names():
        text = preset_text(name)
        policy = parse_yaml(text, Policy, name, lambda found: unknown_names(found, own_names()))
        assert policy.name == name
        assert all(word in text.partition("schema:")[0] for word in ("It needs:", "It does not look at:")), name
        assert ("It forbids:" in text) or ("It limits:" in text), name
