"""One zip for an auditor: no text, the same bytes each time, no forgery."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.cli import main
from leakaudit.gate.imported import load_imported
from leakaudit.reports import bundle
from leakaudit.reports.bundle_check import Checked, check_bundle
from leakaudit.reports.wording import INVENTED
from leakaudit.results.binding import SUBJECT
from leakaudit.results.files import digest_of, to_json, with_digest
from leakaudit.results.schema import Results
from tests.gate.test_imported import WRITTEN
from tests.reports.test_outputs import SITUATIONS
from tests.reports.test_redaction import CANARIES, NAMES, audited
from tests.support.factories import changed
from tests.support.spellings import spellings

AT = ("--at", "2026-11-02T12:00:00")
POLICY = "schema: leakaudit.policy/1\nname: clinic\nowner: ann\nrules:\n  - {id: rate, event: exact_sentence, max_rate: 0.05}\n"
WAIVERS = (
    "schema: leakaudit.waivers/1\nwaivers:\n  - {id: W-1, rule: rate, reason: known, owner: ann, created: 2026-11-01, "
    "expires: 2026-12-01}\n"
)


def called(*words: str | Path) -> Any:
    """Call `leakaudit`."""
    return CliRunner().invoke(main, list(map(str, words)))


def filled(folder: Path, results: Results) -> Path:
    """Fill a folder with results, a policy and waivers."""
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(to_json(results)))
    (folder / "policy.yaml").write_text(POLICY)
    (folder / "waivers.yaml").write_text(WAIVERS)
    return folder


def written(folder: Path, *more: str | Path) -> Path:
    """Write the bundle of a folder."""
    done = called("bundle", folder, *more)
    assert done.exit_code == 0, done.output
    return Path(done.output.strip())


def content(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def forged(file: Path, changes: Mapping[str, bytes | None], *, with_sums: bool = True) -> Checked:
    """Check a bundle in which somebody changed members, and the sums as well."""
    held = content(file) | {name: new for name, new in changes.items() if new is not None}
    for name in (name for name, new in changes.items() if new is None):
        held.pop(name)
    if with_sums:
        held[bundle.SUMS] = bundle.sums(held).encode()
    with zipfile.ZipFile(file.with_name("forged.zip"), "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return check_bundle(file.with_name("forged.zip"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of a run that passes its own policy."""
    folder = filled(tmp_path_factory.mktemp("clean"), SITUATIONS["clean"])
    return written(folder, "--policy", folder / "policy.yaml", *AT)


def test_a_bundle_follows_from_what_it_holds(clean: Path) -> None:
    """The results and the policy are those of the run, byte for byte."""
    found = check_bundle(clean)
    assert not found.problems and found.verdict is not None and found.verdict.verdict == "PASS"
    held = content(clean)
    assert held["results.json"] == (clean.parent / "results.json").read_bytes()
    assert held["policy.yaml"] == (clean.parent / "policy.yaml").read_bytes()
    assert {*held} == {*bundle.MEMBERS, bundle.SUMS} - {
        bundle.FULL_REPORT,
        bundle.WAIVERS,
        bundle.IMPORTED,
        SUBJECT,
        bundle.BASELINE,
    }
    done = called("bundle", "verify", clean)
    assert done.exit_code == 0 and "ok: PASS follows" in done.output


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_the_sums_are_read_by_another_tool(clean: Path, tmp_path: Path) -> None:
    """As the README says; and it sees a change."""
    with zipfile.ZipFile(clean) as archive:
        archive.extractall(tmp_path)
    check = ["sha256sum", "--check", "--strict", bundle.SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "verdict.json").write_text("{}")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    """In another folder and at another time, which is not the time of judgement."""
    made = []
    for name in ("one", "two"):
        folder = filled(tmp_path / name, SITUATIONS["leaks"])
        if name == "one":
            assert called("gate", folder, "--waivers", folder / "waivers.yaml", *AT).exit_code == 3
        else:
            shutil.copy(tmp_path / "one" / "verdict.json", folder)
        made.append(written(folder, "--waivers", folder / "waivers.yaml").read_bytes())
    assert made[0] == made[1]
    with zipfile.ZipFile(tmp_path / "two" / "leakaudit-evidence.zip") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2026, 11, 2, 12, 0, 0)}
    assert stat.S_IMODE((tmp_path / "one" / "leakaudit-evidence.zip").stat().st_mode) == 0o600


