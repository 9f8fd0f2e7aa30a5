"""What a verdict is about: artefacts, policy of the run, code, data, base model.

The results are synthetic, so that each test takes milliseconds.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.config.audit import AuditConfig
from leakaudit.files.git import head_of
from leakaudit.gate import evaluate as gate
from leakaudit.gate.origin import origin_of
from leakaudit.gate.policy import load_policy
from leakaudit.models.base_weights import base_of_config, base_of_folder
from leakaudit.results.artifacts import artifact_of, find_artifacts
from leakaudit.results.files import load_results, to_json, with_digest
from leakaudit.results.origin import Origin
from leakaudit.results.schema import Results, TakenPolicy
from tests.support.factories import NOW, audit

RULES = "rules:\n  - id: sentence-rate\n    event: exact_sentence\n    max_rate: 0.05\n"
POLICY = f"schema: leakaudit.policy/1\nname: clinic\n{RULES}"
LOOSER = POLICY.replace("0.05", "0.5")


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Judge two hours after the results were made, in a folder of the test."""
    judged = gate.evaluate
    monkeypatch.setattr(gate, "evaluate", lambda found, rules, **given: judged(found, rules, **given | {"now": NOW}))
    monkeypatch.chdir(tmp_path)


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


def verdict(*arguments: object, code: int) -> dict[str, Any]:
    """Return the document that the gate prints."""
    done = called("gate", "run", "--json", *arguments)
    assert done.exit_code == code, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def written(origin: Origin | None = None, *, leaks: int = 0, artifacts: tuple[Path, ...] = ()) -> Results:
    """Write the results of a run with 60 clean steps into `run`."""
    found = (origin or Origin()).within(audit(leaks, 60))
    subject = found.subject.model_copy(update={"artifacts": find_artifacts(artifacts).artifacts})
    found = with_digest(found.model_copy(update={"subject": subject}))
    Path("run").mkdir(exist_ok=True)
    Path("run/results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")
    return found


def policy(text: str = POLICY, more: str = "") -> Path:
    """Write a policy."""
    path = Path("leakaudit.policy.yaml")
    path.write_text(text + more, encoding="utf-8")
    return path


def taken(text: str = POLICY) -> Origin:
    """Return the origin of a run that began with a policy."""
    rules = load_policy(policy(text))
    return Origin(policy=TakenPolicy(name=rules.name, digest=rules.digest, taken_at="2026-11-02T09:00:00+00:00"))


def weights(content: bytes = b"weights", name: str = "out/model.safetensors") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def repository(**files: str) -> None:
    """Commit files in the working folder."""
    for name, text in files.items():
        Path("leakaudit.policy.yaml" if name == "policy" else f"{name}.yaml").write_text(text, encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], [*who, "commit", "-qm", "policy", "--allow-empty"]):
        subprocess.run(["git", *words], check=True)


# ---------------------------------------------------------------------- artefacts


def test_evidence_about_another_artefact_is_an_error() -> None:
    """A clean verdict cannot be moved to other weights."""
    written(artifacts=(weights(),))
    found = verdict("--policy", policy(), "--artifact", weights(b"other", "new/model.safetensors"), code=5)
    assert found["sentence"].startswith("The evidence is not about this artefact: new/model.safetensors has sha256 ")
    assert (
        f"the run names out/model.safetensors sha256 {artifact_of(Path('out/model.safetensors')).sha256[:12]}"
        in found["sentence"]
    )
    assert found["about"]["compared"] == []


def test_the_right_artefact_may_lie_in_another_folder() -> None:
    """Its digest counts, not its name; the verdict names what was compared."""
    written(artifacts=(weights(),))
    found = verdict("--policy", policy(), "--artifact", weights(name="upload/m.safetensors"), code=0)
    assert [one["name"] for one in found["about"]["compared"]] == ["upload/m.safetensors"]


def test_every_file_of_a_folder_is_compared() -> None:
    """A file that was exchanged or added in a folder is named."""
    weights(name="out/adapter/a.bin")
    weights(b"config", "out/adapter/b/config.json")
    written(artifacts=(Path("out/adapter"),))
    assert len(verdict("--policy", policy(), "--artifact", "out/adapter", code=0)["about"]["compared"]) == 2
    weights(b"changed", "out/adapter/b/config.json")
    found = verdict("--policy", policy(), "--artifact", "out/adapter", code=5)
    assert "out/adapter/b/config.json has sha256" in found["sentence"] and "a.bin has" not in found["sentence"]


