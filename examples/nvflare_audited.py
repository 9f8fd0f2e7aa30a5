"""Federated fine-tuning in NVFlare's simulator, where a transmission that leaks is blocked.

    python examples/nvflare_audited.py

Three clients: `site-1` sends its weights as they are, which leaks, so it is blocked. `site-2` adds noise before, and is let through. `site-3`
keeps no rounds, so nothing can be judged, and it is blocked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.job_config.script_runner import ScriptRunner

from leakaudit.integrations.nvflare import LeakAuditFilter

HERE = Path(__file__).parent.absolute()
CLIENTS = {"site-1": "", "site-2": "--noise 20", "site-3": "--no-audit"}
"""Name of a client -> its arguments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("leakaudit-demo/nvflare"), help="folder of audits and workspace"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--external", action="store_true", help="train in processes of their own, as language models do"
    )
    options = parser.parse_args()
    out = options.out.absolute()
    job = FedJob(name="audited", min_clients=1)
    job.set_app_packages(
        ["leakaudit"]
    )  # it is installed where the clients run; else the job takes a part of an editable one along
    job.to_server(FedAvg(num_clients=len(CLIENTS), num_rounds=options.rounds, ignore_result_error=True))
    for site, more in CLIENTS.items():
        arguments = f"--out {out} {more}"
        runner = ScriptRunner(
            script=str(HERE / "nvflare_client.py"),
            script_args=arguments,
            launch_external_process=options.external,
            command=f"{sys.executable} -u",
        )
        job.to(runner, site)
        job.to(LeakAuditFilter(str(out)), site, filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.simulator_run(str(out / "workspace"))


if __name__ == "__main__":
    main()
