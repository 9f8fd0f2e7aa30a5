"""`LeakAuditFilter`, which blocks what leaks of what an NVFlare client sends.

    job.to(LeakAuditFilter("leakaudit-audit"), "site-1", filter_type=FilterType.TASK_RESULT, tasks=["train"])

The training script of the client keeps its rounds with `LeakAuditCallback(round_config("leakaudit-audit"))`, in the client's process or in an
external one, whose rounds the filter finds on the disk. As the last filter of a task result, this one sees what is sent after all others. It makes a new result from copies of what may leave:
weights of the round, or their differences, which the attacks on the round have judged; tensors of the model that are as they were before the
round; and a few single numbers. Everything else blocks the transmission, and so does whatever cannot be judged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

from nvflare.apis.dxo import DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from leakaudit.capture.notify import notify
from leakaudit.capture.rounds.elsewhere import Moment
from leakaudit.capture.rounds.registry import audit_in, leave_rounds, open_round_elsewhere
from leakaudit.capture.rounds.sent import OpenRound
from leakaudit.capture.rounds.transmission import TIMEOUT_SECONDS, judge_round
from leakaudit.errors import LeakAuditError, SnapshotError, type_and_place
from leakaudit.integrations.contents import DTYPES, Numbers, copied_array, like, made_of_words, plain_dict

SHOWN = 3
"""Most names of tensors in a message. Our choice: enough to recognise what they are."""

HEADERS, CONTENT = ReservedHeaderKey.HEADERS, "DXO"
"""The two keys of a result that holds a DXO (`nvflare.apis.dxo`)."""

OF_CONTEXT = {
    "job_id": "get_job_id",
    "site_name": "get_identity_name",
}
"""Strings that may leave if NVFlare's context has the same: key -> method of the context."""

VALIDATE_TYPES = frozenset({"model_validate", "before_train_validate"})
"""Values of `nvflare.app_common.app_constant.ValidateType`."""


def site_folder(out_dir: Path | str, site: str) -> Path:
    """Return the folder of one client's audit, for `out_dir` of its configuration.

    Args:
        out_dir: folder of the audits of all clients on this machine. A simulator gives each client another working directory, so give a
            whole path there.
        site: name of the client, as `nvflare.client.get_site_name()` returns it.
    """
    return Path(out_dir).absolute() / site


def round_config(out_dir: Path | str, **more: Any) -> dict[str, Any]:
    """Return the configuration of the audit in a client's training script.

    It fits an in-process and an external executor. Where nobody called `flare.init()` yet, it does, as NVFlare's patch of a Trainer would later.

    Args:
        out_dir: as in `site_folder` and in the `LeakAuditFilter` of the job.
        more: further keys of the configuration, such as `shipped_defense`.
    """
    from nvflare.client.api import get_site_name, init

    try:
        site = get_site_name()
    except RuntimeError:  # there is no context yet
        init()
        site = get_site_name()
    return {
        "unit": "round",
        "every_n_steps": 1,
        "sent_elsewhere": True,
        "out_dir": str(site_folder(out_dir, site)),
        **more,
    }


