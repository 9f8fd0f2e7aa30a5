"""Encrypted snapshots open with the owner's key or the run's, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyrage
import pytest

from leakaudit.client.snapshot import MANIFEST, TRUTH, Manifest, Provenance
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ConfigError, SnapshotDamagedError, SnapshotError, SnapshotSealedError
from leakaudit.models.recipe import ModelRecipe
from leakaudit.models.tensors import state_of
from leakaudit.storage.encryption import EncryptionKeys, new_identity, read_identities, write_identity
from leakaudit.storage.snapshots import check_files, manifest_bytes, read_manifest, read_snapshot
from leakaudit.storage.spool import Spool
from tests.support import tiny

TEXT = "the old dog chased a cat ."


def keep(folder: Path, public: str, **more: Any) -> tuple[Spool, Path]:
    """Keep a step of a tiny model, encrypted."""
    config = AuditConfig(out_dir=folder / "audit", encrypt_to=(public,), **more)
    tokenizer, model = tiny.bert_tokenizer(), tiny.bert()
    spool = Spool.create(folder / "audit" / "spool", config, tokenizer)
    step = tiny.client_step(model, tokenizer, [TEXT], [1])
    manifest = Manifest(
        model=ModelRecipe.of(model),
        facts=step.facts,
        recipe=step.recipe,
        provenance=Provenance(framework="test", step=7),
    )
    spool.write(7, update=step.update(), weights=state_of(model), truth=step.truth, manifest=manifest)
    return spool, spool.snapshot_folder(7)


def test_the_owners_key_and_the_runs_open_a_snapshot_and_no_other(tmp_path: Path) -> None:
    """What comes out is what went in, to the bit."""
    public, private = new_identity()
    spool, folder = keep(tmp_path, public)
    assert spool.keys is not None and spool.keys.recipients[0] == public
    read = [read_snapshot(folder, (key,)) for key in (private, spool.keys.identity)]
    expected = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    for snapshot in read:
        assert snapshot.truth.sequences() == expected.truth.sequences()
        assert snapshot.observation.digest() == read[0].observation.digest()
    with pytest.raises(SnapshotSealedError, match=f"encrypted to {public} or age1.*; the private key given is not one"):
        read_snapshot(folder, (new_identity()[1],))
    with pytest.raises(SnapshotSealedError, match="give the private key with --identity FILE or LEAKAUDIT_IDENTITY"):
        read_snapshot(folder)


def test_the_private_key_of_a_run_is_written_nowhere_and_shown_nowhere(tmp_path: Path) -> None:
    """It lives in memory, so the machine cannot read yesterday's snapshots."""
    spool, _ = keep(tmp_path, new_identity()[0])
    assert spool.keys is not None
    assert spool.keys.identity.startswith("AGE-SECRET-KEY-1") and spool.keys.identity not in repr(spool.keys)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert b"AGE-SECRET-KEY" not in path.read_bytes(), path


def test_steps_that_are_left_to_another_job_open_with_the_owners_key_only(tmp_path: Path) -> None:
    """Then the trainer cannot read even today's."""
    public, private = new_identity()
    spool, folder = keep(tmp_path, public, schedule="deferred", at_end="leave")
    assert spool.keys == EncryptionKeys((public,))
    assert read_snapshot(folder, (private,)).truth.sequences()


def test_nothing_in_clear_is_written_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into a temporary file either: every byte that goes to the disk is looked at."""
    ids = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1]).truth.micro_batches[0].inputs["input_ids"]
    secret, seen, real = ids.numpy().tobytes(), bytearray(), os.write

    def spy(descriptor: int, data: Any) -> int:
        seen.extend(data)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", spy)
    keep(tmp_path, new_identity()[0])
    assert len(seen) > 100_000 and seen.startswith(b"age-encryption.org/v1")
    assert secret not in seen and b"input_ids" not in seen.replace(b'"vocabulary"', b"")[: seen.rfind(b'{\n "schema"')]
    assert all(secret not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_snapshot_in_clear_would_fail_these_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token ids lie in it as they are, so looking for them is worth something."""
    monkeypatch.setattr(EncryptionKeys, "of", classmethod(lambda cls, owners, run_key: None))
    _, folder = keep(tmp_path, new_identity()[0])
    ids = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1]).truth.micro_batches[0].inputs["input_ids"]
    assert ids.numpy().tobytes() in (folder / TRUTH).read_bytes()


