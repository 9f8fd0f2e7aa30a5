"""Table of exact recovery from updates with noise, pruning or rounding.

Run: `python -m tests.benchmarks.exact_recovery --data FILE.jsonl`.

Prints the table of `leakaudit/attacks/README.md`: one row per defence and strength, with exact rate, token recall, tokens among the
attack's candidates (reachability), n, seeds and median seconds a batch. Nothing is granted; the protocol declares the defence,
as an adversary would know it. `--only TEXT` runs the rows whose defence contains TEXT. Not collected by pytest.
"""

from __future__ import annotations

import time

from tests.benchmarks.span import Setting, arguments, in_percent, measure

NOISE = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Standard deviation over the root mean square of the update."""

PRUNED = (0.3, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Share of entries set to zero."""

FROZEN = ("embeddings",)

SETTINGS = (
    *(Setting("eval", FROZEN, 1, f"gaussian-noise(scale={scale})") for scale in NOISE),
    *(Setting("eval", FROZEN, 1, f"laplace-noise(scale={scale})") for scale in (0.01, 0.1)),
    *(Setting("eval", FROZEN, 1, f"prune(share={share})") for share in PRUNED),
    *(Setting("eval", FROZEN, 1, f"round(dtype={dtype})") for dtype in ("bf16", "fp16")),
    *(Setting("eval", FROZEN, 1, f"quantize(bits={bits})") for bits in (8, 4)),
    Setting("eval", FROZEN, 1, "sign"),
)


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__.splitlines()[0], sentences=12)
    parser.add_argument("--only", default="", help="rows whose defence contains this")
    options = parser.parse_args()
    started = time.monotonic()
    print(f"{options.data.parent.name}/{options.data.name}, seeds {options.seeds}, dropout off, embeddings frozen")
    print("| defence | B | n | exact | token recall | reachable tokens | s a batch |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for s in SETTINGS:
        if options.only not in s.defense:
            continue
        found = measure(s, options.model, options.data, options.sentences, options.seeds, options.device)
        rates = (found.scores.get("exact"), found.scores.get("token_recall"), found.reachable_tokens)
        print(
            f"| `{s.defense}` | {s.batch_size} | {found.sequences} | {in_percent(rates)} | {found.seconds_per_step:.1f} |",
            flush=True,
        )
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