def test_a_verdict_about_something_else_is_not_bundled(tmp_path: Path) -> None:
    """Nor is one that is missing: the time of judgement would be made up."""
    folder = filled(tmp_path / "run", SITUATIONS["leaks"])
    missing = called("bundle", folder)
    assert missing.exit_code == 5 and "leakaudit gate" in missing.output
    called("gate", folder, *AT)
    assert called("bundle", folder).exit_code == 0
    other = called("bundle", folder, "--policy", folder / "policy.yaml")
    assert other.exit_code == 5 and "other results, policy" in other.output


def test_an_undecided_verdict_that_was_allowed_stays_so(tmp_path: Path) -> None:
    """Judged anew without that it would be another verdict."""
    folder = filled(tmp_path / "run", SITUATIONS["too few"])
    called("gate", folder, "--allow", "inconclusive", *AT)
    found = check_bundle(written(folder))
    assert not found.problems and found.verdict is not None and found.verdict.allowed


def test_waivers_and_imports_are_in_it(tmp_path: Path) -> None:
    """The rule fails, and the waiver and the kept counts of memaudit are judged again."""
    folder = filled(tmp_path / "run", SITUATIONS["leaks"])
    (folder / "policy.yaml").write_text(
        POLICY + "imported:\n  - {id: model, import: memaudit, measure: membership_tpr, max_value: 0.5}\n"
    )
    given = ("--policy", folder / "policy.yaml", "--waivers", folder / "waivers.yaml", "--memaudit", WRITTEN)
    file = written(folder, *given, *AT)
    found = check_bundle(file)
    assert not found.problems and found.verdict is not None
    assert {rule.id: rule.word for rule in found.verdict.rules} == {"rate": "WAIVED", "model": "FAIL"}
    held = content(file)
    assert held["waivers.yaml"].decode() == WAIVERS
    assert json.loads(held["imported.json"])["sha256"] == load_imported(WRITTEN).sha256
    assert b"headline_attack" not in held["imported.json"]
    without = forged(file, {"waivers.yaml": None})
    assert any("waived of rule rate" in problem for problem in without.problems)


@pytest.mark.parametrize("mode", ["masked", "hash"])
def test_no_private_text_is_in_it(mode: str, tmp_path: Path) -> None:
    """Not even the message of an error that is in results.json."""
    found, _ = audited()
    run = found.run.model_copy(
        update={"command": f"leakaudit run /home/{CANARIES[0]}", "environment": {"user": CANARIES[0]}}
    )
    folder = filled(tmp_path / "run", with_digest(changed(found, run=run)))
    file = written(folder, "--text", mode, *AT)
    for name, data in content(file).items():
        text = data.decode()
        assert not [one for private in CANARIES + NAMES for one in spellings(private) if one in text], name
    assert not check_bundle(file).problems
    readme = content(file)["README.md"].decode()
    assert "without words that may be private" in readme and "may be kept as long as" in readme
    assert any(one in (folder / "results.json").read_text() for one in spellings(CANARIES[0]))


def full_run(folder: Path) -> Path:
    """Return a run whose journal holds the canaries."""
    found, entries = audited()
    filled(folder, with_digest(found))
    (folder / "journal.jsonl").write_text("".join(entry.model_dump_json() + "\n" for entry in entries))
    return folder


