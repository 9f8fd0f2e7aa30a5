"""Code in a model's folder never runs, and no prompt asks whether it may."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.errors import LeakAuditError, ModelError
from leakaudit.metrics.semantic_similarity import check_sentence_model
from leakaudit.models.loading import load_model, load_tokenizer
from tests.audit.test_worker import make
from tests.support import tiny

ROOT = Path(__file__).parents[2]
CANARY = "it-ran"


class _Writes:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def foreign(folder: Path) -> Path:
    """Return a folder whose model and tokenizer are code.

    The code leaves a file when it is imported.
    """
    folder.mkdir(exist_ok=True)
    tiny.bert_tokenizer().save_pretrained(folder)
    code = f"import pathlib\npathlib.Path({str(folder / CANARY)!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer")
    own: dict[str, Any] = {"auto_map": {kind: "own.Own" for kind in kinds}}
    own["auto_map"]["AutoTokenizer"] = ["own.Own", "own.Own"]
    (folder / "config.json").write_text(json.dumps(own | {"model_type": "own-model"}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own | {"tokenizer_class": "Own"}))
    return folder


LOADERS: dict[str, Callable[[Path], Any]] = {
    "model": lambda folder: load_model(folder, "classification"),
    "language model": lambda folder: load_model(folder, "causal-lm"),
    "tokenizer": load_tokenizer,
    "sentence model": check_sentence_model,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_code_of_a_folder_is_refused_without_a_question(
    tmp_path: Path, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With somebody at the terminal who would say yes."""
    asked: list[str] = []

    def yes(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", yes)
    folder = foreign(tmp_path / "foreign")
    with pytest.raises(LeakAuditError, match=r"code of its own \(`auto_map`") as caught:
        LOADERS[loader](folder)
    assert not asked and not (folder / CANARY).exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["worker", "simulate", "sentence model", "prior"])
def test_no_command_runs_the_code_of_a_folder_or_asks(tmp_path: Path, command: str) -> None:
    """A real process whose input says yes."""
    folder = foreign(tmp_path / "foreign")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "the old dog chased a cat near the river .", "label": 0}\n' * 4)
    sound = tmp_path / "sound"
    tiny.bert().save_pretrained(sound)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(sound)
    common = ["simulate", "--data", str(data), "--out", str(tmp_path / "out"), "--steps", "1", "--controls", "0"]
    if command == "worker":
        spool = make(tmp_path, 1)
        for path in folder.iterdir():
            (spool.root / "tokenizer" / path.name).write_bytes(path.read_bytes())
        arguments = ["worker", str(spool.root)]
    elif command == "simulate":
        arguments = [*common, "--model", str(folder)]
    elif command == "sentence model":
        arguments = [*common, "--model", str(sound), "--attacks", "span", "--sentence-model", str(folder)]
    else:
        attack = f"lamp-cos(prior={folder},steps=2)"
        arguments = [*common, "--model", str(sound), "--attacks", attack]
    done = subprocess.run(
        [sys.executable, "-m", "leakaudit", *arguments],
        input="y\n" * 20,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert not list(tmp_path.rglob(CANARY))
    said = done.stdout + done.stderr
    assert "[y/N]" not in said and "Traceback" not in said
    journal = tmp_path / "out" / "journal.jsonl"
    why = said + (journal.read_text() if journal.exists() else "")
    assert "auto_map" in why or "ModelError" in why, said


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    """Reading one would run what is in it."""
    model = tiny.bert()
    model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump(_Writes(tmp_path / CANARY), file)
    with pytest.raises(ModelError):
        load_model(tmp_path, "classification")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(tmp_path, "classification")
    assert not (tmp_path / CANARY).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5_000 + "}", "null", "7", '{"model_type": []}', "\0"])
def test_a_folder_of_junk_is_an_error_of_one_line(tmp_path: Path, name: str, text: str) -> None:
    """Deep, long, of another type."""
    tiny.bert().save_pretrained(tmp_path)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    for load in (load_tokenizer, lambda folder: load_model(folder, "classification")):
        message = ""
        try:
            load(tmp_path)
        except ModelError as error:
            message = str(error)
        assert "\n" not in message


def calls() -> list[tuple[Path, ast.Call]]:
    """Return every call of a `from_pretrained` in code that is ours."""
    found = []
    for top in ("leakaudit", "callbacks", "reports", "examples", "tests/benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [
                (path, node)
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "from_pretrained"
            ]
    return found


def test_every_call_that_loads_a_folder_says_that_nothing_foreign_runs() -> None:
    """`trust_remote_code=None`, the default, asks."""
    assert len(calls()) > 10
    for path, call in calls():
        keywords = {word.arg: word.value for word in call.keywords}
        spread = [ast.unparse(word.value) for word in call.keywords if word.arg is None]
        said = keywords.get("trust_remote_code")
        assert "NOTHING_FOREIGN" in spread or (isinstance(said, ast.Constant) and said.value is False), (
            f"{path}:{call.lineno}"
        )
