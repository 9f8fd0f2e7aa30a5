"""The environment variables of the side process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import leakaudit

LEAKED_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
)
LEAKED_PREFIXES = (
    "TORCHELASTIC_",
    "ACCELERATE_",
    "FSDP_",
    "PL_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MV2_",
    "DEEPSPEED_",
)
"""Variables of a distributed launch, by name and by prefix. With them the side process would wait for other processes that do not exist."""

INTERPRETER_VARIABLES = frozenset({"PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONBREAKPOINT"})
"""Variables of the interpreter. With `PYTHONINSPECT` the side process would end in a prompt, and never exit."""

LOUD_VARIABLES = frozenset(
    {"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "HF_DEBUG", "PYTHONVERBOSE"}
)
"""Variables that let libraries write what they compute into logs and folders."""

SECRET_ENDINGS = (
    "_TOKEN",
    "_KEY",
    "_KEY_ID",
    "_SECRET",
    "_PASSWORD",
    "_PASSWD",
    "_CREDENTIALS",
    "_TOKENS",
    "_IDENTITY",
)
"""Ends of the names of variables that hold credentials. The side process needs no credentials: it reads a folder and writes into it."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "DISABLE_TELEMETRY": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Settings of libraries. Nothing is looked up in a model hub, no experiment tracker gets a second run, and no library writes a model's
configuration or results of computations into the log. Idle threads sleep, so that the trainer can use the core on which they would wait."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def clean_environment(threads: int) -> dict[str, str]:
    """Return the environment of the side process.

    It sets the number of threads, and contains no credentials, nothing of a distributed launch and no access to a model hub.

    Modules are found where the trainer finds them, because a model may be built by the user's own code.
    """
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in LEAKED_VARIABLES | INTERPRETER_VARIABLES | LOUD_VARIABLES
        and not key.startswith(LEAKED_PREFIXES)
        and not key.upper().endswith(SECRET_ENDINGS)
    }
    return environment | QUIET | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONPATH": _python_path()}


def _python_path() -> str:
    """Return where the side process looks for modules.

    This package comes first, then the trainer's path in its order, without the interpreter's own entries.
    """
    interpreters = tuple({str(Path(prefix) / "lib") for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    package = str(Path(leakaudit.__file__).absolute().parent.parent)
    own = [str(Path(entry).absolute()) for entry in sys.path if not entry.startswith(interpreters)]
    return os.pathsep.join(dict.fromkeys([package, *own]))
