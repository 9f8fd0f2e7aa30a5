"""Language models that read pictures beside text: captured, verified, attacked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leakaudit.audit.audit import Audit
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.models.recipe import architecture
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from tests.support import tiny
from tests.support.tiny_trainer import audit_config, kept, stamp, without_side_process

TOKENIZER = tiny.gpt2_tokenizer()
WORDS = len(TOKENIZER)
IMAGE, BEGIN, END = WORDS, WORDS + 1, WORDS + 2
TEXTS = ("the old dog chased a cat .", "a small bird saw the red fish .")

TEXT: dict[str, Any] = {
    "vocab_size": WORDS + 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

Batch = dict[str, Tensor]


def _ids(text: str, pictures: int) -> Batch:
    ids = torch.tensor([[BEGIN, *[IMAGE] * pictures, END, *TOKENIZER(text)["input_ids"]]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids >= WORDS, -100),
    }


def gemma3() -> Any:
    """Return a Gemma 3 with a SigLIP tower."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 16},
        vision_config={**TOWER, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )
    return Gemma3ForConditionalGeneration(config)


def gemma3_batch(text: str) -> Batch:
    """Return a text with one picture."""
    batch = _ids(text, 4)
    marks = (batch["input_ids"] == IMAGE).long()
    return {**batch, "token_type_ids": marks, "pixel_values": torch.randn(1, 3, 56, 56)}


def llava() -> Any:
    """Return a LLaVA with a CLIP tower and a Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**TOWER, image_size=28, patch_size=14),
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_seq_length=4,
    )
    return LlavaForConditionalGeneration(config)


def llava_batch(text: str) -> Batch:
    """Return a text with one picture."""
    return {**_ids(text, 4), "pixel_values": torch.randn(1, 3, 28, 28)}


def qwen() -> Any:
    """Return a Qwen 2.5 VL."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_scaling": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen_batch(text: str) -> Batch:
    """Return a text with one picture of four patches, which make one token."""
    patches = torch.randn(4, 3 * 2 * 14 * 14)
    return {**_ids(text, 1), "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 2, 2]])}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[str], Batch]]] = {
    "gemma3": (gemma3, gemma3_batch),
    "llava": (llava, llava_batch),
    "qwen": (qwen, qwen_batch),
}


def adapted(model: Any) -> Any:
    """Return a model with adapters, and the word table trained beside them."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["embed_tokens"]))


def trained(folder: Path, name: str, *, adapters: bool = False, **options: Any) -> list[Snapshot]:
    """Train two steps with an audit, and return what it kept."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    if adapters:
        model = adapted(model)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    audit = watch(model, optimizer, tokenizer=TOKENIZER, config=audit_config(folder, max_snapshots=50), **options)
    with without_side_process(), audit:
        for text in TEXTS:
            model(**batch(text)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(kept(audit).values())


@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_a_model_with_pictures_is_verified(tmp_path: Path, name: str) -> None:
    """The side process makes the picture tower, too."""
    snapshots = trained(tmp_path, name)
    assert len(snapshots) == 2
    for snapshot in snapshots:
        assert stamp(snapshot).status is VerificationStatus.VERIFIED
        assert "pixel_values" in snapshot.truth.micro_batches[0].inputs


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_adapters_is_verified(tmp_path: Path, name: str) -> None:
    """NVFlare's medgemma trains adapters and the word table beside them."""
    (snapshot,) = trained(tmp_path, name, adapters=True, observe="delta", local_steps=2)
    assert stamp(snapshot).status is VerificationStatus.VERIFIED
    assert any("lora_A" in one for one in snapshot.observation.update)


def test_the_text_beside_a_picture_is_attacked(tmp_path: Path) -> None:
    """Words come back from the rows of the word table."""
    first, _ = trained(tmp_path, "llava")
    config = audit_config(tmp_path).model_copy(update={"controls": 0})
    audit = Audit(tmp_path / "results", config, TOKENIZER)
    audit.step(first)
    (rows,) = [entry.attempt for entry in audit.entries if entry.attempt.attack == "embedding-rows"]
    assert rows.status is AttemptStatus.RAN and "most_words" in rows.events


@pytest.mark.parametrize("name", MODELS)
def test_the_kept_configuration_makes_the_same_tower(name: str) -> None:
    """Classes that leave the tower open (`AutoConfig`) lost its sizes."""
    config = MODELS[name][0]().config
    found = type(config)(**architecture(config))
    assert found.vision_config.to_dict().items() >= {"hidden_size": 32, "intermediate_size": 64}.items()
