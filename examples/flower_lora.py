"""Audit two clients of federated LoRA in Flower's simulation, over three rounds.

    python examples/flower_lora.py                  # what the training made, and what LocalDpMod lets through
    python examples/flower_lora.py --undefended     # the same without LocalDpMod

The audits of the two clients land in `leakaudit-demo/flower/client-0` and `client-1`. Each report has two columns: what the training made, and
what left the client. The column `as-sent` shows what LocalDpMod buys.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from leakaudit.integrations.flower import LeakAuditMod
from leakaudit.reports.terminal import print_summary

sys.path.insert(0, str(Path(__file__).parent))
import lora_client

CLIENTS = 2
NORM, SENSITIVITY, EPSILON, DELTA = 1.0, 1.0, 100.0, 1e-5
"""Options of `LocalDpMod`. With this epsilon the noise is fifty times as large as a step of AdamW moves a weight."""
SIGMA = SENSITIVITY * math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON
"""Standard deviation of its noise on each weight, by Flower's formula."""


def client_app(audited: LeakAuditMod, defended: bool, rounds: int) -> ClientApp:
    """Return the app of a client: audited training, then the mods from last to first."""
    app = ClientApp()
    privacy = [LocalDpMod(NORM, SENSITIVITY, EPSILON, DELTA)] if defended else []
    declared = {"shipped_defense": f"clip-noise(bound={NORM}, sigma={SIGMA})"} if defended else {}

    @app.train(mods=[audited, *privacy])  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        weights = message.content["arrays"].to_torch_state_dict()
        client, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        audit = {"out_dir": str(audited.folder(context)), "rounds": rounds, **lora_client.QUICK, **declared}
        sent = lora_client.train(weights, client, number, audit)
        content = RecordDict({"arrays": ArrayRecord(sent), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return app


def server_app(rounds: int) -> ServerApp:
    """Return the app of the server: federated averaging over all clients."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(lora_client.first_weights()), num_rounds=rounds)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("leakaudit-demo/flower"), help="folder of the audits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--undefended", action="store_true", help="without LocalDpMod")
    options = parser.parse_args()
    audited = LeakAuditMod(options.out.absolute())
    run_simulation(
        server_app(options.rounds),
        client_app(audited, not options.undefended, options.rounds),
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": CLIENTS}},
    )
    for client in range(CLIENTS):  # Ray ends the side processes with its own; the attacks that are left run here
        folder = options.out / f"client-{client}"
        subprocess.run([sys.executable, "-m", "leakaudit", "worker", str(folder)], check=True)
        print_summary(folder)


if __name__ == "__main__":
    main()
