#!/bin/sh
# Upload a model to a hub only if the gate passes, and if the audit is about this model (where the run names its files).
#
#   examples/ci/publish.sh RUN POLICY my-organisation/my-model ./model
set -eu
run=$1 policy=$2
shift 2
leakaudit gate "$run" --policy "$policy" --artifact "$2"
huggingface-cli upload "$@"
