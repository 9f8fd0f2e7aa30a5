"""A user's NVFlare job, in the simulator: one client, one round."""

from __future__ import annotations

import sys
from pathlib import Path

from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

site = "site-1"
job = FedJob(name="notes", min_clients=1)
job.to_server(FedAvg(num_clients=1, num_rounds=1, ignore_result_error=True))
job.to(
    ScriptRunner(
        script=str(Path("client.py").absolute()), launch_external_process=True, command=f"{sys.executable} -u"
    ),
    site,
)
# paste:
job.simulator_run("workspace")
