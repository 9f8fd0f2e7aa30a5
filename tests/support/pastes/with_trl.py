"""A user's script with TRL: adapters on a language model."""

import small
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model=small.language_model(),
    args=SFTConfig(
        "model",
        max_steps=small.STEPS,
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_list([{"text": text} for text in small.TEXTS]),
    processing_class=small.tokenizer(),
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
# paste:
trainer.train()
