"""Who may import whom: every import of every module is read from the source and held against the room table."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS: dict[str, tuple[str, ...]] = {
    "plain": (
        "leakaudit",
        "leakaudit.plugins.budget",
        "leakaudit.audit.canaries",
        "leakaudit.plugins.names",
        "leakaudit.config.audit",
        "leakaudit.results.consistency",
        "leakaudit.storage.digests",
        "leakaudit.errors",
        "leakaudit.gate.evaluate",
        "leakaudit.config.invocation",
        "leakaudit.files.json_lines",
        "leakaudit.storage.parent_watch",
        "leakaudit.results.not_audited",
        "leakaudit.capture.outcome",
        "leakaudit.capture.plan",
        "leakaudit.results.recovery",
        "leakaudit.registry",
        "leakaudit.reports.*",
        "leakaudit.results.schema",
        "leakaudit.results.bounds",
        "leakaudit.files.strict_json",
        "leakaudit.config.strict_yaml",
        "leakaudit.cli.threads",
        "leakaudit.results.wording",
    ),
    "core": (
        "leakaudit.audit.active_server",
        "leakaudit.models.structure",
        "leakaudit.models.array_classifier",
        "leakaudit.client.step",
        "leakaudit.storage.frozen_weights",
        "leakaudit.models.lora",
        "leakaudit.models.recipe",
        "leakaudit.models.module_parts",
        "leakaudit.models.module_settings",
        "leakaudit.models.parts",
        "leakaudit.models.wide_pooler",
        "leakaudit.capture.worker_progress",
        "leakaudit.storage.retention",
        "leakaudit.storage.encryption",
        "leakaudit.client.sequences",
        "leakaudit.capture.sketch",
        "leakaudit.client.snapshot",
        "leakaudit.storage.snapshot_content",
        "leakaudit.storage.snapshot_files",
        "leakaudit.storage.spool",
        "leakaudit.storage.safetensors_stream",
        "leakaudit.audit.verification",
    ),
    "attacks": ("leakaudit.attacks.*", "leakaudit.priors.*"),
    "defenses": ("leakaudit.defenses.*",),
    "metrics": ("leakaudit.metrics.*",),
    "battery": (
        "leakaudit.audit.audit",
        "leakaudit.audit.devices",
        "leakaudit.cli.run_folder",
        "leakaudit.audit.simulation.texts",
        "leakaudit.audit.simulation.arrays",
        "leakaudit.audit.worker",
    ),
    "inline": ("leakaudit.audit.inline", "leakaudit.audit.live_copy"),
    "callbacks": ("leakaudit.callbacks.*",),
    "cli": (
        "leakaudit.__main__",
        "leakaudit.cli",
        "leakaudit.cli.prior",
        "leakaudit.cli.progress",
        "leakaudit.cli.snapshots",
        "leakaudit.cli.common",
        "leakaudit.cli.doctor",
        "leakaudit.cli.stopping",
    ),
}
"""Room -> its modules; `.*` takes the package and everything below it."""

MAY_IMPORT: dict[str, frozenset[str]] = {
    "plain": frozenset({"plain"}),
    "core": frozenset({"plain", "core"}),
    "attacks": frozenset({"plain", "core", "attacks"}),
    "defenses": frozenset({"plain", "core", "defenses"}),
    "metrics": frozenset({"plain", "core", "metrics"}),
    "battery": frozenset({"plain", "core", "attacks", "defenses", "metrics", "battery"}),
    "inline": frozenset({"plain", "core", "attacks", "defenses", "metrics", "battery", "inline"}),
    "callbacks": frozenset({"plain", "core", "callbacks", "inline"}),
    "cli": frozenset(ROOMS),
}
"""Room -> rooms it may import from."""

NEVER: dict[str, frozenset[str]] = {
    "attacks": frozenset({"leakaudit.audit.active_server", "leakaudit.client.step", "leakaudit.storage.spool"}),
    "metrics": frozenset(
        {"leakaudit.models.structure", "leakaudit.client.step", "leakaudit.models.recipe", "leakaudit.storage.spool"}
    ),
}
"""Room -> modules of an allowed room that it may not import all the same: a client step holds the truth, and a metric
never touches the model under attack."""

OBSERVED = frozenset({"DeclaredDefense", "Granted", "Observation", "PublicFacts", "IGNORED_LABEL"})
"""What attacks may take from `leakaudit.client.snapshot`: what an eavesdropper sees, and nothing of the batch."""

MODEL_CODE = frozenset({"torch", "transformers", "accelerate", "safetensors", "lightning", "opacus", "tokenizers"})
"""Libraries that the rooms without torch do without: each of them is, or imports, torch."""

FRAMEWORKS = frozenset({"transformers", "lightning", "pytorch_lightning", "accelerate", "peft", "trl"})
"""Training frameworks: a callbacks file knows at most one of them."""

COMPANIONS = {"transformers": frozenset({"accelerate"}), "lightning": frozenset({"pytorch_lightning"})}
"""What comes with a framework and does not count as a second one: transformers' Trainer is built on accelerate, and Lightning has
two names."""

WITHOUT_TORCH = (
    "leakaudit.plugins.names",
    "leakaudit.gate.evaluate",
    "leakaudit.reports.page",
    "leakaudit.results.schema",
    "leakaudit.config.audit",
    "leakaudit.results.bounds",
    "leakaudit.registry",
    "leakaudit.cli",
)


@dataclass(frozen=True)
class Import:
    """One import statement: who, what, where."""

    importer: str
    target: str
    """Module that is imported."""
    name: str | None
    """Name that is taken from it; None for `import target`."""
    file: Path
    line: int
    late: bool
    """Inside a function."""
    typing_only: bool
    """Under `if TYPE_CHECKING`."""

    def __str__(self) -> str:
        """Return file, line and statement."""
        what = f"from {self.target} import {self.name}" if self.name else f"import {self.target}"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {what}"


@cache
def _modules() -> dict[str, Path]:
    """Return module name -> file, for every module of the package, through the two links."""
    found = {}
    for path in _python_files(ROOT / "leakaudit"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():  # follows the links, which `rglob` does not
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _imports_of(source: str, importer: str, file: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Yield every import in a source, function-local ones and `import_module("...")` with a constant included."""

    def visit(node: ast.AST, late: bool, typing_only: bool) -> Iterator[Import]:
        def here(target: str, name: str | None, line: int) -> Import:
            return Import(importer, target, name, file, line, late, typing_only)

        if isinstance(node, ast.Import):
            for alias in node.names:
                yield here(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                target, name = (below, None) if below in modules else (str(node.module), alias.name)
                yield here(target, name, node.lineno)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            constant = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if isinstance(constant, str):
                yield here(constant, None, node.lineno)
        inner = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.body:
                yield from visit(statement, inner, True)
            for statement in node.orelse:
                yield from visit(statement, inner, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner, typing_only)

    yield from visit(ast.parse(source), False, False)


def _is_dynamic_import(node: ast.Call) -> bool:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called in ("import_module", "__import__")


@cache
def _imports() -> tuple[Import, ...]:
    """Return every import statement of the package."""
    modules = _modules()
    return tuple(
        found
        for module, path in modules.items()
        for found in _imports_of(path.read_text(encoding="utf-8"), module, path, modules)
    )


def _room(module: str) -> str | None:
    """Return the room of one of our modules."""
    for room, members in ROOMS.items():
        for member in members:
            package = member.removesuffix(".*")
            if module == package or (member.endswith(".*") and module.startswith(f"{package}.")):
                return room
    return None


def _ours(module: str) -> bool:
    return module.split(".")[0] == "leakaudit"


def _report(broken: list[Import], rule: str) -> None:
    assert not broken, "\n".join([rule, *map(str, broken)])


def _wrong_rooms(imports: tuple[Import, ...]) -> list[Import]:
    """Return imports into a room that the table does not allow."""
    return [
        found
        for found in imports
        if _ours(found.target)
        and (room := _room(found.importer)) is not None
        and (_room(found.target) not in MAY_IMPORT[room] or found.target in NEVER.get(room, ()))
    ]


def test_every_module_stands_in_a_room() -> None:
    """A new module must be given a place in the table before it can import anything."""
    homeless = [f"{path.relative_to(ROOT)}: {name}" for name, path in _modules().items() if _room(name) is None]
    assert not homeless, f"modules without a room in {Path(__file__).name}: {', '.join(homeless)}"


def test_rooms_import_only_the_rooms_they_may() -> None:
    """Data moves one way; imports inside functions and for type checking count, too."""
    _report(_wrong_rooms(_imports()), "these imports leave their room (see ROOMS and MAY_IMPORT):")


def test_rooms_for_machines_without_torch_never_import_it() -> None:
    """Gate and report run where no model library is installed, so not even a function may ask for one."""
    broken = [
        found
        for found in _imports()
        if _room(found.importer) == "plain" and found.target.split(".")[0] in MODEL_CODE and not found.typing_only
    ]
    _report(broken, "these rooms run without torch:")


def test_the_command_line_imports_heavy_things_inside_the_command_that_needs_them() -> None:
    """`leakaudit --help` and `gate` must not wait for torch."""
    broken = [
        found
        for found in _imports()
        if _room(found.importer) == "cli"
        and not found.late
        and not found.typing_only
        and (
            found.target.split(".")[0] in MODEL_CODE
            or (_ours(found.target) and _room(found.target) not in ("plain", "cli"))
        )
    ]
    _report(broken, "import these inside the command:")


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_it_loads_neither_torch_nor_transformers(module: str) -> None:
    """The source may look clean and a library underneath still pull torch in; so it is tried in a fresh process."""
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_attacks_see_what_an_eavesdropper_sees() -> None:
    """No attack can name the truth, a snapshot, a client step or a recipe, nor reach them through a whole module."""
    broken = [
        found
        for found in _imports()
        if _room(found.importer) == "attacks"
        and found.target == "leakaudit.client.snapshot"
        and found.name not in OBSERVED
    ]
    _report(broken, f"attacks may take only {', '.join(sorted(OBSERVED))} from leakaudit.client.snapshot:")


def test_a_callbacks_file_knows_one_framework_and_what_adapters_share_none() -> None:
    """Adapters stay thin and installable one by one."""
    for module in (name for name in _modules() if _room(name) == "callbacks"):
        mine = [f for f in _imports() if f.importer == module and f.target.split(".")[0] in FRAMEWORKS]
        known = {found.target.split(".")[0] for found in mine}
        known -= {companion for framework in known for companion in COMPANIONS.get(framework, ())}
        limit = 0 if module.rsplit(".", 1)[-1] in ("recorder", "side_process", "callbacks") else 1
        assert len(known) <= limit, "\n".join([f"{module} may know {limit} framework(s):", *map(str, mine)])


def test_nobody_imports_the_two_linked_folders_under_their_top_level_names() -> None:
    """`import reports` works by accident from the root, and would be a second copy of each module."""
    broken = [found for found in _imports() if found.target.split(".")[0] in ("callbacks", "reports")]
    _report(broken, "import leakaudit.callbacks and leakaudit.reports instead:")


def test_no_adapter_is_called_like_a_framework() -> None:
    """A file called `lightning.py` would shadow the framework it adapts."""
    names = {module.rsplit(".", 1)[-1] for module in _modules() if _room(module) == "callbacks"}
    assert not names & FRAMEWORKS


def test_the_rooms_name_no_module_twice_and_every_room_has_its_rule() -> None:
    """The table itself is sound."""
    members = [member for modules in ROOMS.values() for member in modules]
    assert len(members) == len(set(members))
    assert set(MAY_IMPORT) == set(ROOMS)


SMUGGLED = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from leakaudit.metrics import exact

def attack(seen):
    from leakaudit.client.snapshot import Truth
    import leakaudit.audit.audit
    import_module("leakaudit.defenses.prune")
"""


def test_the_walker_sees_late_dynamic_and_type_checking_imports() -> None:
    """A walker that misses some kind of import would pass everything."""
    file = ROOT / "leakaudit" / "attacks" / "smuggler.py"
    modules = {**_modules(), "leakaudit.attacks.smuggler": file}
    found = tuple(_imports_of(SMUGGLED, "leakaudit.attacks.smuggler", file, modules))
    assert [(f.target, f.name, f.line, f.late) for f in found if _ours(f.target)] == [
        ("leakaudit.metrics.exact", None, 4, False),
        ("leakaudit.client.snapshot", "Truth", 7, True),
        ("leakaudit.audit.audit", None, 8, True),
        ("leakaudit.defenses.prune", None, 9, True),
    ]
    wrong = [str(f) for f in _wrong_rooms(found)]
    assert wrong == [
        "leakaudit/attacks/smuggler.py:4: import leakaudit.metrics.exact",
        "leakaudit/attacks/smuggler.py:8: import leakaudit.audit.audit",
        "leakaudit/attacks/smuggler.py:9: import leakaudit.defenses.prune",
    ]
