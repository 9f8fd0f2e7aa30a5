"""Old snapshots are removed unless they are held or in use."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leakaudit.audit.worker import run_worker
from leakaudit.errors import SpoolError
from leakaudit.storage.encryption import new_identity
from leakaudit.storage.retention import Item, check_snapshot, hold, items, purge, purge_old_runs, unhold
from leakaudit.storage.run_folders import archive_previous
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import HOLD, Totals
from tests.audit import test_worker
from tests.storage import test_spool
from tests.support.snapshots import edit_manifest

NOW = datetime.now(UTC).replace(microsecond=0)


def audited(folder: Path, *ages: float, **more: Any) -> Spool:
    """Return the spool of a finished audit, with kept snapshots of these ages.

    Ages are in days, by step; the trainer has ended.
    """
    spool = test_worker.make(folder, *range(len(ages)), keep_snapshots=True, **more)
    assert run_worker(spool.root) == 0
    test_spool.edit_audit(spool, trainer_pid=test_spool.gone_pid())
    for step, age in enumerate(ages):
        date(spool.snapshot_folder(step).with_suffix(".kept"), NOW - timedelta(days=age))
    return spool


def date(snapshot: Path, created: datetime) -> None:
    """Change when a snapshot says it was made."""
    edit_manifest(snapshot, lambda raw: raw["provenance"].update(created=created.isoformat()))


def names(found: tuple[Item, ...] | list[Item]) -> list[str]:
    return [item.path.name for item in found]


def key_of(spool: Spool) -> str:
    return str(json.loads((spool.root.parent / "state.json").read_text())["key"])


def test_what_is_too_old_goes_and_leaves_a_line(tmp_path: Path) -> None:
    """The line says when and why, and nothing that trying texts could confirm."""
    spool = audited(tmp_path, 8.0, 6.0)
    limit = timedelta(days=7)
    dry = purge(spool, now=NOW, older_than=limit, dry_run=True)
    assert names(dry.removed) == ["000000.kept"] and names(items(spool)) == ["000000.kept", "000001.kept"]
    done = purge(spool, now=NOW, older_than=limit)
    assert names(done.removed) == ["000000.kept"] and done.bytes == dry.bytes > 100_000
    assert names(items(spool)) == ["000001.kept"]
    path = tmp_path / "audit" / "purged.jsonl"
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert (line["snapshot"], line["why"], line["purged"]) == ("000000", "older than 7 days", NOW.isoformat())
    assert "digests" not in line and path.stat().st_mode & 0o777 == 0o600


def test_the_key_of_the_hashes_goes_with_the_last_snapshot(tmp_path: Path) -> None:
    """Results and report stay as they are; nobody can try texts against them any more."""
    spool = audited(tmp_path, 8.0, 6.0)
    key, results = key_of(spool), (tmp_path / "audit" / "results.json").read_bytes()
    assert len(key) == 64
    assert not purge(spool, now=NOW, older_than=timedelta(days=7)).key_destroyed
    assert key_of(spool) == key
    assert purge(spool, now=NOW, older_than=None).key_destroyed
    assert key_of(spool) == ""
    assert (tmp_path / "audit" / "results.json").read_bytes() == results
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert key.encode() not in path.read_bytes(), path


def test_a_clock_that_goes_backwards_removes_nothing(tmp_path: Path) -> None:
    """A snapshot from the far future has no age; one from a little ahead is new."""
    spool = audited(tmp_path, -400.0, -0.5)
    ages = [item.age(NOW) for item in items(spool)]
    assert ages == [None, timedelta()]
    assert purge(spool, now=NOW, older_than=timedelta(seconds=0)).removed == ()
    assert names(purge(spool, now=NOW, older_than=None).removed) == ["000000.kept", "000001.kept"]


def test_a_clock_far_ahead_of_every_file_removes_nothing_by_itself(tmp_path: Path) -> None:
    """It says so in one line; within a year of the newest file, age decides."""
    spool = audited(tmp_path, 0.0)
    (line,) = purge_old_runs(spool, now=NOW + timedelta(days=3653))
    assert (
        line.startswith("no old snapshot is removed: the clock says 20") and "more than a year after the newest" in line
    )
    assert names(items(spool)) == ["000000.kept"]
    (line,) = purge_old_runs(spool, now=NOW + timedelta(days=360))
    assert line.startswith("audit: removed 1 snapshot")


def test_the_tokenizer_goes_with_the_last_kept_snapshot(tmp_path: Path) -> None:
    """A later worker finds nothing to do, and leaves the results as they are."""
    spool = audited(tmp_path, 8.0, 6.0)
    purge(spool, now=NOW, older_than=timedelta(days=7))
    assert (spool.root / "tokenizer").is_dir()
    purge(spool, now=NOW, older_than=None)
    assert not (spool.root / "tokenizer").exists()
    results = (tmp_path / "audit" / "results.json").read_bytes()
    assert run_worker(spool.root) == 0
    assert (tmp_path / "audit" / "results.json").read_bytes() == results


def test_held_snapshots_stay_whoever_comes(tmp_path: Path) -> None:
    """By age, by hand, with a worker; until they are released."""
    spool = audited(tmp_path, 30.0, 30.0)
    assert names(hold(spool, (1,), "case 17", now=NOW)) == ["000001.kept"]
    done = purge(spool, now=NOW, older_than=None)
    assert names(done.removed) == ["000000.kept"]
    assert [item.held for item in done.held] == ["case 17"] and not done.key_destroyed and key_of(spool)
    assert names(unhold(spool, (1,))) == ["000001.kept"]
    assert names(purge(spool, now=NOW, older_than=None).removed) == ["000001.kept"]


def test_a_whole_spool_can_be_held(tmp_path: Path) -> None:
    """Later snapshots included. A hold that cannot be read holds."""
    spool = audited(tmp_path, 30.0)
    assert len(hold(spool, (), "litigation", now=NOW)) == 1
    assert names(purge(spool, now=NOW, older_than=None).held) == ["000000.kept"]
    with pytest.raises(SpoolError, match="the whole spool is held; release it as a whole"):
        unhold(spool, (0,))
    (spool.root / HOLD).write_text("{")
    assert items(spool)[0].held == "hold.json cannot be read"
    assert len(unhold(spool, ())) == 1 and items(spool)[0].held == ""


def test_a_step_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    """With those that are."""
    spool = audited(tmp_path, 1.0)
    with pytest.raises(SpoolError, match="no snapshot of step 5; there are: 0"):
        hold(spool, (5,), "x", now=NOW)
    with pytest.raises(SpoolError, match="no snapshot of step 5"):
        purge(spool, now=NOW, older_than=None, steps=(5,))


def test_what_somebody_works_on_is_left_alone(tmp_path: Path) -> None:
    """An incomplete snapshot of a living trainer stays, and a worker's claimed one."""
    spool = test_worker.make(tmp_path, 1, 2, finished=False)
    (spool.root / "000003.tmp").mkdir()
    with spool.worker_lock():
        assert spool.queue.claim() is not None
        done = purge(spool, now=NOW, older_than=None)
        assert names(done.in_use) == ["000001.run", "000003.tmp"]
        assert names(done.removed) == ["000002.ready"] and not done.key_destroyed
    test_worker.put(spool, 4)
    assert purge(spool, now=NOW + timedelta(days=99), older_than=timedelta(days=7), finished_only=True).removed == ()


