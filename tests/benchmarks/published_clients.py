"""Runs published federated clients with their own code, an audit and a gate.

    python -m tests.benchmarks.published_clients --nvflare NVFLARE
    python -m tests.benchmarks.published_clients --flower FLOWER

NVFLARE is a checkout of NVFlare's repository, FLOWER a folder with the `examples` of Flower's; nothing of them is in this project. Each example is copied, and changed by the substitutions below:
`ours` are the lines that a user adds for the audit, `machine` are changes for a machine without a GPU. Its model is a small one with random
weights, its data are six invented texts. It runs to its end in an environment where leakaudit is installed from a wheel: an example of NVFlare in
its simulator, one of Flower as its `ClientApp`, which gets one message (`tests/support/flower_clients/one_message.py`), with the versions that
the example pins where `PINNED` has them. A row has the lines that were added, the stamps of the kept rounds, what the filter did with the round, and the gate's verdict with the policy of
rounds. Nothing is granted. The attacks are the default ones. Flower sends what it has: its last columns are the reply, and the verdict of
`leakaudit gate`.
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
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from leakaudit.results.files import load_results
from leakaudit.results.schema import Results
from tests.benchmarks.one_paste import built_wheel
from tests.support.one_paste import PROGRAMS, ROOT

LIMIT_SECONDS = 900
"""Most seconds that one example may take."""
STAND_INS = ROOT / "tests" / "support" / "flower_clients"
"""What stands in for Flower's packages of data sets, and the program that gives a client its message."""
BITSANDBYTES = "bitsandbytes==0.49.1"
"""Quantised layers, as both repositories need them."""

PINNED = (
    *("transformers==4.53.0", "trl==0.8.1", "peft==0.15.2", BITSANDBYTES, "omegaconf==2.3.0"),
    *("tokenizers==0.21.4", "huggingface_hub==0.36.2", "datasets==4.1.1", "antlr4-python3-runtime==4.9.3"),
)
"""Versions for Flower's examples. The first line is their own pins, except for peft: they ask for 0.6.2, and leakaudit takes 0.15 and newer.
The second line are the releases that go with them. torch stays what it is here."""

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
        """Return how many lines it adds or changes for the audit."""
        if not self.ours:
            return 0
        lines = [line for line in self.after.splitlines() if line.strip()]
        return len(lines) - sum(line in lines for line in self.before.splitlines() if line.strip())


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
    pictures: bool = False
    """Whether its model reads pictures as well."""


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


@dataclass(frozen=True)
class FlowerClient:
    """A published app of Flower."""

    folder: str
    """Below `examples`."""
    changes: tuple[Change, ...]
    model: str
    """Kind of the small model, as `one_message.py` names it."""

    @property
    def name(self) -> str:
        """Return the name of its row."""
        return f"Flower {self.folder}"


IMPORT_MOD = "from leakaudit.integrations.flower import LeakAuditMod\n"


def _flower_llm(folder: str, package: str) -> FlowerClient:
    client = f"{package}/client_app.py"
    imports = "from leakaudit.callbacks.hf_trainer import LeakAuditCallback\n" + IMPORT_MOD
    attach = "    LeakAuditCallback(audited.config(context)).attach(trainer)\n"
    train = "    results = trainer.train()\n"
    app = "app = ClientApp()\n"
    return FlowerClient(
        folder,
        (
            Change(client, "from trl import SFTTrainer\n", f"{imports}from trl import SFTTrainer\n"),
            Change(client, app, f"{app}audited = LeakAuditMod({{audits!r}})\n"),
            Change(client, "@app.train()\n", "@app.train(mods=[audited])\n"),
            Change(client, train, attach + train),
        ),
        "adapters",
    )


def _with_loop(folder: str, package: str, optimizer: str, begin: str, model: str, *more: Change) -> FlowerClient:
    """Return a client with a loop of its own, in `task.py`.

    Args:
        folder: below `examples`.
        package: of the example.
        optimizer: the line of its training function that makes the optimizer, without its indent.
        begin: the line that begins the round after it.
        model: kind of the small model.
        more: further changes.
    """
    client, task, app = f"{package}/client_app.py", f"{package}/task.py", "from flwr.clientapp import ClientApp\n"
    data = "from flwr_datasets import FederatedDataset\n"
    return FlowerClient(
        folder,
        (
            Change(client, app, app + IMPORT_MOD),
            Change(client, "@app.train()\n", "@app.train(mods=[LeakAuditMod({audits!r})])\n"),
            Change(task, data, f"{data}from leakaudit.integrations.flower import watch_round\n"),
            Change(task, f"    {optimizer}\n", f"    {optimizer}\n    {begin}\n"),
            *more,
        ),
        model,
    )


