"""Two hundred private words in an audit: none reaches an output but a full report."""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import leakaudit
from leakaudit.cli import main
from leakaudit.results.files import to_json, with_digest
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import Artifact, AttemptStatus, Results
from tests.support.factories import attempt, audit, journal_entry, results, step
from tests.support.spellings import spellings

SYLLABLES = ("zwo", "rku", "chø", "квa", "tza", "né'", "lm<", 'x"q', "vy&", "gji")


def words(kind: str, many: int) -> list[str]:
    """Return different words that no output has by chance."""
    return [f"{SYLLABLES[i % 10]}{kind}{SYLLABLES[(i // 10) % 10]}{i:03d}" for i in range(many)]


TEXTS, GUESSES, NAMES = words("Text", 60), words("Guess", 40), words("Name", 40)
ERRORS, PATHS, NOTES = words("Error", 20), words("Path", 20), words("Note", 20)
CANARIES = [*TEXTS, *GUESSES, *NAMES, *ERRORS, *PATHS, *NOTES]


def planted() -> tuple[Results, list[JournalEntry]]:
    """Return an audit that holds every word, with its journal."""
    steps = [step(i) for i in range(21)]
    read = [attempt(i, leaks=True) for i in range(20)]
    failed = [
        attempt(i, "tag", status=AttemptStatus.ERROR, reason=f"ValueError at tag.py:{i + 1}: {word!r} is not {word}")
        for i, word in enumerate(ERRORS)
    ]
    labels = [attempt(20, "llg", kind="labels", leaks=True)]
    entries = [
        journal_entry(one, TEXTS[3 * i : 3 * i + 3], [TEXTS[3 * i], *GUESSES[2 * i : 2 * i + 2]])
        for i, one in enumerate(read)
    ]
    counts = (1,) * len(NAMES)
    entries.append(journal_entry(labels[0], counts=(counts, counts), names=NAMES))
    notes = [
        one.model_copy(
            update={"verification": one.verification.model_copy(update={"note": f"see /home/{word}/notes.txt"})}
        )
        for one, word in zip(steps, [*NOTES, "the last"], strict=True)
    ]
    found = results(notes, [*read, *failed, *labels], positive=(3, 3), negative=(0, 3))
    command = "leakaudit run " + " ".join(f'"/home/{word.replace(chr(34), "")}/spool"' for word in PATHS[:10])
    run = found.run.model_copy(
        update={
            "command": command,
            "environment": {**found.run.environment, **{f"HOME_{i}": f"/home/{word}" for i, word in enumerate(PATHS)}},
        }
    )
    return with_digest(found.model_copy(update={"run": run})), entries


def lay_out(folder: Path) -> Path:
    """Write the audit and a policy; return the folder of the audit."""
    found, entries = planted()
    place = folder / "audit"
    place.mkdir()
    (place / "results.json").write_text(json.dumps(to_json(found)))
    lines = [one.model_dump_json(by_alias=True) for one in entries]
    (place / "journal.jsonl").write_text("".join(line + "\n" for line in lines))
    place.chmod(0o700)
    (folder / "model.bin").write_bytes(b"weights")
    rules = {
        "schema": "leakaudit.policy/1",
        "name": "canaries",
        "rules": [
            {"id": "rate", "event": "exact_sentence", "max_rate": 0.05},
            {"id": "labels", "event": "label_counts", "max_count": 0},
            {"id": "overlap", "metric": "rougeL", "statistic": "max", "max_value": 0.5},
        ],
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(rules))
    return place


def lay_out_pass(folder: Path) -> Path:
    """Write an audit that passes and names the model; its notes and paths hold words."""
    found, _ = planted()
    clean = audit(0, 60, positive=(3, 3), negative=(0, 3), finished=datetime.now(UTC).isoformat(timespec="seconds"))
    stamps = [one.verification for one in found.steps]
    steps = [one.model_copy(update={"verification": stamps[number % 20]}) for number, one in enumerate(clean.steps)]
    run = clean.run.model_copy(update={"command": found.run.command, "environment": found.run.environment})
    model = Artifact(name="model.bin", sha256=hashlib.sha256(b"weights").hexdigest())
    subject = clean.subject.model_copy(update={"artifacts": (model,)})
    clean = with_digest(clean.model_copy(update={"steps": tuple(steps), "run": run, "subject": subject}))
    place = folder / "passes"
    place.mkdir()
    (place / "results.json").write_text(json.dumps(to_json(clean)))
    (folder / "rate.yaml").write_text(
        "schema: leakaudit.policy/1\nname: rate\nrules: [{id: rate, event: exact_sentence, max_rate: 0.05}]\n"
    )
    return place