def test_a_bundle_of_invented_text_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the zip stays that of a bundle with text."""
    monkeypatch.delenv("CI", raising=False)
    found, entries = audited()
    made_up = found.subject.model_copy(update={"data_invented": True})
    folder = tmp_path / "run"
    filled(folder, with_digest(found.model_copy(update={"subject": made_up})))
    (folder / "journal.jsonl").write_text("".join(entry.model_dump_json() + "\n" for entry in entries))
    file = written(folder, "--text", "full", *AT)
    held = content(file)
    assert "FULL-TEXT" in file.name and INVENTED in held["README.md"].decode()
    assert not [name for name, text in held.items() if b"REAL TRAINING TEXT" in text]


def test_training_text_is_named_as_such_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the name of the zip, of the report, in the README; and a CI machine refuses."""
    monkeypatch.delenv("CI", raising=False)
    folder = full_run(tmp_path / "run")
    file = written(folder, "--text", "full", *AT)
    assert "FULL-TEXT" in file.name
    held = content(file)
    assert "report.html" not in held and CANARIES[0] in held["report-FULL-TEXT.html"].decode()
    assert (
        "CONTAINS REAL TRAINING TEXT" in held["README.md"].decode()
        and "may be kept no longer" in held["README.md"].decode()
    )
    found = check_bundle(file)
    assert not found.problems and any("not made anew" in note for note in found.notes)
    hidden = called("bundle", folder, "--text", "full", "-o", folder / "evidence.zip", *AT)
    assert hidden.exit_code == 2 and "FULL-TEXT in its name" in hidden.output
    forbidden = called("bundle", folder, "--text", "full", "--policy", folder / "policy.yaml", *AT)
    assert forbidden.exit_code == 2 and "allow_full" in forbidden.output
    monkeypatch.setenv("CI", "true")
    assert called("bundle", folder, "--text", "full", *AT).exit_code == 2


def edited(file: Path, name: str, change: Callable[[Any], object]) -> bytes:
    """Return a JSON member after a change."""
    data = json.loads(content(file)[name])
    change(data)
    return json.dumps(data, indent=1).encode() + b"\n"


def _adding(more: Mapping[str, Any]) -> Callable[[Any], None]:
    """Return what adds some keys to a JSON member."""
    return lambda data: data.update(more)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("verdict.json", lambda d: d.update(verdict="FAIL"), "verdict is 'PASS'"),
        ("verdict.json", lambda d: d["rules"][0].update(k=7), "k of rule rate is 0"),
        ("verdict.json", lambda d: d["rules"].clear(), "of rule rate is"),
        ("verdict.json", lambda d: d["rules"].append(d["rules"][0] | {"id": "odd"}), "1 rule that the policy"),
        ("verdict.json", lambda d: d.update(sentence="All is well."), "verdict.json is not what"),
        ("verdict.json", lambda d: d.update(evaluated_at="2026-11-20T12:00:00Z"), "does not follow"),
        ("verdict.json", lambda d: d.update(schema="leakaudit.verdict/2"), "does not read"),
        ("verdict.json", lambda d: d.update(evaluated_at="soon"), "does not say when"),
        ("verdict.json", lambda d: d.pop("verdict"), "does not fit its schema"),
        ("results.json", lambda d: d["run"].update(id="other"), "was changed after it was written"),
        ("versions.json", lambda d: d.update(schema="leakaudit.bundle/2"), "another schema"),
        ("versions.json", lambda d: d.update(policy_digest="x"), "versions.json is not what"),
    ],
)
def test_a_changed_document_is_found_though_its_sum_is_right(
    name: str, change: Callable[[Any], object], said: str, clean: Path
) -> None:
    """Whoever changes a bundle can write the sums anew."""
    found = forged(clean, {name: edited(clean, name, change)})
    assert any(said in problem for problem in found.problems), found.problems


@pytest.mark.parametrize("name", ["annex.md", "model-card.md", "report.html", "README.md"])
def test_a_changed_text_is_found_though_its_sum_is_right(name: str, clean: Path) -> None:
    """It is made anew and compared."""
    found = forged(clean, {name: content(clean)[name].replace(b"60", b"61")})
    assert any(problem.startswith(f"{name} is not what") for problem in found.problems)


def test_other_rules_give_another_verdict(clean: Path) -> None:
    """A policy that was made milder after the judgement is found by its digest."""
    found = forged(clean, {"policy.yaml": POLICY.replace("0.05", "0.5").encode()})
    assert any("policy_digest" in problem for problem in found.problems)
    broken = forged(clean, {"policy.yaml": b"rules: []"})
    assert broken.problems and "policy.yaml" in broken.problems[0]