_TASK = "pytorchexample/task.py"
_PARTITIONER = "from flwr_datasets.partitioner import IidPartitioner\n"
_LABELS = """            labels = batch["label"].to(device)
            optimizer.zero_grad()
"""

FLOWER_CLIENTS = (
    _with_loop(
        "quickstart-huggingface",
        "huggingface_example",
        "optimizer = AdamW(net.parameters(), lr=5e-5)",
        "watch_round(net, optimizer, tokenizer=trainloader.collate_fn.tokenizer)",
        "classifier",
    ),
    _with_loop(
        "quickstart-pytorch",
        "pytorchexample",
        "optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)",
        'audit = watch_round(rebuilt_by(net, "pytorchexample.task:Net"), optimizer, num_labels=10)',
        "net",
        Change(_TASK, _PARTITIONER, f"{_PARTITIONER}from leakaudit.models import rebuilt_by\n"),
        Change(_TASK, _LABELS, f'{_LABELS}            audit.batch({{"labels": labels}})\n'),
        Change(_TASK, "from torchvision.transforms import", "from pictures import", ours=False),
    ),
    _flower_llm("flowertune-llm", "flowertune_llm"),
    _flower_llm("flowertune-llm-general-nlp", "flowertune_generalnlp"),
    _flower_llm("flowertune-llm-code", "flowertune_code"),
    _flower_llm("flowertune-llm-finance", "flowertune_finance"),
    _flower_llm("flowertune-llm-medical", "flowertune_medical"),
)

_TRAIN = "        train_result = trainer.train()\n"

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
    Client(
        "NVFlare medgemma",
        "examples/advanced/medgemma",
        (
            Change("client.py", _TRAIN, f"{textwrap.indent(CALLBACK, '    ')}{_TRAIN}"),
            Change("job.py", "    if args.wandb:\n        add_", f"{FILTER}    if args.wandb:\n        add_"),
            Change("client.py", "    require_supported_gpu()\n", "", ours=False),
            Change("client.py", 'device_map={"": 0}', 'device_map={"": "cpu"}', ours=False),
            Change("client.py", "        bf16=True,\n", "        bf16=True,\n        use_cpu=True,\n", ours=False),
            Change("job.py", "        gpu_config=gpu_config,\n", "", ours=False),
            Change("client.py", "warmup_ratio=0.03", "warmup_steps=0.03", ours=False),  # its name in transformers 5
        ),
        (
            *("--n_clients", "1", "--num_rounds", "1", "--max_steps", "2", "--model_name_or_path", "{work}/model"),
            *("--data_dir", "{work}/data", "--image_root", "{work}/pictures", "--workspace", "{work}/workspace"),
        ),
        pictures=True,
    ),
)