def test_digests_are_of_the_encrypted_bytes(tmp_path: Path) -> None:
    """Digests of a short text's tensors could be found by trying texts."""
    public, _ = new_identity()
    (tmp_path / "b").mkdir()
    folders = [keep(folder, public)[1] for folder in (tmp_path, tmp_path / "b")]
    first, second = (check_files(folder) for folder in folders)
    assert set(first.digests) == {"observed.safetensors.age", "truth.safetensors.age"}
    assert not set(first.digests.values()) & set(second.digests.values())


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_file_that_was_changed_is_said_to_be(tmp_path: Path, damage: str) -> None:
    """By its digest, and by the encryption itself if the digest was changed, too."""
    public, private = new_identity()
    _, folder = keep(tmp_path, public)
    path = folder / "truth.safetensors.age"
    data = bytearray(path.read_bytes())
    if damage == "changed":
        data[-5] ^= 1
    path.write_bytes(data if damage == "changed" else data[:-100])
    with pytest.raises(SnapshotDamagedError, match="truncated or changed"):
        read_snapshot(folder, (private,))
    manifest = read_manifest(folder)
    digests = {**manifest.digests, path.name: check_digest(path)}
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest.model_copy(update={"digests": digests})))
    with pytest.raises(SnapshotDamagedError, match="cannot be decrypted: truncated or changed"):
        read_snapshot(folder, (private,))


def check_digest(path: Path) -> str:
    from leakaudit.storage.digests import digest_of

    return digest_of(path)


def test_a_full_disk_is_said_to_be_full_while_encrypting_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library puts our exception into words of its own; nothing is left behind."""
    real, calls = os.write, []

    def full(descriptor: int, data: Any) -> int:
        calls.append(len(data))
        if sum(calls) > 20_000:
            raise OSError(28, os.strerror(28))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SnapshotError, match="No space left on device; free some space"):
        keep(tmp_path, new_identity()[0])
    assert not list((tmp_path / "audit" / "spool").glob("0*"))


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    """And comes back as it was written."""
    path = tmp_path / "key"
    public = write_identity(path)
    assert path.stat().st_mode & 0o777 == 0o600
    (private,) = read_identities(path)
    assert str(pyrage.x25519.Identity.from_str(private).to_public()) == public
    with pytest.raises(ConfigError, match="a private key is never overwritten"):
        write_identity(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others can read this private key \(mode 640\); chmod 600 it first"):
        read_identities(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no private key"),
        ("# a comment\n", "holds no private key"),
        ("AGE-SECRET-KEY-1QQQ", "not an age private key: expected a line starting with AGE-SECRET-KEY-1"),
    ],
)
def test_what_is_no_key_is_refused_and_not_quoted(tmp_path: Path, text: str, message: str) -> None:
    """It may be another secret."""
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as caught:
        read_identities(path)
    assert "QQQ" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read as a private key"):
        read_identities(tmp_path / "missing")


def test_a_public_key_that_is_none_ends_the_audit_before_it_begins(tmp_path: Path) -> None:
    """Rather than that snapshots are written in clear."""
    with pytest.raises(ConfigError, match="'age1nonsense' is not an age public key"):
        EncryptionKeys.of(("age1nonsense",), run_key=True)
    with pytest.raises(ConfigError, match="is not an age public key"):
        keep(tmp_path, "age1nonsense")
    assert not (tmp_path / "audit").exists()


def test_without_the_extra_an_encrypted_audit_says_what_to_install(tmp_path: Path) -> None:
    """And everything else works without it."""
    code = (
        "import sys; sys.modules['pyrage'] = None\nimport leakaudit.client.snapshot, leakaudit.storage.spool, leakaudit.cli\n"
        "from leakaudit.errors import ConfigError\nfrom leakaudit.storage.encryption import EncryptionKeys\n"
        "try:\n    EncryptionKeys.of(('age1x',), run_key=True)\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "encrypted snapshots need the package pyrage: pip install 'leakaudit[encrypt]'"


@pytest.mark.parametrize(("key", "state"), [("", "ok"), ("age1nonsense", "fail")])
def test_the_doctor_looks_at_the_keys(tmp_path: Path, key: str, state: str) -> None:
    """Before hours of training, not after."""
    from leakaudit.cli.doctor import check_configuration

    (tmp_path / "audit.yaml").write_text(f"out_dir: {tmp_path}/out\nencrypt_to: [{key or new_identity()[0]}]\n")
    last = list(check_configuration(tmp_path / "audit.yaml"))[-1]
    assert last.state == state
    assert ("encrypted to 1 public key" if state == "ok" else "is not an age public key") in last.sentence