def test_a_change_without_a_new_sum_is_found_by_the_sum(clean: Path) -> None:
    """So is a sum of a file that is not there."""
    found = forged(clean, {"annex.md": b"all is well"}, with_sums=False)
    assert any("annex.md was changed" in problem for problem in found.problems)
    more = content(clean)[bundle.SUMS] + b"0" * 64 + b"  more.md\n"
    assert any("more.md" in problem for problem in forged(clean, {bundle.SUMS: more}, with_sums=False).problems)


def test_a_bundle_of_another_version_is_judged_by_its_numbers(clean: Path) -> None:
    """Its texts may differ; its verdict may not."""
    older = edited(clean, "versions.json", lambda d: d.update(leakaudit="0.0.1"))
    found = forged(clean, {"versions.json": older, "annex.md": b"older words"})
    assert not found.problems and "were not made anew" in found.notes[0]
    lies: tuple[dict[str, Any], ...] = (
        {"exit_code": 3},
        {"allowed": True},
        {"about": {"compared": [{"name": "other.bin", "sha256": "0" * 64}]}},
        {"valid_until": "2030-01-01T00:00:00Z"},
        {"steps": 600},
    )
    for lie in lies:
        lying = edited(clean, "verdict.json", _adding(lie))
        assert forged(clean, {"versions.json": older, "verdict.json": lying}).problems, lie
    lacking = edited(clean, "verdict.json", lambda d: d.pop("texts_back"))
    assert not forged(clean, {"versions.json": older, "verdict.json": lacking, "annex.md": b"older words"}).problems


def test_statements_that_nothing_in_a_bundle_shows_are_named(tmp_path: Path) -> None:
    """Who allowed an undecided verdict, and from which commit the policy was read."""
    folder = filled(tmp_path / "run", SITUATIONS["too few"])
    rules = ("--policy", folder / "policy.yaml")
    called("gate", folder, *rules, *AT)
    plain = written(folder, *rules)
    assert not any("says the verdict" in note for note in check_bundle(plain).notes)
    called("gate", folder, *rules, "--allow", "inconclusive", *AT)
    done = called("bundle", "verify", written(folder, *rules))
    assert done.exit_code == 0 and "note: Whoever called the gate allowed an undecided verdict" in done.output
    older = edited(plain, "versions.json", lambda d: d.update(leakaudit="0.0.1"))
    claim = edited(plain, "verdict.json", lambda d: d.update(policy_ref="origin/main", policy_commit="ab" * 20))
    found = forged(plain, {"versions.json": older, "verdict.json": claim})
    assert any("was read from origin/main" in note and "nothing here shows it" in note for note in found.notes)