class LeakAuditFilter(Filter):  # type: ignore[misc]  # nvflare ships no types
    """A filter for the results of a client's tasks.

    NVFlare writes the arguments into the configuration of a job, so they are plain values.
    """

    def __init__(
        self,
        out_dir: str = "leakaudit-audit",
        policy: str | None = None,
        timeout_s: float = TIMEOUT_SECONDS,
        numbers: list[str] | None = None,
    ) -> None:
        """Note the arguments; nothing is read.

        Args:
            out_dir: as in `site_folder`.
            policy: YAML file of the rules for one round; None for `leakaudit.gate.policy.round_policy`.
            timeout_s: most seconds that a transmission waits for its judgement; then it is blocked.
            numbers: names of single numbers (metrics) that may leave besides those of common metrics and of NVFlare.
        """
        super().__init__()
        self.out_dir = str(out_dir)
        self.policy = policy
        self.timeout_s = timeout_s
        self.numbers = numbers
        self._since: dict[Path, Moment] = {}

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Any:
        """Return a new result that holds what may leave.

        Results without weights (metrics, errors) are not judged: they hold a few numbers.

        Raises:
            ContentBlockedException: the result leaks, or holds something that cannot be judged; the message says which, without private
                text.
        """
        try:
            return self._leaving(shareable, fl_ctx)
        except ContentBlockedException:
            raise
        except Exception as error:
            self._block(f"it cannot be judged: {error if isinstance(error, LeakAuditError) else type_and_place(error)}")

    def _leaving(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the copy that leaves.

        Raises:
            SnapshotError: a part may not leave.
        """
        if type(shareable) is not Shareable:
            raise SnapshotError(f"it is a {type(shareable).__name__}, expected a Shareable")
        copy, numbers = Shareable(), Numbers(frozenset(self.numbers or ()))
        for key, value in plain_dict(dict.get(shareable, HEADERS, {}), "the headers").items():
            copy.set_header(*_header(key, value, numbers, fl_ctx))
        failed = copy.get_return_code() != ReturnCode.OK
        if set(dict.keys(shareable)) - {HEADERS} != (set() if failed else {CONTENT}):
            raise SnapshotError(
                "it has an error code, and content beside it"
                if failed
                else "it is no DXO, or holds something beside its DXO, so nobody knows what it sends"
            )
        if not failed:
            copy[CONTENT] = self._content(plain_dict(dict.get(shareable, CONTENT), "the DXO"), numbers, fl_ctx)
        return copy

    def _content(self, dxo: Any, numbers: Numbers, fl_ctx: FLContext) -> dict[str, Any]:
        """Return the DXO that leaves, after its weights were judged."""
        if set(dxo) - {"kind", "data", "meta"}:
            raise SnapshotError("its DXO has parts that no DXO has")
        kind, data = dxo.get("kind"), plain_dict(dxo.get("data"), "the data of the DXO")
        if type(kind) not in (str, type(DataKind.WEIGHTS)) or kind not in (
            DataKind.WEIGHTS,
            DataKind.WEIGHT_DIFF,
            DataKind.METRICS,
        ):
            raise SnapshotError(
                f"it holds {_kind_in_words(kind)}; only weights, differences of weights and metrics are judged"
            )
        meta = _meta(plain_dict(dxo.get("meta") or {}, "the meta of the DXO"), data, numbers, fl_ctx)
        if kind == DataKind.METRICS:
            return {
                "kind": kind,
                "data": dict(numbers.copied(*entry, "the metrics") for entry in data.items()),
                "meta": meta,
            }
        return {"kind": kind, "data": self._judged(data, kind == DataKind.WEIGHT_DIFF, fl_ctx), "meta": meta}

    def _judged(self, data: Any, differences: bool, fl_ctx: FLContext) -> dict[str, Any]:
        """Return copies of the sent arrays after the attacks on them."""
        folder = site_folder(self.out_dir, fl_ctx.get_identity_name())
        made = self._round(folder)
        if made is not None:
            if not all(type(name) is str for name in data):
                raise SnapshotError("some of its arrays have names that are no strings")
            copies = {name: copied_array(value, "the data of the DXO") for name, value in data.items()}
            prefix = made.prefix_of(copies)
            if not all(map(made_of_words, prefix.split(".")[:-1])):
                raise SnapshotError("the names of its arrays begin with words that nobody allowed")
            own = {name.removeprefix(prefix): value for name, value in copies.items()}
            _check_covered(made.not_covered(own, differences=differences), len(own))
            made.sent(own, differences=differences)
        judged = judge_round(folder, policy=Path(self.policy) if self.policy else None, timeout_s=self.timeout_s)
        if not judged.passes or made is None:
            self._block(f"{judged.status}: {judged.reason}")
        notify(f"round {judged.round} may be sent: {judged.reason}")
        return {name: like(copies[name], data[name]) for name in sorted(copies)}  # their order must not tell anything

    def _round(self, folder: Path) -> OpenRound | None:
        """Return the round that is sent, of this process or of an external one.

        Raises:
            LeakAuditError: an external process keeps rounds, and none of them may be sent.
        """
        audit = audit_in(folder)
        if audit is not None and not audit.trains_elsewhere:
            return audit.last
        if not (folder / "spool").is_dir():
            return None
        if (since := self._since.get(folder)) is None:
            raise SnapshotError("the filter did not see the task come, so it cannot tell which round is sent")
        return open_round_elsewhere(folder, since, self.timeout_s)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Note how far the audit is when a task comes, and leave it when the job ends."""
        if event_type not in (EventType.BEFORE_TASK_DATA_FILTER, EventType.END_RUN):
            return
        folder = site_folder(self.out_dir, fl_ctx.get_identity_name())
        if event_type == EventType.BEFORE_TASK_DATA_FILTER:
            self._since[folder] = Moment.now(folder)
        elif (audit := audit_in(folder)) is not None and audit.trains_elsewhere:
            leave_rounds(folder)

    def _block(self, why: str) -> NoReturn:
        """Stop the transmission, and tell the client's user."""
        notify(f"the transmission is blocked: {why}")
        raise ContentBlockedException(f"leakaudit blocked the transmission: {why}")


def _check_covered(left: list[str], sent: int) -> None:
    """Refuse tensors that the audit of the round leaves out."""
    if left:
        names = ", ".join(map(_shown, left[:SHOWN]))
        raise SnapshotError(
            f"{len(left)} of its {sent} tensors are not of the audited round, or changed although nothing trained them, such as {names}"
        )


def _header(key: object, value: object, numbers: Numbers, fl_ctx: FLContext) -> tuple[str, Any]:
    """Return a header that may leave."""
    if key == ReservedHeaderKey.RC and type(value) is str and value in vars(ReturnCode).values():
        return ReservedHeaderKey.RC, value
    if key == ReservedHeaderKey.CONTENT_TYPE and type(value) is str and value == CONTENT:
        return ReservedHeaderKey.CONTENT_TYPE, value
    return _known_string(key, value, fl_ctx) or numbers.copied(key, value, "the headers")


def _known_string(key: object, value: object, fl_ctx: FLContext) -> tuple[str, str] | None:
    """Return a string that the server knows anyway; None for others."""
    if type(key) is not str or type(value) is not str:
        return None
    if key == "validate_type" and value in VALIDATE_TYPES:
        return key, value
    ask = getattr(fl_ctx, OF_CONTEXT.get(key, ""), None) if key in OF_CONTEXT else None
    return (key, value) if ask is not None and ask() == value else None


def _meta(meta: Any, data: Any, numbers: Numbers, fl_ctx: FLContext) -> dict[str, Any]:
    """Return the meta data of a DXO that may leave."""
    copy: dict[str, Any] = {}
    for key, value in meta.items():
        if key == "initial_metrics":
            entries = plain_dict(value, "the metrics in the meta of the DXO").items()
            copy[key] = dict(numbers.copied(*entry, "the metrics in the meta of the DXO") for entry in entries)
        elif key == "filter_history" and type(value) is list:
            copy[key] = [name for name in value if type(name) is str and name in _filters()]
        elif key == "PROCESSED_ALGORITHM" and type(value) is str and value in DTYPES:
            copy[key] = value
        elif key == "source_datatype":
            types = plain_dict(value, "the types in the meta of the DXO")
            if not all(
                type(name) is str and name in data and type(t) is str and t in DTYPES for name, t in types.items()
            ):
                raise SnapshotError("the meta of the DXO names types of arrays that it does not hold, or no types")
            copy[key] = {name: types[name] for name in sorted(types)}
        elif (
            key == "quant_state"
            and type(value) is dict
            and not any(value.values())
            and all(name in data for name in value)
        ):
            copy[key] = {name: {} for name in sorted(value)}
        else:
            name, known = _known_string(key, value, fl_ctx) or numbers.copied(key, value, "the meta of the DXO")
            copy[name] = known
    return copy


def _filters() -> set[str]:
    """Return the names of the filters that this process knows."""
    found, todo = set(), [Filter]
    while todo:
        found.add((one := todo.pop()).__name__)
        todo += one.__subclasses__()
    return found


def _kind_in_words(kind: object) -> str:
    """Return the kind of a DXO if NVFlare knows it; it may be a text."""
    known = type(kind) in (str, type(DataKind.WEIGHTS)) and kind in [str(one.value) for one in DataKind]
    return repr(str(getattr(kind, "value", kind))) if known else "something of an unknown kind"


def _shown(name: str) -> str:
    """Return a name of a tensor if it looks like one; it may be a text."""
    return repr(name) if re.fullmatch(r"[\w.]{1,80}", name) else "one with a name that no tensor has"
