"""Table of `span` on low-rank adapters and on local steps.

Run: `python -m tests.benchmarks.federated --data FILE.jsonl`.

Prints one table row per setting, as `tests.benchmarks.span` does. Nothing is granted. Not collected by pytest.
"""

from __future__ import annotations

import time

from tests.benchmarks.span import Setting, arguments, in_percent, measure

ADAPTERS = (
    *(
        Setting("eval", (), 1, more=(("lora_rank", rank), ("lora_warmup", warmup)))
        for warmup in (3, 0)
        for rank in (1, 4, 8, 16, 32, 64)
    ),
    *(
        Setting("eval", (), size, more=(("lora_rank", rank), ("lora_warmup", 3)))
        for size in (2, 4)
        for rank in (4, 16, 64)
    ),
)
"""Adapters of query and value (peft's choice); after three steps, and at the start, where B is zero."""

INPUT_STAGE = ("embeddings", "*.embeddings.LayerNorm.*")

LOCAL_STEPS = (
    *(
        Setting("eval", INPUT_STAGE, 1, more=(("local_steps", 1), ("learning_rate", rate)))
        for rate in (1e-2, 1e-3, 1e-4)
    ),
    *(Setting("eval", (), 1, more=(("local_steps", 1), ("learning_rate", rate))) for rate in (1e-2, 1e-4)),
    *(
        Setting("eval", INPUT_STAGE, 1, more=(("local_steps", steps), ("learning_rate", rate)))
        for rate in (1e-2, 1e-3)
        for steps in (2, 5, 10)
    ),
)
"""One text a step; with the input stage frozen, and with everything trained."""

ADAM = (
    *(
        Setting("eval", (), size, more=(("optimizer", "adamw"), ("learning_rate", rate)))
        for rate in (5e-5, 1e-3)
        for size in (1, 4)
    ),
    *(Setting("eval", INPUT_STAGE, 1, more=(("optimizer", "adamw"), ("learning_rate", rate))) for rate in (5e-5, 1e-3)),
    Setting("eval", (), 4, more=(("optimizer", "adamw"), ("learning_rate", 5e-5), ("max_grad_norm", 1.0))),
    *(
        Setting("eval", frozen, 1, more=(("optimizer", "adamw"), ("learning_rate", 5e-5), ("local_steps", steps)))
        for frozen in ((), INPUT_STAGE)
        for steps in (4, 10)
    ),
    Setting(
        "eval",
        (),
        1,
        more=(("optimizer", "adamw"), ("learning_rate", 2e-4), ("lora_rank", 16), ("lora_warmup", 3)),
    ),
)
"""Full fine-tuning with AdamW from fresh moments; with the input stage frozen, clipped, in several local steps, and of adapters."""


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__.splitlines()[0], sentences=None)
    parser.add_argument(
        "--what", choices=["adapters", "local-steps", "adam"], nargs="+", default=["adapters", "local-steps"]
    )
    parser.add_argument("--steps", type=int, default=30, help="steps a setting, over all seeds")
    parser.add_argument("--local-steps", type=int, nargs="+", help="only rows of so many local steps")
    options = parser.parse_args()
    start = time.perf_counter()
    print(f"{options.data.name}, {options.steps} steps a row, seeds {options.seeds}, nothing granted")
    print("| frozen | B | simulation | steps read | n | exact | token recall | R-L | reachable tokens | s a batch |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    settings = (ADAPTERS if "adapters" in options.what else ()) + (LOCAL_STEPS if "local-steps" in options.what else ())
    settings += ADAM if "adam" in options.what else ()
    for s in settings:
        if options.local_steps and dict(s.more).get("local_steps") not in options.local_steps:
            continue
        texts = options.steps * s.batch_size  # as many steps in every row
        found = measure(s, options.model, options.data, texts, options.seeds, options.device)
        rates = (
            found.scores.get("exact"),
            found.scores.get("token_recall"),
            found.scores.get("rougeL"),
            found.reachable_tokens,
        )
        tried = sum(found.status_counts.values())  # rates are over the steps that the attack applied to
        more = ", ".join(f"{name} {value if isinstance(value, str) else format(value, 'g')}" for name, value in s.more)
        print(
            f"| {', '.join(s.freeze) or 'nothing'} | {s.batch_size} | {more} | {found.steps} of {tried} | {found.sequences} "
            f"| {in_percent(rates)} "
            f"| {found.seconds_per_step or 0.0:.2f} |",
            flush=True,
        )
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
