"""Runs published federated clients with their own code, an audit and a gate.

    python -m tests.benchmarks.published_clients --nvflare NVFLARE
    python -m tests.benchmarks.published_clients --flower FLOWER
    python -m tests.benchmarks.published_clients --openfedllm OPENFEDLLM
    python -m tests.benchmarks.published_clients --fate-llm FATE_LLM --fate FATE

NVFLARE is a checkout of NVFlare's repository, FLOWER a folder with the `examples` of Flower's, OPENFEDLLM, FATE_LLM and FATE are checkouts of theirs; nothing of them is in this project. Each example is copied, and changed by the substitutions below:
`ours` are the lines that a user adds for the audit, `machine` are changes for a machine without a GPU. Its model is a small one with random
weights, its data are six invented texts. It runs to its end in an environment where leakaudit is installed from a wheel: an example of NVFlare in
its simulator, OpenFedLLM with its `main_sft.py`, an example of Flower as its `ClientApp`, which gets one message (`tests/support/flower_clients/one_message.py`), with the versions that
the example pins where `PINNED` has them. A row has the lines that were added, the stamps of the kept rounds, what the filter did with the round, and the gate's verdict with the policy of
rounds. Nothing is granted. The attacks are the default ones. FATE-LLM trains
in FATE's own guest, host and arbiter (`tests/support/fate_client/one_job.py`). Flower, OpenFedLLM and FATE-LLM send what they have: their last columns are the reply, and the verdict of
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leakaudit.audit.canaries import CANARIES
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.files import load_results
from leakaudit.results.schema import Results
from tests.benchmarks.one_paste import built_wheel
from tests.support.one_paste import PROGRAMS, ROOT

LIMIT_SECONDS = 900
"""Most seconds that one example may take."""
AGGREGATED = "Finished FedAvg."
"""What NVFlare's server says at the end of a job whose rounds arrived."""
VOCABULARY = 4000
"""Words of the small models for NVFlare's examples; the data have about 100."""
TEMPLATE = "### Instruction: Generate Output according to the information and question given by Input. ### Input: ### Response:"
"""What `llm_hf` writes around a text."""
STAND_INS = ROOT / "tests" / "support" / "flower_clients"
"""What stands in for Flower's packages of data sets, and the program that gives a client its message."""
FATE_JOB = ROOT / "tests" / "support" / "fate_client" / "one_job.py"
"""The program of a job of FATE-LLM."""
BITSANDBYTES = "bitsandbytes==0.49.1"
"""Quantised layers, as both repositories need them."""

PINNED = (
    *("transformers==4.53.0", "trl==0.8.1", "peft==0.15.2", BITSANDBYTES, "omegaconf==2.3.0"),
    *("tokenizers==0.21.4", "huggingface_hub==0.36.2", "datasets==4.1.1", "antlr4-python3-runtime==4.9.3"),
)
"""Versions for Flower's examples. The first line is their own pins, except for peft: they ask for 0.6.2, and leakaudit takes 0.15 and newer.
The second line are the releases that go with them. torch stays what it is here."""

