"""The environment of the side process: what it takes from the trainer, and what it leaves out."""

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
"""Environment of a distributed launch: with it the side process would wait for peers that never come."""

INTERPRETER_VARIABLES = frozenset({"PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONBREAKPOINT"})
"""With the first of these the side process would end in a prompt that reads its input, and never go."""

LOUD_VARIABLES = frozenset(
    {"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "HF_DEBUG", "PYTHONVERBOSE"}
)
"""They let libraries write what they compute into logs and folders."""

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
"""Ends of the names of variables that hold credentials. The side process needs none: it reads a folder and writes into it."""

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
"""Threads that have nothing to do sleep, because the trainer can use the core that they would wait on. Nothing is looked up in a hub, nobody's experiment tracking gets a second run, and no library writes a model's configuration or
what it computes into the log."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def clean_environment(threads: int) -> dict[str, str]:
    """Return the environment of the side process: few threads, no credentials, nothing of a distributed launch, no hub.

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
    """Return where the trainer finds modules beside the interpreter's own: this package first, then its path in its order."""
    interpreters = tuple({str(Path(prefix) / "lib") for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    package = str(Path(leakaudit.__file__).absolute().parent.parent)
    own = [str(Path(entry).absolute()) for entry in sys.path if not entry.startswith(interpreters)]
    return os.pathsep.join(dict.fromkeys([package, *own]))
