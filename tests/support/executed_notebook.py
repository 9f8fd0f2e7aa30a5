"""Execute the notebook of the examples and write its outputs into it.

    python -m tests.support.executed_notebook

Needs nbclient, ipykernel and pandas. The working folder is written as `.` in the outputs, so that they name no path of a machine.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def executed(folder: Path) -> dict[str, Any]:
    """Return the notebook as a kernel that starts in `folder` executes it.

    Args:
        folder: an empty folder; the audit lands there.
    """
    nbformat, client = importlib.import_module("nbformat"), importlib.import_module("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    paths = [str(ROOT / "examples"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}
    runner = client.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, record_timing=False
    )
    runner.execute(env=environment)
    text = nbformat.writes(notebook)
    for place in {str(folder), str(folder.resolve())}:
        text = text.replace(place, ".")
    found: dict[str, Any] = json.loads(text)
    for cell in found["cells"]:  # progress bars and warnings of libraries, which name paths
        if "outputs" in cell:
            cell["outputs"] = [one for one in cell["outputs"] if one.get("name") != "stderr"]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as _folder:
        NOTEBOOK.write_text(json.dumps(executed(Path(_folder)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
