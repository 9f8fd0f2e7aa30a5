"""The gate and its neighbours run where neither torch nor numpy is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path

import click
import pytest

from leakaudit.cli import main
from leakaudit.parts import COMMAND, OF_AUDIT
from leakaudit.results.files import to_json
from tests.house.imports import ROOT, imports
from tests.house.test_rooms import WITHOUT_TORCH
from tests.support.factories import audit
from tests.support.light_install import PROJECT, light_packages, light_python, name_of

MOST_MB = 40.0
"""Most megabytes (10^6 bytes) of the installation, of the files that pip wrote and compiled."""

BASE = {name_of(one) for one in PROJECT["dependencies"]}
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

OPTIONAL = {
    ("leakaudit.history.export", "pyarrow"),
    ("leakaudit.notebook.frames", "pandas"),
    ("leakaudit.results.plain_rows", "msgspec"),
}
"""Imports of an extra by a room without torch, which says what to install or does without it."""

NEED_AUDIT = (
    ["attacks"],
    ["defenses"],
    ["doctor"],
    ["frontier", "--model", "m", "--data", "d", "--out", "out"],
    ["merge", "shard", "--out", "out"],
    ["prior", "list"],
    ["replay", "audit", "--step", "1", "--attack", "span"],
    ["run", "spool"],
    ["simulate", "--model", "m", "--data", "d", "--out", "out"],
    ["snapshots", "ls", "."],
    ["worker", "spool"],
)
"""Commands that capture, attack or read snapshots."""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages of an installation without torch."""
    return light_packages(tmp_path_factory.mktemp("light") / "packages")


def two_audits(folder: Path) -> None:
    """Write the results of a leaky and of a clean audit."""
    for name, found in (("leaky", audit(4, 26)), ("clean", audit(0, 60))):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")


def test_rooms_without_torch_import_what_every_installation_has() -> None:
    """In every function: numpy, scipy and a drawing library are 300 MB."""
    known = packages_distributions()
    heavy = [
        found
        for found in imports()
        if found.importer.split(".")[1:2] and found.importer.split(".")[1] in WITHOUT_TORCH
        if not found.typing_only
        and (top := found.target.partition(".")[0]) not in (*sys.stdlib_module_names, "leakaudit")
        if (found.importer, top) not in OPTIONAL and not {name_of(one) for one in known.get(top, [top])} & BASE
    ]
    assert not heavy, "\n".join(map(str, heavy))


def test_the_table_of_parts_is_the_extra() -> None:
    """A message that names a part names one that the command installs."""
    assert {name_of(one) for one in OF_AUDIT.values()} == {name_of(one) for one in EXTRAS["audit"]}
    known = packages_distributions()
    assert all(package in map(name_of, known[module]) for module, package in OF_AUDIT.items())
    assert not BASE & set(OF_AUDIT.values())


@pytest.mark.parametrize("extra", sorted({*EXTRAS} - {"audit", "fast", "pandas", "parquet"}))
def test_an_extra_of_an_audit_brings_the_audit(extra: str) -> None:
    """`pip install "leakaudit[flower]"` is enough."""
    assert "leakaudit[audit]" in EXTRAS[extra]


