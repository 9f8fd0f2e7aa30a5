"""What a configuration says of an audit, before anything trains and without torch.

    leakaudit preflight axolotl.yaml

`recipe` says what was configured, `axolotl`, `training_arguments` and `flower_app` read it from the files of these frameworks, `rules`
say what capture does with it, `reading` which attacks read the update, and `answer` puts it together.
"""

from __future__ import annotations

__all__ = [
    "answer",
    "attack_table",
    "axolotl",
    "files",
    "flower_app",
    "reading",
    "recipe",
    "rules",
    "strategies",
    "training_arguments",
]
