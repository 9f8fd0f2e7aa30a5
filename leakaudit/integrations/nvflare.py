"""`LeakAuditFilter`, which judges what a client of NVFlare sends, and blocks what leaks.

    job.to(LeakAuditFilter("leakaudit-audit"), "site-1", filter_type=FilterType.TASK_RESULT, tasks=["train"])

The training script of the client keeps its rounds with a `LeakAuditCallback` whose `out_dir` is `site_folder("leakaudit-audit", site)`. As
the last filter of a task result, this one sees what is sent after all others. A round leaves only if the attacks on it are finished
and the policy passes; whatever cannot be judged is blocked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from leakaudit.capture.notify import notify
from leakaudit.capture.rounds.registry import open_round
from leakaudit.capture.rounds.transmission import TIMEOUT_SECONDS, judge_round
from leakaudit.errors import LeakAuditError, SnapshotError, type_and_place

SHOWN = 3
"""Most names of tensors in a message. Our choice: enough to recognise what they are."""


def site_folder(out_dir: Path | str, site: str) -> Path:
    """Return the folder of one client's audit, for `out_dir` of its configuration.

    Args:
        out_dir: folder of the audits of all clients on this machine. A simulator gives each client another working directory, so give a
            whole path there.
        site: name of the client, as `nvflare.client.get_site_name()` returns it.
    """
    return Path(out_dir).absolute() / site


class LeakAuditFilter(DXOFilter):  # type: ignore[misc]  # nvflare ships no types
    """A filter for the result of a client's training task.

    NVFlare writes the arguments into the configuration of a job, so they are plain values.
    """

    def __init__(
        self, out_dir: str = "leakaudit-audit", policy: str | None = None, timeout_s: float = TIMEOUT_SECONDS
    ) -> None:
        """Note the arguments; nothing is read.

        Args:
            out_dir: as in `site_folder`.
            policy: YAML file of the rules for one round; None for `leakaudit.gate.policy.round_policy`.
            timeout_s: most seconds that a transmission waits for its judgement; then it is blocked.
        """
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        self.out_dir = str(out_dir)
        self.policy = policy
        self.timeout_s = timeout_s

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Any:
        """Judge a result; the base class would let pass what holds no DXO.

        A reply with an error code holds no update, and passes.
        """
        if shareable.get_return_code() == ReturnCode.OK:
            try:
                from_shareable(shareable)
            except Exception:
                self._block("it is no DXO, so nobody knows what it sends")
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Let a round pass unchanged, or block it.

        Raises:
            ContentBlockedException: the round leaks, or cannot be judged; the message says which, without private text.
        """
        folder = site_folder(self.out_dir, fl_ctx.get_identity_name())
        try:
            _tell(dxo, folder)
        except Exception as error:
            self._block(f"it cannot be judged: {error if isinstance(error, LeakAuditError) else type_and_place(error)}")
        judged = judge_round(folder, policy=self.policy and Path(self.policy), timeout_s=self.timeout_s)
        if not judged.passes:
            self._block(f"{judged.status}: {judged.reason}")
        notify(f"round {judged.round} may be sent: {judged.reason}")

    def _block(self, why: str) -> None:
        """Stop the transmission, and tell the client's user."""
        notify(f"the transmission is blocked: {why}")
        raise ContentBlockedException(f"leakaudit blocked the transmission: {why}")


def _tell(dxo: DXO, folder: Path) -> None:
    """Tell the audit in a folder what a DXO sends.

    Raises:
        SnapshotError: it holds something else than the weights of the round, or their differences.
    """
    made = open_round(folder)
    if made is None:
        return  # the judgement says why there is none
    if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
        raise SnapshotError(f"it holds {dxo.data_kind!r}; only weights and differences of weights are judged")
    weights: dict[str, Tensor] = {name: torch.as_tensor(value) for name, value in dxo.data.items()}
    differences = dxo.data_kind == DataKind.WEIGHT_DIFF
    if left := made.not_covered(weights, differences=differences):
        names = ", ".join(map(repr, left[:SHOWN]))
        raise SnapshotError(f"{len(left)} of its {len(weights)} tensors are not of the audited round, such as {names}")
    made.sent(weights, differences=differences)