def environment(folder: Path, *pins: str) -> Path:
    """Return an interpreter that has this one's packages, and leakaudit from a wheel.

    NVFlare copies a part of an editable install into its job.

    Args:
        folder: an empty one.
        pins: requirements that stand before this interpreter's packages.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (own / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, str(built_wheel(folder)), *pins], check=True)
    return python


def without_floor(python: Path, package: str) -> None:
    """Let the leakaudit of an environment take every version of a package."""
    asked = [str(python), "-c", "from importlib.metadata import distribution as d; print(d('leakaudit')._path)"]
    path = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip(), "METADATA")
    text = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(rf"^(Requires-Dist: {package})\W*>=[\d.]+", r"\1", text, flags=re.MULTILINE), encoding="utf-8"
    )


def prepare(work: Path, *, pictures: bool) -> None:
    """Write a small model and invented data, in the forms that the examples read."""
    sys.path.insert(0, str(PROGRAMS))
    if pictures:
        import picture_language_model

        picture_language_model.save(work / "model")
        picture_language_model.pictures(work / "pictures", work / "data" / "site-1")
        return
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


def copied(client: Client | FlowerClient, source: Path, work: Path) -> Path:
    """Copy an example, change it, and return its folder.

    Raises:
        RuntimeError: a text that is to be replaced is not in it once.
    """
    app = work / "app"
    shutil.copytree(source, app)
    for change in client.changes:
        path = app / change.file
        text = path.read_text(encoding="utf-8")
        if text.count(change.before) != 1:
            raise RuntimeError(
                f"{client.name}: {change.file} is of another version: {change.before!r} is not in it once"
            )
        after = change.after.replace("{audits!r}", repr(str(work / "audits")))
        path.write_text(text.replace(change.before, after), encoding="utf-8")
    return app


def ran(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command with an interpreter of `environment`, without a network."""
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    quiet["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )


def events_of(results: Results) -> str:
    """Return the events of all attempts, in words."""
    return ", ".join(sorted({event for attempt in results.attempts for event in attempt.events}) or ["none"])


def stamps_of(results: Results) -> str:
    """Return the stamps of the kept rounds."""
    return ", ".join(step.verification.status.value for step in results.steps)


def run_flower(client: FlowerClient, source: Path, python: Path, work: Path) -> str:
    """Give one example of Flower its message, and return its row.

    Raises:
        RuntimeError: the client sent no reply, or kept no round.
    """
    app = copied(client, source / "examples" / client.folder, work)
    begin = time.perf_counter()
    program = [str(python), str(STAND_INS / "one_message.py"), str(work), client.model]
    done = ran(program, app, PYTHONPATH=str(STAND_INS))
    seconds = time.perf_counter() - begin
    folder = work / "audits" / "client-0"
    if not (work / "reply").is_file() or not (folder / "results.json").is_file():
        said = re.findall(r"^leakaudit: .*", done.stdout + done.stderr, re.MULTILINE)
        raise RuntimeError(f"{client.name}: no reply or no audit: {said or (done.stdout + done.stderr)[-3000:]}")
    verdict = ran([str(python), "-m", "leakaudit", "gate", "--quiet", str(folder)], app).stdout.split()[0]
    results = load_results(folder)
    lines = sum(change.added for change in client.changes)
    stamps, events = stamps_of(results), events_of(results)
    return f"| {client.name} | {lines} | {stamps} | {events} | sent | {verdict} | {seconds:.0f} |"


def run(client: Client, source: Path, python: Path, work: Path) -> str:
    """Run one example of NVFlare and return its row."""
    app = copied(client, source / client.folder, work)
    begin = time.perf_counter()
    done = ran([str(python), "job.py", *(one.replace("{work}", str(work)) for one in client.arguments)], app)
    seconds = time.perf_counter() - begin
    said = re.findall(
        r"leakaudit: (the transmission is blocked|round \d+ may be sent): (\w+)", done.stdout + done.stderr
    )
    if not said:
        raise RuntimeError(f"{client.name}: the filter said nothing:\n{(done.stdout + done.stderr)[-3000:]}")
    results = load_results(work / "audits" / client.sites[0])
    stamps, events = stamps_of(results), events_of(results)
    lines = sum(change.added for change in client.changes)
    sent, verdict = said[0]
    what = "blocked" if "blocked" in sent else "sent"
    return f"| {client.name} | {lines} | {stamps} | {events} | {what} | {verdict} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvflare", type=Path, help="a checkout of NVFlare's repository")
    parser.add_argument("--flower", type=Path, help="a folder with the examples of Flower's repository")
    parser.add_argument("--peft", help="another version for Flower's examples; leakaudit then takes every version")
    parser.add_argument("--only", default="", help="a part of the names of the clients that run")
    options = parser.parse_args()
    if options.nvflare is None and options.flower is None:
        parser.error("name --nvflare, --flower or both")
    print(
        "| client | lines added | rounds | events | the round was | verdict | s |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    if options.nvflare is not None:
        clients = [client for client in CLIENTS if options.only in client.name]
        with tempfile.TemporaryDirectory() as base:
            python = environment(Path(base), BITSANDBYTES)
            for number, client in enumerate(clients):
                work = Path(base, f"work{number}")
                work.mkdir()
                prepare(work, pictures=client.pictures)
                print(run(client, options.nvflare, python, work), flush=True)
    if options.flower is not None:
        apps = [client for client in FLOWER_CLIENTS if options.only in client.name]
        with tempfile.TemporaryDirectory() as base:
            pins = [f"peft=={options.peft}" if options.peft and one.startswith("peft") else one for one in PINNED]
            python = environment(Path(base), *pins)
            if options.peft:
                without_floor(python, "peft")
            for number, one in enumerate(apps):
                work = Path(base, f"work{number}")
                work.mkdir()
                print(run_flower(one, options.flower, python, work), flush=True)


if __name__ == "__main__":
    main()
