"""Three kinds of files are read, and what they do not say is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import TrainingArguments

from leakaudit.cli import main
from leakaudit.client.optimizer import ALGORITHMS
from leakaudit.errors import ConfigError
from leakaudit.preflight.answer import LIMIT, preflight
from leakaudit.preflight.files import read_recipe, with_adapter, with_model, with_rounds
from leakaudit.preflight.reading import column_of
from leakaudit.preflight.recipe import Recipe, Rounds
from leakaudit.preflight.rules import KNOWN_RULES

FLOWER = """
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.config]
model.name = "some/3b-model"
model.quantization = 4
model.lora.peft-lora-r = 32
train.seq-length = 512
train.training-arguments.per-device-train-batch-size = 16
train.training-arguments.gradient-accumulation-steps = 1
train.training-arguments.max-steps = 10
"""


def told(folder: Path, name: str, text: str) -> Recipe:
    """Write a file and read it."""
    (folder / name).write_text(text, encoding="utf-8")
    return read_recipe(folder / name)


def test_a_flower_app_is_read(tmp_path: Path) -> None:
    """A client of FlowerTune: a base of four bits, adapters, rounds of ten steps."""
    recipe = told(tmp_path, "pyproject.toml", FLOWER)
    assert recipe.source == "Flower app" and recipe.rounds == Rounds(10) and recipe.most_tokens == 8192
    assert recipe.packed is not None and recipe.adapter is not None and recipe.adapter.rank == 32
    assert recipe == read_recipe(tmp_path), "a folder stands for its pyproject.toml"
    answer = preflight(recipe)
    assert answer.outlook == "captured" and answer.reads is not None
    assert answer.reads.column == "adapters, AdamW, K = 10"


def test_arguments_of_a_trainer_are_read_with_model_and_adapter(tmp_path: Path) -> None:
    """As transformers writes them."""
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
    )
    recipe = told(tmp_path, "args.json", arguments.to_json_string())
    assert (recipe.source, recipe.texts, recipe.passes, recipe.tokens) == ("TrainingArguments", 4, 2, None)
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 64, "quantization_config": {"quant_method": "awq"}})
    )
    options = {"peft_type": "LORA", "r": 8, "modules_to_save": ["model.embed_tokens"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    full = with_adapter(with_model(recipe, tmp_path), tmp_path)
    assert full.hidden_size == 64 and full.packed is not None and full.packed.in_layers
    assert full.adapter is not None and full.adapter.rank == 8 and full.trains_tables
    reads = preflight(full).reads
    assert reads is not None and "embedding-rows" in reads.attacks
    assert any("not known here" in line for line in reads.lines)


@pytest.mark.parametrize(
    ("text", "outlook", "said"),
    [
        ("load_in_4bit: true\nadapter: qlora", "captured", "load_in_4bit"),
        ("qat: {weight_dtype: int8}", "untested", "qat"),
        ("deepspeed: zero3.json", "refused", "deepspeed"),
        ("fsdp: [full_shard]\nfsdp_config: {fsdp_version: 2}", "captured", ""),
        ("fsdp: [full_shard]\nfsdp_version: 2\nbf16: true", "captured", "fsdp"),
        ("fsdp_version: 2\nload_in_4bit: true\nadapter: qlora", "untested", "fsdp"),
        ("fsdp: [full_shard]", "refused", "fsdp"),
        ("tensor_parallel_size: 2", "refused", "tensor_parallel_size"),
        ("optimizer: lomo", "refused", "lomo"),
        ("rl: ebft", "untested", "ebft"),
        ("rl: dpo", "captured", ""),
        ("processor_type: AutoProcessor", "captured", "processor_type"),
        ("adapter: lora\nlora_target_parameters: [experts.w]", "untested", "experts.w"),
        ("fp16: true", "untested", "float16"),
        ("attn_implementation: flash_attention_2", "captured", "flash_attention_2"),
    ],
)
def test_a_line_decides_and_is_named(text: str, outlook: str, said: str, tmp_path: Path) -> None:
    """Whatever blocks an audit is named, and has a change where there is one."""
    answer = preflight(told(tmp_path, "a.yaml", f"base_model: m\n{text}"))
    assert answer.outlook == outlook
    assert any(said in one.said for one in answer.findings) or not said
    assert answer.changes or outlook != "refused"
    assert (answer.reads is None) == (outlook == "refused")


def test_fsdp1_is_refused_with_the_loop_that_is_audited(tmp_path: Path) -> None:
    """A Trainer's FSDP1 is refused; a loop of torch under `watch` is the other way."""
    answer = preflight(told(tmp_path, "a.yaml", "base_model: m\nfsdp: [full_shard]"))
    assert any("`use_orig_params=True` in a loop of torch" in change for change in answer.changes)