NEEDED_BY_FATE = (
    *("fate_utils==0.1.0", "ruamel.yaml==0.16.10", "lmdb", "cloudpickle", "beautifultable", "wcwidth"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
)
"""What FATE's standalone federation imports."""

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
    """Of its program; `{work}` is a folder with `model` and `data`."""
    sites: tuple[str, ...] = field(default=("site-1",))
    pictures: bool = False
    """Whether its model reads pictures as well."""
    added: tuple[tuple[str, str], ...] = ()
    """Name and text of each file that its user adds."""

    @property
    def lines(self) -> str:
        """Return how many lines its user adds to its code, and in files."""
        files = sum(len([line for line in text.splitlines() if line.strip()]) for _, text in self.added)
        return f"{sum(change.added for change in self.changes)}{f' + {files} in files' if files else ''}"


NOISE = """import numpy
import torch
from nvflare.apis.dxo_filter import DXOFilter


class Noise(DXOFilter):
    def __init__(self):
        super().__init__(["WEIGHTS"], ["WEIGHTS"])

    def process_dxo(self, dxo, shareable, fl_ctx):
        random = numpy.random.default_rng()
        for name, sent in dxo.data.items():
            noise = random.normal(0.0, 0.01, tuple(sent.shape))
            both = sent + torch.from_numpy(noise) if isinstance(sent, torch.Tensor) else sent + noise
            dxo.data[name] = both.to(sent.dtype) if isinstance(sent, torch.Tensor) else both.astype(sent.dtype)
        return dxo
"""
"""A filter that a client may have: it adds noise to the weights that it sends."""
POLICY = """schema: leakaudit.policy/1
name: words of one round
evidence: {min_steps: 1}
rules:
  - {id: not-all-words, severity: high, event: all_words, max_count: 0}
  - {id: not-most-words, severity: high, event: most_words, max_count: 0}
"""
"""A user's policy that is about words only."""
NOISY_CALLBACK = CALLBACK.replace("{audits!r}", '{audits!r}, shipped_defense="clip-noise(bound=1000000.0, sigma=0.01)"')
NOISY_FILTER = """    from noise import Noise
    recipe.add_client_output_filter(Noise(), tasks=["train"])
""" + FILTER.replace("{audits!r}", '{audits!r}, policy="{work}/app/policy.yaml"')


def _with_noise(client: Client) -> Client:
    """Return a client that adds noise to what it sends, and declares it."""
    changes = [
        replace(change, after=change.after.replace(CALLBACK, NOISY_CALLBACK).replace(FILTER, NOISY_FILTER))
        for change in client.changes
    ]
    added = (("noise.py", NOISE), ("policy.yaml", POLICY))
    return replace(client, name=f"{client.name}, noise", changes=tuple(changes), added=added)


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


_APP = "from flwr.clientapp import ClientApp\n"
_DATA = "from flwr_datasets import FederatedDataset\n"
_MOD = "@app.train(mods=[LeakAuditMod({audits!r})])\n"
_WATCH = "from leakaudit.integrations.flower import watch_round\n"
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
    client, task = f"{package}/client_app.py", f"{package}/task.py"
    return FlowerClient(
        folder,
        (
            Change(client, _APP, _APP + IMPORT_MOD),
            Change(client, "@app.train()\n", _MOD),
            Change(task, _DATA, _DATA + _WATCH),
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

_VIT, _WORDS = "vitexample/task.py", "whisper_example/model.py"
_PICTURES = """            images, labels = batch["image"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
"""
_SOUNDS = """            labels = b["targets"].to(device)
            with torch.no_grad():
"""
_TQDM = "from tqdm import tqdm\n"
_MODES = "    classifier.train()\n    classifier.to(device)\n"
_NET = "    net.train()\n    net.to(device)\n"
_TINY = '"openai/whisper-tiny"'

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
    FlowerClient(
        "flowertune-vit",
        (
            Change("vitexample/client_app.py", _APP, _APP + IMPORT_MOD),
            Change("vitexample/client_app.py", "@app.train()\n", _MOD),
            Change(_VIT, _DATA, f"{_DATA}{_WATCH}"),
            Change(_VIT, _NET, f"{_NET}    audit = watch_round(net.heads, optimizer, num_labels=102)\n"),
            Change(_VIT, _PICTURES, f'{_PICTURES}            audit.batch({{"labels": labels}})\n'),
            Change(_VIT, "from torchvision.models import", "from pictures import", ours=False),
            Change(_VIT, "from torchvision.transforms import", "from pictures import", ours=False),
        ),
        "heads",
    ),
    FlowerClient(
        "whisper-federated-finetuning",
        (
            Change("whisper_example/client_app.py", _APP, _APP + IMPORT_MOD),
            Change("whisper_example/client_app.py", "@app.train()\n", _MOD),
            Change(_WORDS, _TQDM, f"{_TQDM}{_WATCH}"),
            Change(_WORDS, _MODES, f"{_MODES}    audit = watch_round(classifier, optimizer, num_labels=12)\n"),
            Change(
                _WORDS, _SOUNDS, _SOUNDS.replace("    with", '    audit.batch({"labels": labels})\n            with')
            ),
            Change(_WORDS, _TINY, '"{work}/model"', ours=False),
            Change(
                "whisper_example/dataset.py",
                f"WhisperProcessor\n\nfds = None  # Cache FederatedDataset\nprocessor = WhisperProcessor.from_pretrained({_TINY})",
                "WhisperFeatureExtractor, WhisperProcessor\n\nfds = None\nprocessor = WhisperFeatureExtractor()",
                ours=False,
            ),
        ),
        "words",
    ),
    _flower_llm("flowertune-llm", "flowertune_llm"),
    _flower_llm("flowertune-llm-general-nlp", "flowertune_generalnlp"),
    _flower_llm("flowertune-llm-code", "flowertune_code"),
    _flower_llm("flowertune-llm-finance", "flowertune_finance"),
    _flower_llm("flowertune-llm-medical", "flowertune_medical"),
)

_INT8 = """            load_in_8bit=script_args.load_in_8bit
        )
        # Copy the model to each device
        device_map = {"": """
_AUDIT = '{"unit": "round", "out_dir": f"{work}/audits/client-{client}"}'
_TRAIN = "        results = trainer.train()\n"
_TRL = "from trl import DataCollatorForCompletionOnlyLM\n"

OPENFEDLLM = Client(
    "OpenFedLLM main_sft",
    "",
    (
        Change("main_sft.py", _TRL, f"{_TRL}from leakaudit.callbacks.hf_trainer import LeakAuditCallback\n"),
        Change("main_sft.py", _TRAIN, f"        LeakAuditCallback({_AUDIT}).attach(trainer)\n{_TRAIN}"),
        Change("config.py", f"{_INT8}Accelerator().local_process_index}}", f'{_INT8}"cpu"}}', ours=False),
    ),
    (
        *("--learning_rate", "5e-5", "--model_name_or_path", "{work}/model", "--dataset_name", "vicgalle/alpaca-gpt4"),
        *("--local_data_dir", "{work}/data/", "--dataset_sample", "20000", "--fed_alg", "fedavg", "--num_clients", "2"),
        *("--sample_clients", "2", "--max_steps", "10", "--num_rounds", "2", "--batch_size", "16"),
        *("--gradient_accumulation_steps", "1", "--seq_length", "512", "--peft_lora_r", "32", "--peft_lora_alpha"),
        *("64", "--use_peft", "--load_in_8bit", "--output_dir", "{work}/output", "--template", "alpaca"),
    ),
    ("client-0", "client-1"),
)
"""Its `run_sft.sh`, except for the model, the folder of the data, two clients in place of twenty and two rounds in place of 200."""

_FEDAVG, _PELLM = "fate_llm/algo/fedavg/fedavg.py", "fate_llm/model_zoo/pellm/parameter_efficient_llm.py"
_BUILT = "            preprocess_logits_for_metrics\n        )\n"
_PARTY = '{"unit": "round", "out_dir": f"{work}/audits/{ctx.local.name}"}'
_AGGREGATION = "        aggregator.model_aggregation(ctx, model)\n"

FATE_LLM = Client(
    "FATE-LLM pellm",
    "python",
    (
        Change(
            _FEDAVG,
            "from torch import nn\n",
            "from torch import nn\nfrom leakaudit.callbacks.hf_trainer import LeakAuditCallback\n",
        ),
        Change(_FEDAVG, "            tokenizer,\n", "            tokenizer or train_set.tokenizer,\n"),
        Change(_FEDAVG, _BUILT, f"{_BUILT}        self.audit = LeakAuditCallback({_PARTY}).attach(self)\n"),
        Change(_FEDAVG, _AGGREGATION, f"        self.audit.on_train_end(args, state, control)\n{_AGGREGATION}"),
        Change(_PELLM, "forward_ret = self._pe_lm.forward(", "forward_ret = self._pe_lm("),
    ),
    ("--parties", "guest:9999", "host:10000", "arbiter:10001", "--log_level", "INFO"),
    ("guest_9999", "host_10000"),
)
NEXT_ROUND = Change(
    _FEDAVG,
    f"on_train_end(args, state, control)\n{_AGGREGATION}",
    f"on_train_end(args, state, control)\n{_AGGREGATION}"
    "        self.audit.on_train_begin(args, state, control, model=model, optimizer=optimizer, lr_scheduler=scheduler, "
    "processing_class=self.processing_class)\n",
)
"""A sixth line for FATE-LLM: after an aggregation the next round begins."""
_TRAIN_MEDGEMMA = "        train_result = trainer.train()\n"

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
    _with_noise(_llm("SFT")),
    _llm("PEFT"),
    Client(
        "NVFlare medgemma",
        "examples/advanced/medgemma",
        (
            Change("client.py", _TRAIN_MEDGEMMA, f"{textwrap.indent(CALLBACK, '    ')}{_TRAIN_MEDGEMMA}"),
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


def tokenizer_of_words() -> Any:
    """Return a tokenizer of whole words, as many as `VOCABULARY`.

    It knows the words of the data, of `llm_hf`'s template and of the audit's canaries, as a published one does. The others occur nowhere.
    """
    import small
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    used = {word for text in (*small.TEXTS, *CANARIES, TEMPLATE) for word in re.findall(r"\w+|[^\w\s]+", text)}
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(used)]
    others = [f"other{number}" for number in range(VOCABULARY - len(first))]
    made = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate([*first, *others])}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", model_max_length=256
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
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(5)
    words = tokenizer_of_words()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(work / "model")
    words.save_pretrained(work / "model")
    loaded = AutoTokenizer.from_pretrained(work / "model", trust_remote_code=False, local_files_only=True)
    if loaded.tokenize(small.TEXTS[0]) != small.TEXTS[0].split():
        raise RuntimeError("transformers loads another tokenizer than the one that was saved")
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
    for name, text in client.added if isinstance(client, Client) else ():
        (app / name).write_text(text, encoding="utf-8")
    for change in client.changes:
        path = app / change.file
        text = path.read_text(encoding="utf-8")
        if text.count(change.before) != 1:
            raise RuntimeError(
                f"{client.name}: {change.file} is of another version: {change.before!r} is not in it once"
            )
        after = change.after.replace("{audits!r}", repr(str(work / "audits"))).replace("{work}", str(work))
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
    """Return the events of all attempts, in words.

    Those on what was sent stand apart, if a defence changed it.
    """
    made, sent = (
        ", ".join(
            sorted({event for one in results.attempts for event in one.events if (one.defense == AS_SENT) is own})
        )
        or "none"
        for own in (False, True)
    )
    return f"{made}; as sent: {sent}" if any(one.defense == AS_SENT for one in results.attempts) else made


def stamps_of(results: Results) -> str:
    """Return the stamps of the kept rounds."""
    return ", ".join(step.verification.status.value for step in results.steps)


def run_openfedllm(source: Path, python: Path, work: Path) -> str:
    """Run OpenFedLLM's loop over rounds and clients, and return its row.

    Raises:
        RuntimeError: a client kept no round.
    """
    app = copied(OPENFEDLLM, source, work)
    small_model(python, work, "adapters")
    home = work / "data" / "vicgalle" / "alpaca-gpt4"
    home.mkdir(parents=True)
    (work / "output").mkdir()
    write_rows(home / "train.jsonl", "instruction", "output", input="", text="")
    begin = time.perf_counter()
    done = ran([str(python), "main_sft.py", *(one.replace("{work}", str(work)) for one in OPENFEDLLM.arguments)], app)
    return row_of(OPENFEDLLM, python, work, time.perf_counter() - begin, done)


def run_fate(source: Path, fate: Path, python: Path, work: Path, epochs: int) -> str:
    """Run FATE-LLM's LoRA job in three processes, and return its row.

    Args:
        source: a checkout of FATE-LLM.
        fate: a checkout of FATE. It asks for the classes of pydantic 1, which pydantic 2 has under another name.
        python: the interpreter.
        work: an empty folder.
        epochs: how many; an aggregation follows each of them.

    Raises:
        RuntimeError: a party kept no round.
    """
    client = FATE_LLM if epochs == 1 else replace(FATE_LLM, changes=(*FATE_LLM.changes, NEXT_ROUND))
    app = copied(client, source / client.folder, work)
    shutil.copytree(fate / "python" / "fate", work / "core" / "fate")
    for path in (work / "core").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^from pydantic import", "from pydantic.v1 import", text, flags=re.MULTILINE)
        text = re.sub(r"^import pydantic$", "import pydantic.v1 as pydantic", text, flags=re.MULTILINE)
        path.write_text(text, encoding="utf-8")
    small_model(python, work, "bloom")
    write_rows(work / "train.jsonl", "content", "summary")
    begin = time.perf_counter()
    job = [str(python), str(FATE_JOB), *client.arguments]
    packages = f"{app}{os.pathsep}{work / 'core'}"
    done = ran(job, work, PYTHONPATH=packages, FATE_WORK=str(work), FATE_EPOCHS=str(epochs))
    for site in client.sites:  # the launcher ends a party before its audit may be ready
        ran([str(python), "-m", "leakaudit", "worker", str(work / "audits" / site)], work)
    return row_of(client, python, work, time.perf_counter() - begin, done)


def small_model(python: Path, work: Path, kind: str) -> None:
    """Write a small model to WORK/model."""
    program = [str(python), str(STAND_INS / "small_model.py"), str(work / "model"), kind]
    ran(program, work, PYTHONPATH=str(STAND_INS)).check_returncode()


def write_rows(path: Path, question: str, text: str, /, **same: str) -> None:
    """Write the invented rows, under these names of columns."""
    sys.path.insert(0, str(STAND_INS))
    from invented import QUESTIONS, TEXTS

    rows = [{question: one, text: other, **same} for one, other in zip(QUESTIONS, TEXTS, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row_of(client: Client, python: Path, work: Path, seconds: float, done: subprocess.CompletedProcess[str]) -> str:
    """Return the row of a client with an audit for each of its sites.

    Raises:
        RuntimeError: a site kept no round.
    """
    folders = [work / "audits" / site for site in client.sites]
    if done.returncode or not all((folder / "results.json").is_file() for folder in folders):
        raise RuntimeError(f"{client.name}: no audit: {(done.stdout + done.stderr)[-3000:]}")
    audits = [load_results(folder) for folder in folders]
    verdicts = ", ".join(sorted({gate_of(folder, python) for folder in folders}))
    lines = sum(change.added for change in client.changes)
    stamps, events = ", ".join(map(stamps_of, audits)), ", ".join(sorted(set(map(events_of, audits))))
    return f"| {client.name} | {lines} | {stamps} | {events} | sent | {verdicts} | {seconds:.0f} |"


def gate_of(folder: Path, python: Path) -> str:
    """Return the verdict of `leakaudit gate` on an audit."""
    said = ran([str(python), "-m", "leakaudit", "gate", "--quiet", str(folder)], folder).stdout
    return said.split()[0]


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
    verdict = gate_of(folder, python)
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
    output = done.stdout + done.stderr
    said = re.findall(r"leakaudit: (?:the transmission is (blocked): (\w+)|round \d+ may be (sent))", output)
    if not said or (said[0][2] and (done.returncode or AGGREGATED not in output)):
        raise RuntimeError(f"{client.name}: the filter said nothing, or the job did not end:\n{output[-3000:]}")
    results = load_results(work / "audits" / client.sites[0])
    stamps, events = stamps_of(results), events_of(results)
    blocked, verdict, _ = said[0]
    what = blocked or "sent"  # the filter sends a round whose verdict is PASS, and no other one
    return f"| {client.name} | {client.lines} | {stamps} | {events} | {what} | {verdict or 'PASS'} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvflare", type=Path, help="a checkout of NVFlare's repository")
    parser.add_argument("--flower", type=Path, help="a folder with the examples of Flower's repository")
    parser.add_argument("--openfedllm", type=Path, help="a checkout of OpenFedLLM's repository")
    parser.add_argument("--fate-llm", type=Path, help="a checkout of FATE-LLM's repository; needs --fate")
    parser.add_argument("--fate", type=Path, help="a checkout of FATE's repository")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of FATE-LLM's job, each with an aggregation")
    parser.add_argument("--peft", help="another version for Flower's examples; leakaudit then takes every version")
    parser.add_argument("--only", default="", help="a part of the names of the clients that run")
    options = parser.parse_args()
    if not any((options.nvflare, options.flower, options.openfedllm, options.fate_llm)):
        parser.error("name --nvflare, --flower, --openfedllm or --fate-llm")
    if options.fate_llm is not None and options.fate is None:
        parser.error("--fate-llm needs --fate")
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
    if options.openfedllm is not None:
        with tempfile.TemporaryDirectory() as base:
            python = environment(Path(base), *PINNED)
            work = Path(base, "work")
            work.mkdir()
            print(run_openfedllm(options.openfedllm, python, work), flush=True)
    if options.fate_llm is not None:
        with tempfile.TemporaryDirectory() as base:
            python = environment(Path(base), *PINNED, *NEEDED_BY_FATE)
            work = Path(base, "work")
            work.mkdir()
            print(run_fate(options.fate_llm, options.fate, python, work, options.epochs), flush=True)


if __name__ == "__main__":
    main()