def test_the_next_worker_removes_what_is_too_old_in_earlier_runs(tmp_path: Path) -> None:
    """Each by its own configuration; other folders are left alone."""
    for days in (300.0, 3000.0):
        audited(tmp_path, 0.0, retention_days=days)
        assert archive_previous(tmp_path / "audit").note
    audited(tmp_path, 0.0, retention_days=300.0).root.parent.rename(tmp_path / "audit.mine")
    for path in tmp_path.glob("audit*/spool/*.kept"):
        date(path, NOW - timedelta(days=400))
    spool = test_worker.make(tmp_path, 1)
    said = list(purge_old_runs(spool, now=NOW))
    assert said == ["audit.1: removed 1 snapshot older than 300 days; the key of its hashes is destroyed"]
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("audit*/spool/0*"))
    assert left == ["audit.2/spool/000000.kept", "audit.mine/spool/000000.kept", "audit/spool/000001.ready"]


def test_what_was_never_audited_goes_with_its_age_once_nobody_works_on_it(tmp_path: Path) -> None:
    """A trainer was killed, and nobody came back: private text without a purpose."""
    spool = test_worker.make(tmp_path, 1, finished=False)
    test_spool.edit_audit(spool, trainer_pid=test_spool.gone_pid())
    date(spool.snapshot_folder(1), NOW - timedelta(days=30))
    archive_previous(tmp_path / "audit")
    fresh = test_worker.make(tmp_path, 2)
    assert list(purge_old_runs(fresh, now=NOW)) == ["audit.1: removed 1 snapshot older than 7 days"]


