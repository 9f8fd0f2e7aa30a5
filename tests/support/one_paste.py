"""The blocks of README's section "One paste", and the users' programs around them."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "pastes"
PLACE = re.compile(r"^( *)# paste:(.*)\n", re.MULTILINE)
OWN = re.compile(r"\.\.\.(  # .*)?$", re.MULTILINE)
"""What stands in a block for the user's code."""
INSTALL = "# pip install "


class Part(NamedTuple):
    """One program of a stack, and where its block goes."""

    program: str
    target: str


STACKS: dict[str, tuple[Part, ...]] = {
    "Trainer": (Part("trainer.py", "main.py"),),
    "Lightning": (Part("lightning_module.py", "main.py"),),
    "torch": (Part("torch_loop.py", "main.py"),),
    "TRL": (Part("with_trl.py", "main.py"),),
    "Flower": (Part("flower_app.py", "main.py"),),
    "NVFlare": (Part("nvflare_job.py", "main.py"), Part("nvflare_client.py", "client.py")),
    "axolotl": (Part("axolotl.yaml", "axolotl.yaml"),),
}
"""Name in README -> the user's programs, one for each block."""


@dataclass(frozen=True)
class Paste:
    """What README shows for one stack."""

    stack: str
    blocks: tuple[str, ...]

    @property
    def requirements(self) -> list[str]:
        """Return what the block's first line installs."""
        first = self.blocks[0].splitlines()[0]
        assert first.startswith(INSTALL), f"{self.stack}: the first line installs nothing: {first}"
        return [word.strip('"') for word in first.removeprefix(INSTALL).split()]

    @property
    def lines(self) -> int:
        """Return how many lines of code a user pastes."""
        return sum(
            bool(line.strip()) and not line.lstrip().startswith("#")
            for block in self.blocks
            for line in block.splitlines()
        )

    def write(self, folder: Path, audits: Path) -> None:
        """Write the user's programs with the blocks pasted into a folder.

        Args:
            folder: where the programs go.
            audits: takes the place of `/audits`, which a test cannot write to.
        """
        shutil.copy(PROGRAMS / "small.py", folder / "small.py")
        for part, block in zip(STACKS[self.stack], self.blocks, strict=True):
            text = pasted((PROGRAMS / part.program).read_text(encoding="utf-8"), block)
            (folder / part.target).write_text(text.replace('"/audits"', f'"{audits}"'), encoding="utf-8")


def pasted(program: str, block: str) -> str:
    """Return a program with a block in its place; the user's own code replaces `...`."""
    [place] = PLACE.finditer(program)
    own = [one.strip() for one in place[2].split("|") if one.strip()]
    assert len(OWN.findall(block)) == len(own), "the program has other code of its own than the block asks for"
    for one in own:
        block = OWN.sub(lambda _, one=one: one, block, count=1)  # type: ignore[misc]
    indented = "".join(f"{place[1]}{line}\n" if line else "\n" for line in block.splitlines())
    return program[: place.start()] + indented + program[place.end() :]


def pastes(readme: Path = ROOT / "README.md") -> list[Paste]:
    """Return the blocks of README, in its order."""
    [section] = re.findall(r"^## One paste\n(.*?)^## ", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    found = []
    for stack, text in re.findall(r"^\*\*(\w+)\*\*(.*?)(?=^\*\*\w+\*\*|\Z)", section, re.MULTILINE | re.DOTALL):
        blocks = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        found.append(Paste(stack, tuple(blocks)))
    return found
