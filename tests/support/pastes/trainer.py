"""A user's script with the Hugging Face Trainer."""

from small import STEPS, classifier, labelled, tokenizer
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

trainer = Trainer(
    model=classifier(),
    args=TrainingArguments("model", max_steps=STEPS, per_device_train_batch_size=1, report_to="none", use_cpu=True),
    train_dataset=labelled(),
    data_collator=DataCollatorWithPadding(tokenizer()),
    processing_class=tokenizer(),
)
# paste:
trainer.train()
