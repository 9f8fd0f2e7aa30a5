"""The server of the app: federated averaging over one client."""

from __future__ import annotations

import small
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the rounds of the configuration."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    weights, rounds = ArrayRecord(small.classifier().state_dict()), int(context.run_config["num-server-rounds"])
    strategy.start(grid=grid, initial_arrays=weights, num_rounds=rounds)