def test_tokens_are_counted_over_the_hidden_size(tmp_path: Path) -> None:
    """Packed sequences are full; others are at most that long."""
    recipe = told(
        tmp_path, "a.yaml", "base_model: m\nmicro_batch_size: 2\nsequence_len: 100\ngradient_accumulation_steps: 4"
    )
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 400}}')
    reads = preflight(with_model(recipe, tmp_path)).reads
    assert reads is not None
    [line] = [one for one in reads.lines if one.startswith("tokens of a step")]
    assert "at most 800 (2 x 100 tokens x 4 passes) = 2 D" in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "just words"),
        ("a.yaml", "other: keys"),
        ("a.json", "{broken"),
        ("a.toml", "[tool.other]"),
        ("a.yaml", "a: [1"),
    ],
)
def test_other_files_are_refused_in_a_sentence(name: str, text: str, tmp_path: Path) -> None:
    """It says which kinds of files are read."""
    with pytest.raises(ConfigError):
        told(tmp_path, name, text)
    done = CliRunner().invoke(main, ["preflight", str(tmp_path / name)])
    assert done.exit_code == 2 and "Traceback" not in done.output


def test_the_command_prints_and_never_calls_a_training_safe(tmp_path: Path) -> None:
    """Exit code 2 where the audit refuses."""
    path = tmp_path / "a.yaml"
    path.write_text("base_model: m\nadapter: lora\nlora_r: 8\n")
    done = CliRunner().invoke(main, ["preflight", str(path), "--hidden-size", "64", "--local-steps", "3"])
    assert done.exit_code == 0 and "rank 8" in done.output and "3 local steps" in done.output
    assert "safe" not in done.output.replace(LIMIT, "")
    whole = json.loads(CliRunner().invoke(main, ["preflight", str(path), "--json"]).output)
    assert whole["schema"] == "leakaudit.preflight/1" and whole["outlook"] == "captured" and whole["limit"] == LIMIT
    path.write_text("base_model: m\ndeepspeed: zero2.json\n")
    refused = CliRunner().invoke(main, ["preflight", str(path)])
    assert refused.exit_code == 2 and "change" in refused.output


def test_known_rules_are_those_that_capture_repeats() -> None:
    """A rule that capture does not know would be called verified here."""
    assert set(KNOWN_RULES.values()) <= {name.rpartition(".")[2] for name in ALGORITHMS}


@pytest.mark.parametrize(
    ("optimizer", "steps", "column"),
    [
        ("adamw_torch", 1, "AdamW, K = 1"),
        ("adamw_torch", None, "AdamW, K = 4"),
        ("lion_8bit", 1, "AdamW, K = 4"),
        ("sgd", 1, "SGD, K = 1"),
        ("sgd", 5, "SGD, K = 4"),
    ],
)
def test_what_is_unknown_counts_as_what_tells_less(optimizer: str, steps: int | None, column: str) -> None:
    """Attacks that may not run are not promised."""
    assert column_of(with_rounds(Recipe("test", optimizer=optimizer), steps)) == column


def test_reading_a_file_runs_nothing_of_it(tmp_path: Path) -> None:
    """YAML's tags for objects are an error."""
    with pytest.raises(ConfigError, match="can be read"):
        told(tmp_path, "a.yaml", "base_model: !!python/object/apply:os.system [echo]")
    found: Any = told(tmp_path, "b.yaml", "base_model: 3\nmicro_batch_size: many\nlora_r: {}\nadapter: [lora]")
    assert found.texts is None