def test_a_run_that_names_no_artefact_says_so_and_a_policy_may_refuse_it() -> None:
    """Nothing shows that such a run made the file."""
    written()
    file = weights()
    assert (
        "This audit is not tied to out/model.safetensors"
        in verdict("--policy", policy(), "--artifact", file, code=0)["sentence"]
    )
    strict = policy(more="subject: {require_artifact_digest: true}\n")
    assert "the run names none" in verdict("--policy", strict, "--artifact", file, code=4)["sentence"]


def test_bind_names_artefacts_after_training() -> None:
    """What was bound counts like what the run named, and a later call replaces it."""
    written()
    strict = policy(more="subject: {require_artifact_digest: true}\n")
    done = called("bind", "run", weights())
    assert done.exit_code == 0 and "1 file bound" in done.output
    assert "No file was compared" in verdict("--policy", strict, code=0)["sentence"]
    assert verdict("--policy", strict, "--artifact", "out/model.safetensors", code=0)["about"]["compared"]
    verdict("--policy", strict, "--artifact", weights(b"other", "x.bin"), code=5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("model.safetensors", "other.safetensors"), "was changed after it was written"),
        (lambda text: text.replace('"bound_at"', '"bound_on"'), "does not fit leakaudit.subject/1"),
        (lambda text: text[:-1], "bind` again"),
    ],
)
def test_a_binding_that_was_changed_is_refused(change: Any, said: str) -> None:
    """Edited, misspelt or torn: each is an ERROR that names the file."""
    written()
    called("bind", "run", weights())
    path = Path("run/subject.json")
    path.write_text(change(path.read_text()))
    assert said in verdict("--policy", policy(), code=5)["sentence"]


def test_a_binding_of_other_results_is_refused() -> None:
    """The results of a run that went on are not those that were bound."""
    written()
    called("bind", "run", weights())
    written(leaks=1)
    assert "is about other results than these" in verdict("--policy", policy(), code=5)["sentence"]


def test_a_file_that_is_missing_or_older_than_the_run_is_named(tmp_path: Path) -> None:
    """The weights of yesterday are not those of a run that began today."""
    found = find_artifacts([weights(), Path("gone.bin")], since=weights().stat().st_mtime + 60)
    assert found.artifacts == ()
    assert [name for name, _ in found.not_named] == ["out/model.safetensors", "gone.bin"]
    assert "older than the run" in found.not_named[0][1] and "not there" in found.not_named[1][1]
    assert str(tmp_path) not in str(found)


def test_the_audits_own_folder_is_no_artefact() -> None:
    """Else its results, which change with every call, would be compared."""
    weights(name="out/audit/results.json")
    found = find_artifacts([weights().parent], without=Path("out/audit"))
    assert [one.name for one in found.artifacts] == ["out/model.safetensors"]


# ---------------------------------------------------------------------- the policy of the run


def test_a_policy_that_was_changed_after_the_run_began_is_named() -> None:
    """In words and as a key; the verdict stays unless the policy says otherwise."""
    written(taken())
    found = verdict("--policy", policy(LOOSER), code=0)
    assert found["policy_changed"] is True and found["policy_of_run"] != found["policy_digest"]
    assert "The policy was changed after the run began (taken sha256:" in found["sentence"]
    strict = verdict("--policy", policy(LOOSER, "subject: {require_policy_of_run: true}\n"), code=4)
    assert "The policy was changed after the run began" in strict["sentence"]


def test_comments_and_layout_are_no_change_of_the_policy() -> None:
    """The digest is of the content."""
    written(taken())
    found = verdict("--policy", policy("# reviewed in May\n" + POLICY.replace("0.05", "5e-2")), code=0)
    assert found["policy_changed"] is False and "changed after" not in found["sentence"]


def test_a_section_that_came_later_does_not_change_the_digest_where_it_is_empty() -> None:
    """A new version of leakaudit is no new policy; a requirement is one."""
    plain = load_policy(policy()).digest
    assert load_policy(policy(more="subject: {}\n")).digest == plain
    assert load_policy(policy(more="subject: {require_clean_tree: true}\n")).digest != plain


