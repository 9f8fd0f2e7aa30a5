"""Rooms: every import of every module is checked against a table."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.imports import FACE, ROOT, Import, face, imports, imports_of, modules

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "explanation": frozenset(),
    "exit_codes": frozenset({"explanation"}),
    "parts": frozenset({"errors"}),
    "registry": frozenset({"errors"}),
    "files": frozenset({"errors"}),
    "results": frozenset({"errors", "explanation", "files"}),
    "preflight": frozenset({"errors"}),
    "models": frozenset({"errors", "files"}),
    "client": frozenset({"errors", "registry", "results", "models"}),
    "config": frozenset({"errors", "files", "results"}),
    "plugins": frozenset({"errors", "explanation", "registry", "files", "results", "models", "client", "config"}),
    "gate": frozenset({"errors", "explanation", "exit_codes", "files", "results", "config", "plugins"}),
    "storage": frozenset({"errors", "exit_codes", "files", "results", "models", "client", "config"}),
    "history": frozenset({"errors", "exit_codes", "files", "results", "config", "gate"}),
    "reports": frozenset({"errors", "files", "results", "gate", "history"}),
    "notebook": frozenset({"errors", "files", "results", "plugins", "gate", "history", "reports"}),
    "algorithms": frozenset({"errors", "models", "client", "plugins"}),
    "attacks": frozenset({"errors", "registry", "models", "client", "plugins", "algorithms"}),
    "defenses": frozenset({"errors", "registry", "client", "plugins"}),
    "priors": frozenset({"errors", "registry", "models", "plugins", "algorithms"}),
    "metrics": frozenset({"errors", "registry", "plugins"}),
    "audit": frozenset(
        {"errors", "exit_codes", "registry", "files", "results", "models", "client", "config", "plugins", "gate"}
        | {"storage", "history", "reports", "algorithms", "attacks", "defenses", "priors", "metrics"}
    ),
    "capture": frozenset(
        {"errors", "exit_codes", "registry", "files", "results", "models", "client", "config", "plugins", "gate"}
        | {"storage", "audit", "preflight", "parts", "notebook"}
    ),
    "callbacks": frozenset({"errors", "parts", "models", "config", "capture"}),
    "integrations": frozenset({"errors", "parts", "models", "config", "capture", "callbacks"}),
    "cli": frozenset(
        {
            "errors",
            "explanation",
            "exit_codes",
            "parts",
            "registry",
            "files",
            "results",
            "models",
            "client",
            "config",
            "plugins",
            "gate",
        }
        | {
            "storage",
            "history",
            "reports",
            "algorithms",
            "attacks",
            "defenses",
            "priors",
            "metrics",
            "audit",
            "capture",
            "preflight",
        }
    ),
    "__main__": frozenset({"cli", "storage"}),
}
"""Room -> rooms it may import from: top-level packages and modules of leakaudit, each after those that it may import."""

ONLY: dict[str, dict[str, frozenset[str]]] = {
    "algorithms": {"client": frozenset({"facts", "noise_level", "observation", "optimizer"})},
    "attacks": {"client": frozenset({"facts", "noise_level", "observation", "optimizer"})},
    "gate": {"plugins": frozenset({"described", "names"})},
    "notebook": {"plugins": frozenset({"names"})},
    "capture": {"audit": frozenset({"inline"})},
}
"""Room -> a room that it may import in part -> modules of that. A client's step and its batch are private: no attack can name them."""

WITHOUT_TORCH = frozenset(
    {
        "errors",
        "explanation",
        "exit_codes",
        "parts",
        "registry",
        "files",
        "results",
        "config",
        "gate",
        "history",
        "reports",
        "preflight",
        "notebook",
    }
)
"""Rooms for machines without torch."""

PLUGIN_FOLDERS = {"attacks": "attack", "defenses": "defense", "metrics": "metric", "priors": "prior"}
"""Folder -> the decorator that registers its plugins."""

MODEL_CODE = frozenset({"torch", "transformers", "accelerate", "safetensors", "lightning", "opacus", "tokenizers"})
"""Libraries that the rooms without torch do without: each of them is, or imports, torch."""

FRAMEWORKS = frozenset(
    {"transformers", "lightning", "pytorch_lightning", "accelerate", "peft", "trl", "flwr", "nvflare", "axolotl"}
)
"""Training frameworks: a file of callbacks or integrations knows at most one of them."""

COMPANIONS = {"transformers": frozenset({"accelerate"}), "lightning": frozenset({"pytorch_lightning"})}
"""What comes with a framework and does not count as a second one: transformers' Trainer is built on accelerate, and Lightning has
two names."""

