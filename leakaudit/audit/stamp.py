"""The verification of a snapshot: in place, or with the rebuilt model."""

from __future__ import annotations

from leakaudit.audit.verification import verify
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.results.schema import Verification, VerificationStatus


def stamp_of(snapshot: Snapshot, client: ClientStep) -> Verification:
    """Return the verification of a snapshot.

    A whole snapshot gets the stamp of its check in place. If it has no such check, the step is computed again on the rebuilt model.

    A snapshot of only the first blocks is `unverifiable`, unless its check in place found a mismatch: that no attack recovers a text is
    no evidence there. Attacks that read everything did not run, and `span` cannot read what only later layers show, such as the last word
    of a decoder's text.

    Args:
        snapshot: the recorded step.
        client: the step on the rebuilt model.
    """
    checked = snapshot.checked
    if snapshot.parts is None:
        return verify(client, snapshot.observation.update) if checked is None else _of_one_model(snapshot, client)
    if checked is not None and not checked.status.attacked:
        return checked
    note = "only what attacks on the first blocks read, and a sketch of the rest, was kept (`keep: auto`): `keep: all` keeps everything"
    if checked is not None and checked.status.bounds:
        note += "; the whole update was checked in place and comes from this batch"
    return Verification(status=VerificationStatus.UNVERIFIABLE, note=note)


def _of_one_model(snapshot: Snapshot, client: ClientStep) -> Verification:
    """Return the check in place; `unverifiable` if the two models differ.

    The check in place used the live model, but attacks get a rebuilt model. The two may differ if a user's function makes the model
    (`rebuilt_by`), or if hooks and functions around parts of the live model compute something. Only this function compares the two models.
    """
    checked, maker = snapshot.checked, snapshot.model_recipe.made_by
    assert checked is not None
    patched = snapshot.recipe.patched
    if not checked.status.bounds or not (maker or patched):
        return checked
    again = verify(client, snapshot.observation.update)
    if again.status is not VerificationStatus.MISMATCH:
        return checked
    other = f"the model that {maker!r} makes" if maker else "the model without the hooks and functions on its parts"
    first = "" if maker else f" (first {patched[0]!r})"
    note = (
        f"the update comes from this batch, as was checked in place, but {other}{first} gives another one, so attacks were given another "
        "model than the client's, or one that chance or its own state leads elsewhere"
    )
    return checked.model_copy(update={"status": VerificationStatus.UNVERIFIABLE, "note": note})
