"""The environment variables of the side process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from leakaudit.storage.parent_watch import MODULES_VARIABLE

WANTED_VARIABLES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "GLIBC_TUNABLES",
        "VIRTUAL_ENV", "CONDA_PREFIX", "HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_NUM_THREADS", "ATEN_CPU_CAPABILITY", "CI",
    }
)  # fmt: skip
"""Variables that the side process gets: where programs, libraries and caches lie, how texts and times are written, and `CI`, where no report
with full text is written."""

WANTED_PREFIXES = (
    "LC_", "PYTHON", "LEAKAUDIT_",
    "CUDA_", "NVIDIA_", "CUBLAS_", "CUDNN_", "HIP_", "HSA_", "ROCR_", "ROCM_", "MIOPEN_", "PYTORCH_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "RAYON_",
    "MALLOC_",
)  # fmt: skip
"""Beginnings of the names of variables that the side process gets: settings of Python and of libraries that compute."""

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL", "AUTH", "IDENTITY")
"""Words in the names of credentials. `NVIDIA_API_KEY` begins as a setting does, and is none."""

INTERPRETER_VARIABLES = frozenset(
    {"PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONBREAKPOINT", "PYTHONVERBOSE"}
)
"""Variables of the interpreter that the side process does not get. With `PYTHONINSPECT` it would end in a prompt, and never exit;
`PYTHONVERBOSE` fills its log."""

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


def clean_environment(threads: int, passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of the side process.

    It has the variables that computing needs and those that the user names. It has no credentials, nothing of a distributed launch (the
    side process would wait for other processes that do not exist) and no access to a model hub.

    Args:
        threads: of the side process.
        passed: names of further variables (`pass_environment`).
    """
    environment = {key: value for key, value in os.environ.items() if key in passed or _is_wanted(key)}
    modules = json.dumps([str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)])
    return environment | QUIET | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {MODULES_VARIABLE: modules}


def _is_wanted(name: str) -> bool:
    if name in WANTED_VARIABLES:
        return True
    secret = any(word in name.upper() for word in SECRET_WORDS)
    return name.startswith(WANTED_PREFIXES) and name not in INTERPRETER_VARIABLES and not secret
