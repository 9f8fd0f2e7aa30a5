#!/bin/sh
# Sends a night to a chat or a pager. In nightly.yaml:
#   notify_command: [sh, webhook.sh]
#   notify_on: change
# The night comes as one JSON document on the standard input. It has numbers and a verdict, and no private text.
# LEAKAUDIT_WEBHOOK is the address that the service gave you.
set -eu
: "${LEAKAUDIT_WEBHOOK:?set it to the address of your webhook}"
python3 -c '
import json, sys
night = json.load(sys.stdin)
text = night["sentence"] or night["reason"]
worse = " Worse than the baseline." if night["worse"] else ""
print(json.dumps({"text": f"leakaudit {night['"'"'night'"'"']}: {night['"'"'verdict'"'"'] or '"'"'ERROR'"'"'}. {text}{worse}"}))
' | curl --fail --silent --show-error --max-time 30 --header "Content-Type: application/json" --data-binary @- "$LEAKAUDIT_WEBHOOK"