def test_a_leak_stays_a_failure_whatever_is_required() -> None:
    """What is not bound keeps a rule from passing; it excuses nothing."""
    written(leaks=60)
    strict = "subject: {require_policy_of_run: true, require_clean_tree: true, data: notes}\n"
    assert verdict("--policy", policy(more=strict), code=3)["verdict"] == "FAIL"


@pytest.mark.parametrize(
    ("origin", "required", "said"),
    [
        (Origin(code_commit="ab" * 20, code_dirty=True), "require_clean_tree: true", "this run's code had changes"),
        (Origin(), "require_clean_tree: true", "commit of this run's code is not known"),
        (Origin(data="notes-1"), "data: notes-2", "those of this run are called notes-1"),
        (Origin(), "data: notes-2", "have no name"),
        (Origin(base_model="sha256:" + "0" * 64), "base_model: sha256:" + "1" * 64, "this run began with sha256:000"),
        (Origin(), "require_policy_of_run: true", "do not say which that was"),
    ],
)
def test_what_a_policy_requires_of_the_subject_must_be_there(origin: Origin, required: str, said: str) -> None:
    """Each unmet key keeps every rule from passing, and says why."""
    written(origin)
    assert said in verdict("--policy", policy(more=f"subject: {{{required}}}\n"), code=4)["sentence"]


def test_what_a_policy_requires_and_finds_passes() -> None:
    """The same keys, met."""
    base = "sha256:" + "1" * 64
    strict = f"subject: {{require_clean_tree: true, data: notes, base_model: '{base}', require_policy_of_run: true}}\n"
    origin = taken(POLICY + strict).model_copy(
        update={"code_commit": "ab" * 20, "code_dirty": False, "data": "notes", "base_model": base}
    )
    written(origin)
    assert verdict("--policy", policy(more=strict), code=0)["about"]["code_dirty"] is False


def test_results_of_the_version_before_are_read_and_bound_to_nothing() -> None:
    """Their verdict claims no policy and no artefact."""
    found = to_json(audit(0, 60)) | {"schema": "leakaudit.results/1.6"}
    del found["run"]["policy"], found["subject"]["base_model"], found["subject"]["data"]
    from leakaudit.results.files import digest_of

    Path("run").mkdir()
    Path("run/results.json").write_text(json.dumps(found | {"digest": digest_of(found)}))
    document = verdict("--policy", policy(), code=0)
    assert (document["policy_of_run"], document["policy_changed"]) == ("", False)
    assert load_results(Path("run")).subject.artifacts == ()


# ---------------------------------------------------------------------- git


def test_a_changed_file_makes_the_tree_dirty_and_the_audits_own_files_do_not() -> None:
    """Outputs of an earlier audit are no change of the code; a new script is."""
    repository(config="a: 1\n")
    Path("audit.1").mkdir()
    Path("audit.1/results.json").write_text("{}")
    head = head_of(Path.cwd(), Path("audit"))
    assert head is not None and len(head.commit) == 40 and not head.dirty
    Path("train.py").write_text("pass")
    origin = origin_of(load_policy(policy()), Path("audit"))
    assert origin.code_commit == head.commit and origin.code_dirty is True