def notebook(folder: Path) -> str:
    """Return what a notebook shows of an audit."""
    found = leakaudit.load(folder)
    return "\n".join([repr(found), found._repr_html_(), found.results._repr_html_()])


def run(*words: str) -> str:
    """Run a command; return everything that it printed."""
    done = CliRunner().invoke(main, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.output + done.stderr


FILES = ("junit", "summary", "badge", "sarif", "attestation", "cyclonedx")


MORE = ("svr", "pooled.json", "annex.md", "masked.zip", "hash.zip", "baseline.json")
SHOWN = (
    (),
    ("rule", "rate"),
    ("rule", "labels"),
    ("step", "0"),
    ("step", "20"),
    ("attack", "span"),
    ("attack", "tag"),
    ("attack", "llg"),
)
"""The parts of an audit that `leakaudit show` prints."""


def test_no_output_holds_a_private_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file of any command, nor what a terminal or a notebook shows."""
    leaks, made = lay_out(tmp_path), tmp_path / "made"
    made.mkdir()
    monkeypatch.setenv("GITHUB_OUTPUT", str(made / "github.txt"))
    rules = ["--policy", str(tmp_path / "policy.yaml")]
    files = [word for name in FILES for word in (f"--{name}", str(made / name))]
    passes = lay_out_pass(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(leaks, other)
    baseline = ["--file", str(made / "baseline.json")]
    at = ["--at", "2026-11-02T12:00:00"]
    svr = ["--svr", str(made / "svr"), "--artifact", str(tmp_path / "model.bin")]
    printed = [
        run("gate", str(passes), "--policy", str(tmp_path / "rate.yaml"), *svr),
        run("gate", str(leaks), str(other), *rules, "--out", str(made / "pooled.json")),
        run("export", "annex", str(leaks), *rules, "-o", str(made / "annex.md")),
        *(run("export", "tags", str(leaks), *rules, "--format", form) for form in ("json", "mlflow")),
        *(
            run("bundle", str(leaks), *rules, *at, "--text", mode, "-o", str(made / f"{mode}.zip"))
            for mode in ("masked", "hash")
        ),
        run("bundle", "verify", str(made / "masked.zip")),
        *(run("show", str(leaks), *part, *form) for part in SHOWN for form in ((), ("--json",))),
        run("replay", str(leaks), "--step", "0", "--attack", "span"),
        run("compare", str(leaks), str(other)),
        run("compare", str(leaks), str(other), "--json"),
        run("baseline", "set", str(leaks), "--anyway", *baseline),
        run("baseline", "show", *baseline),
        run("baseline", "diff", str(other), *baseline),
        notebook(leaks),
        run("gate", str(leaks), *rules, *files, "--artifact", str(tmp_path / "model.bin"), "--github"),
        run("gate", str(leaks), *rules, "--json"),
        run("gate", str(leaks)),
        run("report", str(leaks), *rules, "-o", str(made / "masked.html")),
        run("report", str(leaks), *rules, "--text", "hash", "-o", str(made / "hash.html")),
        run("export", "model-card", str(leaks), *rules, "-o", str(made / "card.md")),
        run("index", str(tmp_path), "--out", str(made / "index.html")),
    ]
    paths = [*sorted(made.iterdir()), leaks / "verdict.json"]
    missing = {*FILES, *MORE, "github.txt", "masked.html", "hash.html", "card.md", "index.html"} - {
        path.name for path in paths
    }
    assert not missing, printed
    content = {path.name: path.read_bytes().decode("utf-8", "replace") for path in paths} | {
        f"print {i}": one for i, one in enumerate(printed)
    }
    found = [
        (name, word) for name, text in content.items() for word in CANARIES if any(s in text for s in spellings(word))
    ]
    assert len(CANARIES) == len({*CANARIES}) == 200
    assert found == []


def test_a_full_report_holds_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would find them."""
    monkeypatch.delenv("CI", raising=False)
    leaks = lay_out(tmp_path)
    run("report", str(leaks), "--text", "full", "-o", str(tmp_path / "full.html"))
    page = (tmp_path / "full.html").read_text()
    for word in (TEXTS[0], GUESSES[0], NAMES[0]):
        assert any(one in page for one in spellings(word)), word
