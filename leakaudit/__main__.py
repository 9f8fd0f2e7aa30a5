"""`python -m leakaudit`, and the file that a trainer starts as its side process."""

import importlib.util
import sys
from pathlib import Path

if not __package__:
    # Started as a file: this package is the one that trains, wherever it lies and whatever else has its name. Its folder does not become a
    # place where other modules are found.
    folder = Path(__file__).absolute().parent
    spec = importlib.util.spec_from_file_location("leakaudit", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    package = sys.modules["leakaudit"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)

from leakaudit.storage.parent_watch import find_trainers_modules, watch_parent

if __name__ == "__main__":
    watch_parent()  # a side process ends with its trainer even while it still loads the rest
    find_trainers_modules()
    from leakaudit.cli import main

    main()