def test_an_encrypted_audit_never_writes_the_key_of_its_hashes(tmp_path: Path) -> None:
    """The key is made from the private key, so hashes fit again after a resume."""
    public, private = new_identity()
    spool = test_worker.make(tmp_path, encrypt_to=(public,), keep_snapshots=True, finished=False)
    from tests.storage.test_encryption import TEXT

    for number in (1, 2):
        put_sealed(spool, number, TEXT)
    spool.finish(Totals())
    assert run_worker(spool.root, identities=(private,)) == 0
    assert key_of(spool) == ""
    results = json.loads((tmp_path / "audit" / "results.json").read_text())
    hashes = {s["hmac"] for a in results["attempts"] for s in a["sequences"]}
    assert len(hashes) == 1, "one text, one hash, over both steps"
    salt = Spool.open(spool.root)[1].salt
    assert len(salt) == 64, "kept with the snapshots, so that the audit can go on under the same key"
    test_spool.edit_audit(spool, trainer_pid=test_spool.gone_pid())
    done = purge(spool, now=NOW, older_than=None)
    assert len(done.removed) == 2 and done.key_destroyed
    assert not any(salt.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "digests" in json.loads((tmp_path / "audit" / "purged.jsonl").read_text().splitlines()[0])


def test_two_encrypted_runs_of_one_owner_have_hashes_of_their_own(tmp_path: Path) -> None:
    """Nobody can tell from their results that a text was in both runs."""
    public, private = new_identity()
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        spool = test_worker.make(tmp_path / name, encrypt_to=(public,), finished=False)
        put_sealed(spool, 1, "the old dog chased a cat .")
        spool.finish(Totals())
        assert run_worker(spool.root, identities=(private,)) == 0
        assert Spool.open(spool.root)[1].salt == ""
        results = json.loads((tmp_path / name / "audit" / "results.json").read_text())
        found.append({s["hmac"] for a in results["attempts"] for s in a["sequences"]})
    assert len(found[0]) == len(found[1]) == 1 and found[0] != found[1]


def put_sealed(spool: Spool, number: int, text: str) -> None:
    """Write a real, encrypted snapshot."""
    from leakaudit.client.snapshot import Manifest, Provenance
    from leakaudit.models.recipe import ModelRecipe
    from leakaudit.models.tensors import state_of
    from tests.support import tiny

    model = tiny.bert()
    step = tiny.client_step(model, tiny.bert_tokenizer(), [text], [1])
    manifest = Manifest(
        model=ModelRecipe.of(model),
        facts=step.facts,
        recipe=step.recipe,
        provenance=Provenance(framework="test", step=number),
    )
    spool.write(number, update=step.update(), weights=state_of(model), truth=step.truth, manifest=manifest)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.chmod(0o755), "others can read 000000.kept (mode 755)"),
        (lambda path: (path / "truth.safetensors").chmod(0o644), "others can read truth.safetensors (mode 644)"),
        (lambda path: (path / "truth.safetensors").unlink(), "truth.safetensors is missing"),
        (lambda path: (path / "observed.safetensors").write_bytes(b"short"), "truncated or changed"),
        (lambda path: (path / "more").symlink_to("/"), "more is a link"),
        (lambda path: (path / "snapshot.json").write_text("{"), "not readable as a snapshot manifest"),
    ],
)
def test_a_snapshot_that_is_not_as_it_should_be_is_found(tmp_path: Path, harm: Any, said: str) -> None:
    """One problem, one line; a whole one has none."""
    spool = audited(tmp_path, 1.0)
    (item,) = items(spool)
    assert list(check_snapshot(spool, item)) == []
    harm(item.path)
    (problem,) = check_snapshot(spool, items(spool)[0])
    assert said in problem


def test_results_carry_no_hash_that_a_guess_could_be_tried_against(tmp_path: Path) -> None:
    """Both hashes are keyed by run, so a guessed text cannot be confirmed."""
    from leakaudit.storage.snapshots import read_snapshot

    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        spool = test_worker.make(tmp_path / name, 1)
        plain = read_snapshot(spool.snapshot_folder(1)).observation.digest().removeprefix("sha256:")
        assert run_worker(spool.root) == 0
        results = (tmp_path / name / "audit" / "results.json").read_text()
        assert plain not in results
        step, attempt = json.loads(results)["steps"][0], json.loads(results)["attempts"][0]
        assert step["snapshot"].startswith("hmac-sha256:") and len(step["snapshot"]) == 76
        found.append((plain, step["snapshot"], attempt["sequences"][0]["hmac"]))
    first, second = found
    assert first[0] == second[0], "the same update, bit by bit"
    assert first[1] != second[1] and first[2] != second[2]