LIGHT = (
    "leakaudit.cli",
    "leakaudit.config.audit",
    "leakaudit.gate.evaluate",
    "leakaudit.notebook.loaded",
    "leakaudit.plugins",
    "leakaudit.plugins.described",
    "leakaudit.plugins.names",
    "leakaudit.registry",
    "leakaudit.reports.page",
    "leakaudit.results.bounds",
    "leakaudit.results.schema",
)
"""Modules whose import loads no torch."""


def _room(module: str) -> str | None:
    """Return the room of one of our modules; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def _ours(module: str) -> bool:
    return module.split(".")[0] == "leakaudit"


def _report(broken: list[Import], rule: str) -> None:
    assert not broken, "\n".join([rule, *map(str, broken)])


def _wrong_rooms(imports: tuple[Import, ...]) -> list[Import]:
    """Return imports into a room, or a part of a room, that the tables do not allow."""
    return [found for found in imports if _ours(found.target) and not _allowed(found)]


def _allowed(found: Import) -> bool:
    here, there = _room(found.importer), _room(found.target)
    if here is None or there is None or here == there:
        return True
    if there not in MAY_IMPORT[here]:
        return False
    if found.target == FACE:
        return False  # as a whole it holds names from rooms that are closed to this one
    part = ONLY.get(here, {}).get(there)
    return part is None or found.target.split(".")[2:3] in [[name] for name in part]


def test_every_module_stands_in_a_room() -> None:
    """A new room must be given a place in the table before it can import anything."""
    homeless = sorted({room for module in modules() if (room := _room(module)) and room not in MAY_IMPORT})
    assert not homeless, f"rooms without a row in MAY_IMPORT of {Path(__file__).name}: {', '.join(homeless)}"


def test_rooms_import_only_the_rooms_they_may() -> None:
    """Data moves one way; imports inside functions and for type checking count, too."""
    _report(_wrong_rooms(imports()), "these imports leave their room (see MAY_IMPORT and ONLY):")


def test_no_circle_of_rooms() -> None:
    """Every room stands in the table after all rooms that it may import."""
    order = list(MAY_IMPORT)
    wrong = [
        (room, other) for room, may in MAY_IMPORT.items() for other in may if order.index(other) >= order.index(room)
    ]
    assert not wrong


def test_rooms_for_machines_without_torch_never_import_it() -> None:
    """Gate and report run without a model library, in every function."""
    broken = [
        found
        for found in imports()
        if _room(found.importer) in WITHOUT_TORCH and found.target.split(".")[0] in MODEL_CODE and not found.typing_only
    ]
    _report(broken, "these rooms run without torch:")


def test_the_command_line_imports_heavy_things_inside_the_command_that_needs_them() -> None:
    """`leakaudit --help` and `gate` must not wait for torch."""
    broken = [
        found
        for found in imports()
        if _room(found.importer) == "cli"
        and not found.late
        and not found.typing_only
        and (
            found.target.split(".")[0] in MODEL_CODE
            or (_ours(found.target) and _room(found.target) not in (*WITHOUT_TORCH, "cli"))
        )
    ]
    _report(broken, "import these inside the command:")


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_neither_torch_nor_transformers(module: str) -> None:
    """No library below imports torch either; a fresh process shows it."""
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_an_adapter_knows_one_framework_and_what_adapters_share_none() -> None:
    """Adapters stay thin and installable one by one."""
    for module in (name for name in modules() if _room(name) in ("callbacks", "integrations")):
        mine = [f for f in imports() if f.importer == module and f.target.split(".")[0] in FRAMEWORKS]
        known = {found.target.split(".")[0] for found in mine}
        known -= {companion for framework in known for companion in COMPANIONS.get(framework, ())}
        limit = 0 if module in ("leakaudit.callbacks", "leakaudit.integrations") else 1
        assert len(known) <= limit, "\n".join([f"{module} may know {limit} framework(s):", *map(str, mine)])


def test_nobody_imports_the_two_linked_folders_under_their_top_level_names() -> None:
    """`import reports` works from the root by accident, as a second copy."""
    broken = [found for found in imports() if found.target.split(".")[0] in ("callbacks", "reports")]
    _report(broken, "import leakaudit.callbacks and leakaudit.reports instead:")


def test_no_adapter_is_called_like_a_framework() -> None:
    """A file called `lightning.py` would shadow the framework it adapts."""
    names = {module.rsplit(".", 1)[-1] for module in modules() if _room(module) == "callbacks"}
    assert not names & FRAMEWORKS


def test_no_private_name_crosses_a_module() -> None:
    """What another module needs has a public name."""
    broken = [found for found in imports() if _ours(found.target) and found.name and _private(found.name)]
    _report(broken, "make these names public, or move what uses them:")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _registers(tree: ast.Module) -> list[str]:
    """Return the registering decorators of a module, such as `attack`."""
    calls = (d for node in tree.body if isinstance(node, ast.ClassDef) for d in node.decorator_list)
    names = [call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
    return [name for name in names if name in PLUGIN_FOLDERS.values()]


@pytest.mark.parametrize(("folder", "kind"), PLUGIN_FOLDERS.items())
def test_a_plugin_folder_holds_plugins_and_nothing_else(folder: str, kind: str) -> None:
    """Each file registers exactly one plugin of the folder's kind."""
    inside = {name: path for name, path in modules().items() if name.startswith(f"leakaudit.{folder}.")}
    found = {name: _registers(ast.parse(path.read_text(encoding="utf-8"))) for name, path in inside.items()}
    wrong = {name: registered for name, registered in found.items() if registered != [kind]}
    assert not wrong, f"these files do not register exactly one {kind}: {wrong}"
    assert inside.keys() == {f"leakaudit.{folder}.{name}" for name in _members(f"leakaudit.{folder}")}


