"""Runs published federated clients with their own code, an audit and a gate.

    python -m tests.benchmarks.published_clients --nvflare NVFLARE

NVFLARE is a checkout of NVFlare's repository; nothing of it is in this project. Each example is copied, and changed by the substitutions below:
`ours` are the lines that a user adds for the audit, `machine` are changes for a machine without a GPU. Its model is a small one with random
weights, its data are six invented texts. It runs to its end in NVFlare's simulator, in an environment where leakaudit is installed from a
wheel. A row has the lines that were added, the stamps of the kept rounds, what the filter did with the round, and the gate's verdict with the policy of
rounds. Nothing is granted. The attacks are the default ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from leakaudit.results.files import load_results
from tests.benchmarks.one_paste import built_wheel
from tests.support.one_paste import PROGRAMS

LIMIT_SECONDS = 900
"""Most seconds that one example may take."""

CALLBACK = """    from leakaudit.callbacks.hf_trainer import LeakAuditCallback
    from leakaudit.integrations.nvflare import round_config
    LeakAuditCallback(round_config({audits!r})).attach(trainer)
"""
FILTER = """    from leakaudit.integrations.nvflare import LeakAuditFilter
    recipe.add_client_output_filter(LeakAuditFilter({audits!r}), tasks=["train"])
"""


@dataclass(frozen=True)
class Change:
    """Text of a file that is replaced."""

    file: str
    before: str
    after: str
    ours: bool = True

    @property
    def added(self) -> int:
        """Return how many lines it adds for the audit."""
        return self.after.count("\n") - self.before.count("\n") if self.ours else 0


@dataclass(frozen=True)
class Client:
    """A published example."""

    name: str
    folder: str
    """In the repository."""
    changes: tuple[Change, ...]
    arguments: tuple[str, ...]
    """Of its `job.py`; `{work}` is a folder with `model` and `data`."""
    sites: tuple[str, ...] = field(default=("site-1",))


def _llm(mode: str) -> Client:
    patch = "    flare.patch(\n        trainer,\n"
    return Client(
        f"NVFlare llm_hf, {mode}",
        "examples/advanced/llm_hf",
        (
            Change("client.py", patch, f"{CALLBACK}{patch}"),
            Change("client.py", 'device_map = {"": local_rank}', 'device_map = {"": "cpu"}', ours=False),
            Change("client.py", "        bf16=True,\n", "        bf16=True,\n        use_cpu=True,\n", ours=False),
            Change(
                "job.py",
                "    # Add client params to reduce timeout",
                f"{FILTER}    # Add client params to reduce timeout",
            ),
        ),
        (
            *("--client_ids", "site-1", "--num_rounds", "1", "--model_name_or_path", "{work}/model"),
            *("--data_path", "{work}/data", "--workspace_dir", "{work}/workspace", "--train_mode", mode, "--gpu", ""),
        ),
    )


CLIENTS = (
    Client(
        "NVFlare hello-huggingface",
        "examples/hello-world/hello-huggingface",
        (
            Change("client.py", "    flare.patch(trainer)\n", f"{CALLBACK}    flare.patch(trainer)\n"),
            Change(
                "job.py",
                '    recipe.add_client_file("model.py")\n',
                f'    recipe.add_client_file("model.py")\n{FILTER}',
            ),
        ),
        (
            *("--n_clients", "1", "--num_rounds", "1", "--model_name_or_path", "{work}/model"),
            *("--data_root", "{work}/data"),
        ),
    ),
    _llm("SFT"),
    _llm("PEFT"),
)


def environment(folder: Path) -> Path:
    """Return an interpreter that has this one's packages, and leakaudit from a wheel.

    NVFlare copies a part of an editable install into its job.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (own / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, str(built_wheel(folder))], check=True)
    return python


def prepare(work: Path) -> None:
    """Write a small model and invented data, in the forms that the examples read."""
    sys.path.insert(0, str(PROGRAMS))
    import small
    from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

    set_seed(5)
    config = Qwen2Config(
        vocab_size=len(small.tokenizer()),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    Qwen2ForCausalLM(config).save_pretrained(work / "model")
    small.tokenizer().save_pretrained(work / "model")
    home = work / "data" / "site-1"
    home.mkdir(parents=True)
    for name in ("train", "valid", "training", "validation"):
        rows = [
            {"text": one, "input": one, "output": other}
            for one, other in zip(small.TEXTS, small.TEXTS[::-1], strict=True)
        ]
        kept = ("text",) if name in ("train", "valid") else ("input", "output")
        lines = [json.dumps({key: row[key] for key in kept}) + "\n" for row in rows]
        (home / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def run(client: Client, source: Path, python: Path, work: Path) -> str:
    """Run one example and return its row."""
    audits = work / "audits"
    app = work / "app"
    shutil.copytree(source / client.folder, app)
    for change in client.changes:
        path = app / change.file
        text = path.read_text(encoding="utf-8")
        if text.count(change.before) != 1:
            raise RuntimeError(
                f"{client.name}: {change.file} is of another version: {change.before!r} is not in it once"
            )
        path.write_text(
            text.replace(change.before, change.after.replace("{audits!r}", repr(str(audits)))), encoding="utf-8"
        )
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    begin = time.perf_counter()
    done = subprocess.run(
        [str(python), "job.py", *(one.replace("{work}", str(work)) for one in client.arguments)],
        cwd=app,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    seconds = time.perf_counter() - begin
    said = re.findall(
        r"leakaudit: (the transmission is blocked|round \d+ may be sent): (\w+)", done.stdout + done.stderr
    )
    if not said:
        raise RuntimeError(f"{client.name}: the filter said nothing:\n{(done.stdout + done.stderr)[-3000:]}")
    results = load_results(audits / client.sites[0])
    stamps = ", ".join(step.verification.status.value for step in results.steps)
    events = sorted({event for attempt in results.attempts for event in attempt.events}) or ["none"]
    lines = sum(change.added for change in client.changes)
    sent, verdict = said[0]
    what = "blocked" if "blocked" in sent else "sent"
    return f"| {client.name} | {lines} | {stamps} | {', '.join(events)} | {what} | {verdict} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvflare", type=Path, required=True, help="a checkout of NVFlare's repository")
    options = parser.parse_args()
    print(
        "| client | lines added | rounds | events | the round was | verdict | s |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as base:
        python = environment(Path(base))
        for number, client in enumerate(CLIENTS):
            work = Path(base, f"work{number}")
            work.mkdir()
            prepare(work)
            print(run(client, options.nvflare, python, work), flush=True)


if __name__ == "__main__":
    main()
