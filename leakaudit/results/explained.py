"""What `leakaudit explain` says of the status of an attempt and of a step's stamp."""

from __future__ import annotations

from leakaudit.explanation import Explanation
from leakaudit.results.schema import AttemptStatus, VerificationStatus

STATUSES: dict[AttemptStatus, Explanation] = {
    AttemptStatus.RAN: Explanation(
        what="The attack ran on the step to its end.",
        tells="What it recovered is a fact, and that it found nothing is evidence about this attack.",
        tells_not="That nothing could be recovered: another attack may read the step.",
        do="Nothing.",
    ),
    AttemptStatus.NOT_APPLICABLE: Explanation(
        what="The attack says that it cannot work here. The reason stands beside it.",
        tells="A part that it reads is not in the update, or the model or the batch is of another kind.",
        tells_not="That nothing leaks: it did not run, so it is no evidence.",
        do="Make sure that another attack applies. A step to which none applies counts as not judged.",
    ),
    AttemptStatus.BUDGET_EXHAUSTED: Explanation(
        what="The attack was stopped at its time limit.",
        tells="What it had found until then is a fact.",
        tells_not="That nothing more could be found: with more time it might have found more.",
        do="Give each attempt more time (`budget_s` of the audit). `max_censored` of the policy says how many of these a verdict bears.",
    ),
    AttemptStatus.ERROR: Explanation(
        what="The attack crashed. The reason names the exception and its place, never private text.",
        tells="The attempt is lost. It counts towards `max_error_share` of the policy.",
        tells_not="That nothing leaks: a crashed attack is no evidence.",
        do="Report the reason. Out of memory: give the audit a smaller batch or another device.",
    ),
    AttemptStatus.SKIPPED: Explanation(
        what="The attack was due and was not started. The reason stands beside it.",
        tells="The attempt is lost, for instance because the audit was interrupted or its whole time was used up.",
        tells_not="That nothing leaks: an attack that did not run is no evidence.",
        do="Audit again with more time. It counts towards `max_error_share` of the policy.",
    ),
    AttemptStatus.NOT_NEEDED: Explanation(
        what="Another attack had already recovered every text of the step, so this one did not run.",
        tells="The step leaks: the other attack has the proof.",
        tells_not="Whether this attack would have recovered the texts as well. It is no evidence.",
        do="Nothing. A rule about this attack alone counts the attempt as missing.",
    ),
}
"""How an attempt ended -> what `leakaudit explain` says of it."""

STAMPS: dict[VerificationStatus, Explanation] = {
    VerificationStatus.VERIFIED: Explanation(
        what="The step was computed again from its weights and its batch, and gave the same update up to rounding.",
        tells="The update comes from the kept batch, so what is recovered is judged against the right texts.",
        tells_not="Whether anything leaks: the attacks say that.",
        do="Nothing.",
    ),
    VerificationStatus.SCALED: Explanation(
        what="The step was computed again, and the update is a multiple of it, as clipping or accumulation makes it.",
        tells="The update comes from the kept batch. The step is full evidence.",
        tells_not="That the factor hides anything: attacks estimate it.",
        do="Nothing.",
    ),
    VerificationStatus.STOCHASTIC: Explanation(
        what="The step drew random numbers that were not kept, so it agrees only roughly. Earlier versions gave this stamp.",
        tells="The batch may be the right one. A recovered text that is in it proves a leak.",
        tells_not="That the batch is the right one. If nothing is recovered, the step is no evidence.",
        do="Audit again with this version, which keeps the random state.",
    ),
    VerificationStatus.NOISED: Explanation(
        what="The step was computed again, and the update is it plus noise of the declared scale.",
        tells="The update comes from the kept batch, and the declared noise is really in it. The step is full evidence.",
        tells_not="That the noise is enough: the attacks, which know its scale, say that.",
        do="Nothing.",
    ),
    VerificationStatus.RESCALED: Explanation(
        what="Each tensor of the update is the recomputed one times a factor of its own, which nothing declared explains.",
        tells="A text that is recovered from it proves a leak.",
        tells_not="Anything, if nothing is recovered: only the client knows the factors.",
        do="Declare the defence or the optimizer that makes the factors, so that the step can be verified.",
    ),
    VerificationStatus.UNVERIFIABLE: Explanation(
        what="The step cannot be computed again. Its note says why.",
        tells="It is attacked: a recovered text that is in the kept batch proves a leak.",
        tells_not="Anything, if nothing is recovered: the update may come from another batch. The step counts as not judged.",
        do="Read the note of the step. Often an undeclared change of the update or a random state is the cause.",
    ),
    VerificationStatus.MISMATCH: Explanation(
        what="The update comes from another batch than the one that was kept.",
        tells="Recording and training disagree. The step gets no leakage number and is not attacked.",
        tells_not="Whether the real batch leaks.",
        do="Check where the batch is recorded and where the update is taken. `max_error_share` of the policy bears a few.",
    ),
}
"""Stamp of a step -> what `leakaudit explain` says of it."""
