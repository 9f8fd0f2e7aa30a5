"""The mark on the folder of a run that is not audited.

Without the mark, the gate would judge that run by the results of an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leakaudit.config.audit import RUN_NAME, AuditConfig
from leakaudit.files.private_files import write_atomic
from leakaudit.files.strict_json import read_bounded
from leakaudit.results.not_audited import NOT_AUDITED, NotAudited
from leakaudit.storage.run_folders import RunFolder, archive_previous

OUT_DIR_LINE = re.compile(r"""^out_dir:\s*(?P<quote>["']?)(?P<folder>.+?)(?P=quote)\s*(?:\s#.*)?$""", re.MULTILINE)


def mark(wanted: Path, because: str) -> RunFolder:
    """Write into a folder that the latest run was not audited.

    Results of an earlier audit are moved to another folder first.

    Args:
        wanted: folder of the audit.
        because: why, without any private text.

    Returns:
        The folder that was marked, with a note on the earlier audit. It is another folder if an audit in `wanted` still runs.

    Raises:
        SpoolError: `wanted` is a link, or others own it or can write to it.
        OSError: it cannot be written.
    """
    place = archive_previous(wanted.absolute())
    place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    note = NotAudited(because=because, when=datetime.now(UTC).isoformat(timespec="seconds"))
    write_atomic(place.folder / NOT_AUDITED, note.model_dump_json(by_alias=True, indent=1))
    return place


def folder_of(source: Any) -> Path | None:
    """Return the folder that a configuration names.

    The rest of the configuration may be wrong.

    Args:
        source: as an adapter is given it: a file, an object, a mapping, or None for the defaults.

    Returns:
        The folder; None where the file cannot be read, or where the name of the run is to be in it.
    """
    folder = _folder_of(source)
    return None if folder is None or RUN_NAME in str(folder) else folder


def _folder_of(source: Any) -> Path | None:
    default = AuditConfig.model_fields["out_dir"].default
    if isinstance(source, AuditConfig):
        return source.out_dir
    if isinstance(source, Mapping):
        return Path(str(source.get("out_dir", default)))
    if source is None:
        return Path(default)
    try:
        found = OUT_DIR_LINE.search(read_bounded(Path(source)).decode("utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return Path(found["folder"]) if found else Path(default)
