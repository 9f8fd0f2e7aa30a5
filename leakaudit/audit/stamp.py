"""The verification of a snapshot on the model that attacks get."""

from __future__ import annotations

from leakaudit.audit.other_terms import other_term
from leakaudit.audit.verification import verify
from leakaudit.client.first_blocks_step import FirstBlocksStep
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.models.code_differences import code_differences, in_words
from leakaudit.models.first_blocks import BOUNDARY
from leakaudit.results.schema import Verification, VerificationStatus

PARTS_VERIFIED = "what attacks on the first blocks read was verified; the rest of the update was not kept"
"""Note of a step of which only the first blocks were kept."""


def stamp_of(snapshot: Snapshot, client: ClientStep) -> Verification:
    """Compute a step again on the rebuilt model, and judge its update.

    Of a snapshot of only the first blocks, what attacks on them read is compared, if the gradients behind them were recorded.

    An update that differs is `unverifiable`, too, if the client did something that cannot be computed again from what is recorded.

    Args:
        snapshot: the recorded step.
        client: the step on the rebuilt model.
    """
    stamp = verify(client, snapshot.observation.update) if snapshot.parts is None else _stamp_of_parts(snapshot, client)
    if stamp.status.bounds:
        return stamp
    missing = _not_recorded(snapshot) if stamp.status is VerificationStatus.MISMATCH else ""
    if stamp.status is VerificationStatus.MISMATCH and not (missing or client.facts.defenses or snapshot.parts):
        missing = other_term(client, snapshot.observation.update)
    different = in_words(code_differences(snapshot.recipe.code, client.model))
    if not (missing or different):
        return stamp
    note = "; ".join(filter(None, (missing, stamp.note, different)))
    return stamp.model_copy(update={"status": VerificationStatus.UNVERIFIABLE, "note": note})


def _stamp_of_parts(snapshot: Snapshot, client: ClientStep) -> Verification:
    """Compute the first blocks' part of a step again, and judge the kept update."""
    paths = {path for batch in client.truth.micro_batches for path in batch.output_gradients}
    known = [declared.known() for declared in client.facts.defenses]
    missing = ""
    if not any(path.startswith(BOUNDARY) for path in paths):
        missing = "only what attacks on the first blocks read, and a sketch of the rest, was kept (`keep: auto`)"
    elif any(plugin is None or not plugin.is_identity() for plugin in known):
        missing = (
            "only parts of the update were kept (`keep: auto`), and what a declared defence does depends on all of it"
        )
    if missing:
        return Verification(status=VerificationStatus.UNVERIFIABLE, note=f"{missing}: `keep: all` keeps everything")
    kept = frozenset(snapshot.observation.update)
    step = FirstBlocksStep(client.model, client.truth, client.recipe, client.facts, kept=kept)
    stamp = verify(step, snapshot.observation.update)
    if not stamp.status.bounds:
        return stamp
    return stamp.model_copy(update={"note": "; ".join(filter(None, (PARTS_VERIFIED, stamp.note)))})


def _not_recorded(snapshot: Snapshot) -> str:
    """Return what of the loss was not recorded, as a clause; empty if everything was."""
    recipe = snapshot.recipe
    if recipe.differentiated_again:
        return (
            "a gradient was differentiated again (a penalty on gradients), and what that sends to the parameters does not come through the "
            "model's outputs"
        )
    if recipe.unheld:
        return (
            f"the loop's loss may use the model's output {recipe.unheld[0]!r} beside the loss that the model computes itself, and the "
            "gradient there was too large to be recorded: take smaller micro-batches"
        )
    return ""
