"""Says what preflight makes of axolotl's example configurations.

    python -m tests.benchmarks.preflight_axolotl axolotl/examples

The folder is the one of axolotl's repository. Counted are its YAML files with a `base_model`. Nothing is trained: the answer is preflight's,
and tests/preflight/test_agreement.py holds twelve of its kinds against trainings of tiny models.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from leakaudit.errors import ConfigError
from leakaudit.preflight.answer import Answer, preflight
from leakaudit.preflight.files import read_recipe, with_rounds


def answers(folder: Path) -> list[Answer]:
    """Return preflight's answer to each configuration of a folder."""
    found = []
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        try:
            recipe = read_recipe(path)
        except ConfigError:
            continue  # a file of something else, such as of a container
        found.append(preflight(recipe))
    return [one for one in found if one.recipe.source == "axolotl"]


def reason(why: str, said: str) -> str:
    """Return the group of a finding: its key without the value, and why."""
    return f"{said.partition(':')[0].partition(' ')[0]}: {why}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    all_of_them = answers(options.folder)
    seconds = time.perf_counter() - begin
    n = len(all_of_them)
    outlooks = Counter(one.outlook for one in all_of_them)
    print(f"n: {n} configurations, {seconds:.1f} s\n")
    print("| answer | configurations | share |\n| --- | --- | --- |")
    for outlook in ("captured", "untested", "refused"):
        print(f"| {outlook} | {outlooks[outlook]} | {outlooks[outlook] / n:.0%} |")
    packed = [one for one in all_of_them if one.recipe.packed is not None]
    print(
        f"\nOf the {len(packed)} on a packed base, {sum(one.outlook == 'captured' for one in packed)} are captured.\n"
    )
    print(
        "| what blocks (a configuration may have several) | kind | configurations | alone |\n| --- | --- | --- | --- |"
    )
    blocking = [[f for f in one.findings if f.kind in ("refused", "untested")] for one in all_of_them]
    groups = Counter((reason(f.why, f.said), f.kind) for found in blocking for f in found)
    alone = Counter((reason(f.why, f.said), f.kind) for found in blocking if len(found) == 1 for f in found)
    for (text, kind), count in groups.most_common():
        print(f"| {text} | {kind} | {count} | {alone[text, kind]} |")
    rounds = [preflight(with_rounds(one.recipe, 10)) for one in all_of_them if one.outlook == "captured"]
    verified = sum(
        not any(f.kind == "weaker" and f.said.startswith("optimizer") for f in one.findings) for one in rounds
    )
    print(
        f"\nAs clients of a federation (rounds of 10 local steps), {verified} of the {len(rounds)} captured ones have an optimizer"
    )
    print("whose local steps are computed again; the others are kept with unknown moments.")


if __name__ == "__main__":
    main()
