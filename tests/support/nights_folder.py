"""A folder of nights on the disk for tests, with the audits that some nights left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from leakaudit.gate.policy import NightsPolicy, load_policy
from leakaudit.history.keys import keys_of
from leakaudit.history.nights import HISTORY, NIGHTS, History
from leakaudit.history.rates import rates_of
from leakaudit.history.record import NightRecord
from leakaudit.history.trend import with_sequences
from leakaudit.results.files import to_json
from leakaudit.results.schema import Results
from tests.support.nights import night

SENTENCES = (
    "schema: leakaudit.policy/1\nname: sentences\nrules:\n"
    "  - id: sentence-rate\n    event: exact_sentence\n    max_rate: 0.05\n"
)
"""A policy with one rule, in YAML."""


def joined(records: Sequence[NightRecord]) -> list[NightRecord]:
    """Return records with the confidence sequences that nights record."""
    found: list[NightRecord] = []
    for record in records:
        rates = with_sequences(record.rates, record.keys, found, NightsPolicy())
        found.append(record.model_copy(update={"rates": rates}))
    return found


def write_audit(folder: Path, found: Results) -> Path:
    """Write results.json into a new folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(to_json(found)), encoding="utf-8")
    return folder


def nights_folder(place: Path, audits: Mapping[int, Results], data: str = "notes") -> Path:
    """Write nightly.yaml, its policy and a night for each audit.

    The configuration is returned.

    Args:
        place: folder of all files.
        audits: number of the night -> its results.
        data: name of the data set.
    """
    place.mkdir(exist_ok=True)
    (place / "policy.yaml").write_text(SENTENCES)
    config = place / "nightly.yaml"
    config.write_text(
        "schema: leakaudit.nightly/1\nsimulate:\n  model: model\n  data: data.jsonl\nfolder: all-nights\n"
        "policy: policy.yaml\nbaseline: base.json\n"
    )
    policy = load_policy(place / "policy.yaml")
    history = History(place / "all-nights" / HISTORY)
    for number, found in audits.items():
        empty = night(number)
        file = write_audit(place / "all-nights" / NIGHTS / empty.night, found) / "results.json"
        keys = keys_of(found, policy, data)
        history = history.append(
            empty.model_copy(
                update={
                    "run": found.run.id,
                    "keys": keys,
                    "rates": with_sequences(rates_of(found, policy), keys, history.records, policy.nights),
                    "results_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
                }
            )
        )
    return config