def test_without_a_repository_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder without git nor a machine without git ends a run."""
    assert head_of(Path.cwd(), Path("audit")) is None
    monkeypatch.setenv("PATH", "")
    assert origin_of(load_policy(policy()), Path("audit")).code_dirty is None


def test_a_policy_of_a_commit_is_not_that_of_the_working_folder() -> None:
    """Whoever can only change the working folder cannot loosen the policy."""
    repository(policy=POLICY)
    written(leaks=20)
    Path("leakaudit.policy.yaml").write_text(LOOSER)
    assert verdict("--policy", "leakaudit.policy.yaml", code=0)["policy_ref"] == ""
    found = verdict("--policy-ref", "main", code=3)
    head = head_of(Path.cwd(), Path("run"))
    assert head is not None and (found["policy_ref"], found["policy_commit"]) == ("main", head.commit)
    done = called("report", "run", "--policy-ref", "main")
    assert done.exit_code == 0 and f"main, commit {head.commit}" in Path("run/report.html").read_text()


def test_waivers_are_read_from_the_same_commit() -> None:
    """A waiver that is only in the working folder lets nothing pass."""
    repository(policy=POLICY, waivers="schema: leakaudit.waivers/1\nwaivers: []\n")
    written(leaks=20)
    Path("waivers.yaml").write_text(
        "schema: leakaudit.waivers/1\nwaivers:\n  - {id: W-1, rule: sentence-rate, reason: known, owner: me, created: 2026-11-01, expires: 2026-11-20}\n"
    )
    assert (
        verdict("--policy", "leakaudit.policy.yaml", "--waivers", "waivers.yaml", code=0)["waivers"][0]["state"]
        == "applies"
    )
    assert verdict("--policy-ref", "main", "--waivers", "waivers.yaml", code=3)["waivers"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy-ref", "mian"), "--policy-ref mian: no such branch, tag or commit; did you mean main"),
        (
            ("--policy-ref", "main", "--policy", "leakaudit.polciy.yaml"),
            "no such file in that commit; did you mean leakaudit.policy.yaml",
        ),
        (("--policy-ref", "main", "--policy", "../policy.yaml"), "is outside the repository"),
        (("--policy-ref", "--all"), "no such branch, tag or commit"),
    ],
)
def test_a_wrong_ref_or_file_is_a_usage_error(words: tuple[str, ...], said: str) -> None:
    """Exit 2 and the nearest name; nothing is judged by another policy instead."""
    repository(policy=POLICY)
    written()
    done = called("gate", "run", *words)
    assert done.exit_code == 2 and said in done.output, done.output
    assert not Path("run/verdict.json").exists()


def test_a_ref_outside_a_repository_is_a_usage_error() -> None:
    """The message says that there is no repository."""
    written()
    done = called("gate", "run", "--policy-ref", "main")
    assert done.exit_code == 2 and "is in no git repository" in done.output


# ---------------------------------------------------------------------- base model and configuration


def test_the_base_model_has_a_digest_or_a_revision_and_no_path(tmp_path: Path) -> None:
    """A path is private, and a name on a hub says little without its revision."""

    class Config:
        _name_or_path = "org/base"
        _commit_hash = "ab" * 20

    assert base_of_config(Config()) == f"hub:org/base@{'ab' * 20}"
    Config._commit_hash = None  # type: ignore[assignment]
    assert base_of_config(Config()) == "" and base_of_config(None) == ""
    file = weights(name="base/model.safetensors")
    Config._name_or_path = str(tmp_path / "base")
    assert base_of_config(Config()) == f"sha256:{artifact_of(file).sha256}"
    weights(b"second", "base/second.safetensors")
    assert base_of_folder(file.parent) not in ("", f"sha256:{artifact_of(file).sha256}")


def test_artefacts_in_a_file_count_from_its_folder() -> None:
    """As its policy does."""
    from leakaudit.config.audit import load_config

    Path("conf").mkdir()
    Path("conf/audit.yaml").write_text("artifacts: [../out/m.bin]\ndata_name: notes-7\n")
    config = load_config(Path("conf/audit.yaml"))
    assert config.artifacts == (Path("conf/../out/m.bin"),) and config.data_name == "notes-7"
    assert AuditConfig().artifacts == ()


def test_several_runs_say_what_they_are_about() -> None:
    """Wrong: of several runs nobody says that the policy changed, or what they made."""
    released = weights()
    found = written(taken(LOOSER), artifacts=(released,))
    other = with_digest(found.model_copy(update={"run": found.run.model_copy(update={"id": "other"})}))
    Path("other").mkdir()
    Path("other/results.json").write_text(json.dumps(to_json(other)), encoding="utf-8")
    at = ("--at", NOW.isoformat())
    both = verdict("other", "--policy", policy(), "--artifact", released, *at, code=0)
    assert both["policy_changed"] and both["policy_of_run"] and "was changed after the run began" in both["sentence"]
    assert both["about"]["compared"] == both["about"]["artifacts"] != []
    bare = with_digest(other.model_copy(update={"subject": audit(0, 1).subject}))
    Path("other/results.json").write_text(json.dumps(to_json(bare)), encoding="utf-8")
    one = verdict("other", "--policy", policy(), "--artifact", released, *at, code=0)
    assert not one["about"]["compared"] and "This audit is not tied to" in one["sentence"]