def entry(name: str, mode: int = 0o100600, method: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name)
    found.external_attr, found.create_system, found.compress_type = mode << 16, 3, method
    return found


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("added", "said"),
    [
        (entry("../../evil"), "which no bundle holds"),
        (entry("/etc/evil"), "which no bundle holds"),
        (entry("waivers.yaml/"), "which no bundle holds"),
        (entry("sub/results.json"), "which no bundle holds"),
        (entry("verdict.json"), "twice"),
        (entry("waivers.yaml", 0o120777), "is a link"),
        (entry("waivers.yaml", method=zipfile.ZIP_DEFLATED), "is compressed"),
    ],
)
def test_a_hostile_zip_is_refused_before_it_is_read(
    added: zipfile.ZipInfo, said: str, clean: Path, tmp_path: Path
) -> None:
    """Names that leave the folder, links, two files of one name, and files that grow."""
    file = tmp_path / "hostile.zip"
    shutil.copy(clean, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(added, b"0" * 1_000_000)
    found = check_bundle(file)
    assert len(found.problems) == 1 and said in found.problems[0] and found.verdict is None
    done = called("bundle", "verify", file)
    assert done.exit_code == 5 and done.output.startswith("problem: ")
    assert [one.name for one in tmp_path.iterdir()] == ["hostile.zip"]


@pytest.mark.parametrize(("at", "value"), [(24, (10**9).to_bytes(4, "little")), (10, b"\x08\0"), (8, b"\x01\0")])
def test_a_member_whose_entry_lies_is_refused(at: int, value: bytes, clean: Path, tmp_path: Path) -> None:
    """About its size, its compression or its encryption, in the directory of the zip."""
    raw = clean.read_bytes()
    place = raw.rindex(b"results.json") - 46 + at
    (tmp_path / "lie.zip").write_bytes(raw[:place] + value + raw[place + len(value) :])
    assert "results.json is compressed or encrypted" in check_bundle(tmp_path / "lie.zip").problems[0]


def test_what_is_no_bundle_is_one_sentence(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, no zip, cut off, without a part, or too large."""
    (tmp_path / "text.zip").write_text("no zip")
    (tmp_path / "cut.zip").write_bytes(clean.read_bytes()[:-40])
    for name in ("missing.zip", "text.zip", "cut.zip"):
        done = called("bundle", "verify", tmp_path / name)
        assert done.exit_code == 5 and "Traceback" not in done.output and done.output.startswith("problem: The file")
    assert "lacks policy.yaml" in forged(clean, {"policy.yaml": None}).problems[0]
    assert "one of report.html" in forged(clean, {"report.html": None}).problems[0]
    monkeypatch.setattr("leakaudit.reports.bundle_check.MAX_BYTES", 1000)
    assert "larger than" in check_bundle(clean).problems[0]


def test_evidence_that_cannot_be_judged_has_no_bundle(tmp_path: Path) -> None:
    """A file of unreadable results is evidence of nothing."""
    folder = filled(tmp_path / "run", SITUATIONS["clean"])
    (folder / "results.json").write_text("{")
    assert called("bundle", folder, *AT).exit_code == 5
    assert not (folder / "leakaudit-evidence.zip").exists()


def test_files_of_another_run_are_found_in_a_bundle_of_any_version(clean: Path, tmp_path: Path) -> None:
    """Wrong: the files that another run made count as those of this one."""
    folder = filled(tmp_path / "run", SITUATIONS["clean"])
    made = tmp_path / "model.bin"
    made.write_bytes(b"weights")
    assert called("bind", folder, made).exit_code == 0
    file = written(folder, "--policy", folder / "policy.yaml", *AT)
    assert not check_bundle(file).problems
    foreign = json.loads(content(file)[SUBJECT]) | {"results_digest": "sha256:" + "0" * 64}
    foreign["digest"] = digest_of(foreign)
    older = edited(file, bundle.VERSIONS, lambda one: one.update(leakaudit="0.0.9"))
    found = forged(file, {SUBJECT: json.dumps(foreign).encode(), bundle.VERSIONS: older})
    assert found.problems == [f"{SUBJECT} is about other results than {bundle.RESULTS}."]


@pytest.mark.parametrize("command", ["gate", "bundle"])
def test_a_time_that_is_none_in_utc_is_refused(command: str, clean: Path) -> None:
    """Wrong: a traceback at the end of the calendar."""
    done = called(command, clean.parent, "--at", "9999-12-31T23:59-11:00")
    assert done.exit_code == 2 and "is no ISO date or time" in done.output


@pytest.mark.parametrize(("asked", "mode"), [("hash", "hash"), ("masked", "masked"), ("full", "masked")])
def test_without_an_option_the_policy_says_how_much_text_is_shown(asked: str, mode: str, tmp_path: Path) -> None:
    """Wrong: patterns where the policy asks for hashes, or texts unasked."""
    folder = filled(tmp_path / "run", SITUATIONS["clean"])
    policy = folder / "policy.yaml"
    policy.write_text(POLICY + f"report: {{text: {asked}, allow_full: true}}\n")
    file = written(folder, "--policy", policy, *AT)
    assert json.loads(content(file)[bundle.VERSIONS])["text"] == mode and not check_bundle(file).problems
    done = called("report", folder, "--policy", policy)
    assert done.exit_code == 0 and ("HASHES ONLY" in (folder / "report.html").read_text()) == (mode == "hash")


def test_a_report_that_cannot_be_written_is_one_sentence(clean: Path) -> None:
    """Wrong: a traceback."""
    done = called("report", clean.parent, "-o", clean.parent / "nowhere" / "r.html")
    assert done.exit_code == 5 and "r.html: was not written" in done.output