def test_results_are_judged_and_shown_without_torch(light: Path, tmp_path: Path) -> None:
    """Gate, report with its charts, comparison, index and schema."""
    two_audits(tmp_path)
    code = (
        "import sys\nfrom leakaudit.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    try:\n        main(words.split())\n"
        "    except SystemExit as done:\n        print('exit', words.split()[0], done.code or 0, flush=True)\n"
        "print(sorted(set(sys.modules) & {'torch', 'transformers', 'numpy', 'scipy', 'vl_convert'}))\n"
    )
    commands = [
        "--help",
        "gate leaky",
        "gate clean -q",
        "report leaky",
        "compare clean leaky",
        "index .",
        "schema policy",
        "explain span",
        "explain sentence-rate --run leaky",
        "policy init -o p.yaml",
        "policy check p.yaml --strict",
        "policy show p.yaml --origin",
        "policy diff built-in p.yaml",
        "bundle leaky",
        "bundle verify leaky/leakaudit-evidence.zip",
        "export annex clean",
    ]
    done = light_python(light, "-c", code, *commands, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert ends == [
        ["--help", "0"],
        ["gate", "3"],
        ["gate", "4"],
        ["report", "0"],
        ["compare", "3"],
        ["index", "0"],
        ["schema", "0"],
        ["explain", "0"],
        ["explain", "0"],
        *[["policy", "0"]] * 4,
        ["bundle", "0"],
        ["bundle", "0"],
        ["export", "0"],
    ]
    assert done.stdout.splitlines()[-1] == "[]"
    page = (tmp_path / "leaky" / "report.html").read_text(encoding="utf-8")
    assert page.count('<svg role="img"') >= 2 and (tmp_path / "index.html").exists()


@pytest.mark.parametrize("words", NEED_AUDIT, ids=lambda words: words[0])
def test_a_missing_part_is_one_sentence_with_what_to_type(words: list[str], light: Path, tmp_path: Path) -> None:
    """It ends with exit code 2 and no traceback."""
    done = light_python(light, "-m", "leakaudit", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith(f"which is not installed here: {COMMAND}") and words[0] in line


def test_every_command_works_without_torch_or_says_what_it_needs(light: Path, tmp_path: Path) -> None:
    """A new command belongs to one of the two lists."""
    works = {
        "baseline",
        "bind",
        "bundle",
        "compare",
        "conformance",
        "explain",
        "export",
        "gate",
        "history",
        "index",
        "nightly",
        "policy",
        "preflight",
        "report",
        "schema",
        "show",
    }
    assert isinstance(main, click.Group)
    assert {*main.commands} == works | {words[0] for words in NEED_AUDIT}


@pytest.mark.parametrize(
    "module", ["callbacks.hf_trainer", "callbacks.lightning_trainer", "callbacks.torch_loop", "integrations.flower"]
)
def test_an_import_without_torch_says_what_to_type(module: str, light: Path, tmp_path: Path) -> None:
    """It is an ImportError, for code that has an `except ImportError`."""
    code = f"try:\n    import leakaudit.{module}\nexcept ImportError as error:\n    print(error)"
    done = light_python(light, "-c", code, cwd=tmp_path)
    home = module.partition(".")[0]
    assert done.stdout == f"leakaudit.{home} needs torch, which is not installed here: {COMMAND}\n", done.stderr


def test_a_broken_part_is_not_called_missing(light: Path, tmp_path: Path) -> None:
    """A torch that lacks one of its own libraries shows its own error."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("import a_library_of_torch")
    code = f"import sys; sys.path.insert(0, {str(broken)!r}); from leakaudit.cli import main; main(['attacks'])"
    done = light_python(light, "-c", code, cwd=tmp_path)
    assert done.returncode == 1 and "No module named 'a_library_of_torch'" in done.stderr


@pytest.mark.integrations
def test_the_built_wheel_is_light_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Pip installs it from the registry; `-s` shows megabytes and seconds."""
    source = tmp_path / "source"
    _copy(source)
    _ran(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source))
    [wheel] = (tmp_path / "dist").glob("*.whl")
    _ran(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python, leakaudit = (tmp_path / "venv" / "bin" / name for name in ("python", "leakaudit"))
    begin = time.perf_counter()
    _ran(str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel))
    print(f"\npip install: {time.perf_counter() - begin:.1f} s, wheel {wheel.stat().st_size / 1e6:.1f} MB")
    code = (
        "from importlib.metadata import distributions as d\nprint(sum(p.stat().st_size for one in d() "
        "if one.metadata['Name'] not in ('pip', 'setuptools') for f in one.files or () if (p := f.locate()).is_file()))"
    )
    megabytes = int(_ran(str(python), "-I", "-c", code).stdout) / 1e6
    print(f"installed: {megabytes:.1f} MB")
    assert megabytes < MOST_MB
    two_audits(tmp_path)
    commands = (
        ("--help", 0),
        ("gate leaky", 3),
        ("gate clean", 4),
        ("report leaky", 0),
        ("compare clean leaky", 3),
        ("index .", 0),
        ("schema results", 0),
        ("history --folder .", 5),  # no night is recorded
        ("attacks", 2),
    )
    for words, code_ in commands:
        begin = time.perf_counter()
        done = subprocess.run([leakaudit, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False)
        print(f"leakaudit {words}: {time.perf_counter() - begin:.2f} s, exit {done.returncode}")
        assert done.returncode == code_ and "Traceback" not in done.stderr, done.stderr


def _copy(folder: Path) -> None:
    """Copy what the wheel is built from, with the links as links."""
    import shutil

    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "leakaudit", "callbacks", "reports"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def _ran(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done
