#!/bin/sh
# Upload a model to a hub only if the gate passes.
#
#   examples/ci/publish.sh RUN POLICY my-organisation/my-model ./model
set -eu
run=$1 policy=$2
shift 2
leakaudit gate "$run" --policy "$policy"
huggingface-cli upload "$@"