def test_no_plugin_imports_another_one_of_its_kind() -> None:
    """Each can be read, changed and deleted alone."""
    broken = [f for f in imports() if _room(f.importer) in PLUGIN_FOLDERS and _room(f.target) == _room(f.importer)]
    _report(broken, "move what these share out of the plugin folder:")


COMPUTED = "__all__ = [found.name for found in iter_modules(__path__)]"
"""All modules of a folder, so that a new file needs no line elsewhere."""

PACKAGES = [name for name, path in modules().items() if path.name == "__init__.py" and name != "leakaudit"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_what_is_there(package: str) -> None:
    """`__all__` is sorted and complete.

    It names what the package imports, or, if it imports nothing, its modules, which it may compute.
    """
    source = modules()[package].read_text(encoding="utf-8")
    if COMPUTED in source:
        return
    tree = ast.parse(source)
    listed = next(
        (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and _binds(n, "__all__")), None
    )
    assert listed is not None, f"{package} has no __all__"
    assert listed == sorted(listed, key=_as_ruff_sorts)
    assert set(listed) in (_public(tree), _members(package), {"main"} if package == "leakaudit.cli" else set(face()))


def _as_ruff_sorts(name: str) -> tuple[bool, bool, str]:
    """Put constants first, then classes, then the rest (its rule RUF022)."""
    return not name.isupper(), not name[0].isupper(), name


def _binds(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _public(tree: ast.Module) -> set[str]:
    """Return the names that a package's `__init__` imports or defines.

    A name that is imported when it is asked for is imported for the type checker as well.
    """
    found = set()
    for node in [*tree.body, *(below for test in tree.body if isinstance(test, ast.If) for below in test.body)]:
        if isinstance(node, ast.ImportFrom) and _ours(str(node.module)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def _members(package: str) -> set[str]:
    """Return the modules and packages right inside a package."""
    return {name.rsplit(".", 1)[-1] for name in modules() if name.rpartition(".")[0] == package}


SMUGGLED = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from leakaudit.metrics import exact

def attack(seen):
    from leakaudit.client.truth import Truth
    import leakaudit.audit.audit
    import_module("leakaudit.defenses.prune")
    from leakaudit.plugins import Budget, ClientStep
    from leakaudit import plugins
"""


def test_the_walker_sees_late_dynamic_and_type_checking_imports() -> None:
    """A walker that misses some kind of import would pass everything."""
    file = ROOT / "leakaudit" / "attacks" / "smuggler.py"
    known = frozenset({*modules(), "leakaudit.attacks.smuggler"})
    found = tuple(imports_of(SMUGGLED, "leakaudit.attacks.smuggler", file, known))
    assert [(f.target, f.name, f.line, f.late) for f in found if _ours(f.target)] == [
        ("leakaudit.metrics.exact", None, 4, False),
        ("leakaudit.client.truth", "Truth", 7, True),
        ("leakaudit.audit.audit", None, 8, True),
        ("leakaudit.defenses.prune", None, 9, True),
        ("leakaudit.plugins.budget", "Budget", 10, True),
        ("leakaudit.client.step", "ClientStep", 10, True),
        ("leakaudit.plugins", None, 11, True),
    ]
    wrong = [str(f) for f in _wrong_rooms(found)]
    assert wrong == [
        "leakaudit/attacks/smuggler.py:4: import leakaudit.metrics.exact",
        "leakaudit/attacks/smuggler.py:7: from leakaudit.client.truth import Truth",
        "leakaudit/attacks/smuggler.py:8: import leakaudit.audit.audit",
        "leakaudit/attacks/smuggler.py:9: import leakaudit.defenses.prune",
        "leakaudit/attacks/smuggler.py:10: from leakaudit.client.step import ClientStep",
        "leakaudit/attacks/smuggler.py:11: import leakaudit.plugins",
    ]
