"""Models of `results.json`, schema `leakaudit.results/1.8`.

The module has over 400 lines, because it describes one document in the order in which a reader needs its parts.

Scores are fractions from 0 to 1. A number that does not exist is a `Missing` with its reason, never a zero.
results.json holds no text, no token ids, no label names and no class counts. Unless the audit's text mode is `hash`, it also holds which
sixteenths of a text were recovered (`Strip`). What a full report shows beyond that is in the private journal (`journal.jsonl`, mode
0600), as `Sample`s and `LabelSample`s.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from leakaudit.results import former_keys
from leakaudit.results.conformance import Conformance
from leakaudit.results.former_keys import read_into_scores, written_from_scores
from leakaudit.results.membership import Membership

SCHEMA = "leakaudit.results/1.8"
"""Version of the schema.

1.1 has what was in reach, for attempts, sequences and summaries. 1.2 requires the digest, and has the precision of a sequence, the
number of sentences of a step and the declared defences. 1.3 has the catalogue, and `scores` with every metric for sequences and
summaries; `former_keys.py` lists the keys that `scores` replaces. 1.4 has metrics of level `batch`, the texts found, perplexities, short keys
for four metrics of a summary, what of its circumstances decides which attack can work (`Regime`), and attempts that were not needed. 1.5 says
for each kind of recovery which attack recovered the canary (`Controls.kinds`) and whether the steps were simulated, calls an attack's score of
its own guess `own_score`, which was `confidence`, and has the stamp `rescaled`. 1.6 has marks of the steps that two audits share. 1.7 has what a defence costs: intervals
of its utility (`Utility`), time and traffic (`Price`), and the epsilon that an accountant gives (`Privacy`); the policy as it was when the run
began, the base model, the data, the artefacts, and the runs of trackers (`TrackerRun`). 1.8 has what the updates show of the noise that an
accountant assumes (`Conformance`), the bounds on epsilon that recovered secrets give (`Canary`), how many texts of the steps the updates name
(`Membership`), whether the texts were invented (`Subject.data_invented`), which parameters told an attack what it read (`Attempt.told_by`), and the
learning rate of a step.

A reader of an earlier version ignores the keys that it does not know. If a file is earlier, keys that it lacks have their defaults.
Whoever adds a key must raise the version, because the reader refuses an unknown key in a file of its own or an earlier version."""


Fraction = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
"""A share of something, 0 to 1."""


Count = Annotated[int, Field(ge=0)]
"""A number of things, 0 or more."""


Amount = Annotated[FiniteFloat, Field(ge=0.0)]
"""A quantity of 0 or more, such as seconds or a norm."""


LENGTHS = (
    "Lengths are given as power-of-two ranges; other figures are exact, and a length can sometimes "
    "be worked out from them."
)
"""The statement on lengths of private texts, which documents and reports repeat word for word."""


STRIP_CELLS = 16
"""Cells of a `Strip`. Our choice: it is fine enough to show where a text leaked, and the same for texts of every length."""


Strip = Annotated[str, Field(pattern=rf"^[0-4a-d]{{{STRIP_CELLS}}}$")]
"""Which parts of a text were recovered: one character for each sixteenth of it, in order. `0`: nothing. `1` to `4`: up to that
many quarters, and most recovered tokens have a correct neighbour. `a` to `d`: up to one to four quarters, and most have none."""


class TextMode(StrEnum):
    """How much of the private text an output may show."""

    HASH = "hash"
    """Keyed hashes and numbers only."""
    MASKED = "masked"
    """Also which sixteenths of a text were recovered. No characters and no token ids; lengths are ranges."""
    FULL = "full"
    """The text itself."""


class AttemptStatus(StrEnum):
    """How one attack on one step under one defence ended."""

    RAN = "ran"
    NOT_APPLICABLE = "not_applicable"
    BUDGET_EXHAUSTED = "budget_exhausted"
    ERROR = "error"
    SKIPPED = "skipped"
    NOT_NEEDED = "not_needed"
    """Another attack had already recovered every text of the step, so this attack on texts could add nothing. It did not run, and it
    is no evidence."""


class VerificationStatus(StrEnum):
    """The stamp of a step: whether its update comes from the kept batch."""

    VERIFIED = "verified"
    """The recomputed step gives the same update, up to rounding."""
    SCALED = "scaled"
    """The update is the same up to one factor (accumulation, clipping, world size), which `scale` holds."""
    STOCHASTIC = "stochastic"
    """The step drew random numbers that were not kept, so only rough agreement can be expected."""
    NOISED = "noised"
    """The update is the same except for noise of the declared scale."""
    RESCALED = "rescaled"
    """Each tensor of the update is the recomputed one times a factor of its own, which nothing declared explains. It is attacked as it was
    observed: a recovered text proves a leak. If nothing is recovered, that is not evidence, because only the client knows the factors."""
    UNVERIFIABLE = "unverifiable"
    """The step cannot be computed again; the note says why. It is attacked: a recovered text that is in the kept batch
    proves a leak. If nothing is recovered, that is not evidence."""
    MISMATCH = "mismatch"
    """The update comes from another batch. No leakage number may be printed."""

    @property
    def bounds(self) -> bool:
        """Whether a step with this stamp and no leak may bound a leak rate.

        `stochastic` is kept for results of earlier versions: rough agreement does not show that the batch is the right one.
        """
        return self in (VerificationStatus.VERIFIED, VerificationStatus.SCALED, VerificationStatus.NOISED)

    @property
    def attacked(self) -> bool:
        """Whether a recovered text counts.

        It does not count if the update comes from another batch.
        """
        return self is not VerificationStatus.MISMATCH


class ResultsModel(BaseModel):
    """The base of all models, which are frozen and ignore unknown keys.

    So keys of a later version are left out. `load_results` refuses unknown keys in files of this version and before.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Score(ResultsModel):
    """One measured number."""

    value: Fraction
    """The number, 0 to 1."""
    n: Annotated[int, Field(ge=1)] = 1
    """Number of sequences (or labels) over which it is the mean."""


class Missing(ResultsModel):
    """The reason why there is no number."""

    missing: str
    """The reason, in a sentence."""


Measured = Score | Missing


Mark = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]
"""A keyed hash of 64 bits in hex; empty if the audit had no key for it."""


class Verification(ResultsModel):
    """The stamp that a step gets before it is attacked."""

    status: VerificationStatus
    relative_error: Amount | None = None
    """||observed - recomputed|| / ||recomputed|| over all shared parameters, after the factor `scale` is removed."""
    scale: FiniteFloat | None = None
    """Least-squares factor between observed and recomputed update."""
    sigma: Amount | None = None
    """Estimated standard deviation of declared noise, in update units."""
    note: str = ""
    """The reason for the stamp, or what limits it; empty if there is nothing to say."""
    absent: tuple[str, ...] = ()
    """Declared defences that are not in the update; the step is audited without them."""
    noiseless: tuple[str, ...] = ()
    """Declared defences whose noise is not in the update; the step is audited without that noise."""
    where: Literal["in place", "rebuilt"] = "rebuilt"
    """Which model computed the step again. `rebuilt`: the one that attacks get. `in place`: the client's own, in results of earlier
    versions."""


class StepRecord(ResultsModel):
    """One audited client step. Sizes are given as ranges (see `LENGTHS`)."""

    id: str
    """`st-` and the optimizer step, zero-padded, so that names sort by time."""
    step: Count
    """Optimizer step, counted from 0."""
    seed: Count | None = None
    """Seed of the simulation that made the step, if there were several; None otherwise."""
    epoch: Amount | None = None
    """Epoch of the training, with its fraction; None if unknown."""
    phase: Literal["early", "middle", "late", "simulated"] = "simulated"
    """Third of the planned run in which the step lies."""
    snapshot: str
    """`hmac-sha256:` of the observation, under the run's key: an unkeyed digest would let anyone confirm a guessed text. `sha256:` in
    earlier results."""
    n_sequences: Count
    """Number of texts, or of examples, in the batch; 0 if the snapshot could not be read."""
    n_tokens_bucket: str
    """Number of tokens in the batch as a power-of-two range such as `33-64`."""
    verification: Verification
    loss: FiniteFloat | None = None
    """Training loss of the step; None if unknown."""
    learning_rate: Amount | None = None
    """Learning rate of the step, of the first group of parameters; None if unknown, and in results before 1.8."""
    shipped_defense: str = "none"
    """The defence that the training run itself applied, as its owner declares it; several are joined by `+`."""
    sent: Verification | None = None
    """Stamp of the update that was sent, if something changed it after the training: whether the declared defences make it from the
    produced update. None if it was sent as produced."""
    n_sentences: Count | None = None
    """Number of sequences that are long enough for a sentence event; 0 for arrays, None in results before 1.2."""
    beyond_hidden: bool | None = None
    """Whether the step has at least as many different inputs (tokens at their places) as the hidden size. Some attacks end there
    (`AttackEntry.token_limit`), others do not, so this is no protection. None for arrays, if the hidden size is unknown, and in results before
    1.4."""
    batch: Mark = ""
    """Mark of the batch, under the key that `RunInfo.pairing` names. Two audits with the same key give the same batch the same mark."""
    unit: Mark = ""
    """Mark of the batch with the weights and the random numbers. A later step with the same mark is no new evidence."""
    words_not_kept: bool = False
    """Whether some words of its texts show only in parts of the update that were not kept: words that a language model predicts and does not
    read, such as a text's last one. That no attack recovers such a text completely is then no protection."""


class SequenceScore(ResultsModel):
    """How much of one true sequence an attack recovered.

    Each guess is matched to one true sequence of the batch.
    """

    id: str
    """Name of the text within its step, such as `s-0000`."""
    hmac: str
    """HMAC-SHA-256 of the true token ids under the run's key, 64 bits in hex."""
    scores: dict[str, Fraction] = {}
    """Name of a sequence-level metric -> number. A metric without a number for this sequence is absent."""
    longest_run: int | None = None
    """Tokens of the longest run, read from results before 1.2. It is not written now, because it is an exact length."""
    strip: Strip | None = None
    """Which parts of the sequence were recovered; None in text mode hash, and in results before 1.2."""
    min_tokens_bucket: str
    """Length of the true sequence as a power-of-two range such as `9-16`."""
    long_enough: bool = False
    """Whether the true sequence has at least as many tokens as a sentence event asks for (`min_tokens`, 8 by default)."""
    own_score: Fraction | None = None
    """The attack's own score of its guess. It ranks the guesses of one attack and is no probability; `proved` is certain. Before 1.5 its
    key was `confidence`."""
    proved: bool = False
    """Whether the attacker computed the update of the guess and got the observed update, up to rounding."""
    reachable: Fraction | None = None
    """Share of its tokens, without special tokens, that were among the attack's candidates at their place; None if unknown."""
    passes: bool | None = None
    """Whether the true sequence would have passed the attack's own test; None if it has no test, or if that is unknown."""

    @model_validator(mode="before")
    @classmethod
    def _from_former_keys(cls, data: Any) -> Any:
        return read_into_scores(former_keys.renamed(data, former_keys.RENAMED_IN_SEQUENCES), former_keys.OF_SEQUENCES)

    @model_serializer(mode="wrap")
    def _with_former_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        former = written_from_scores(self.scores, former_keys.OF_SEQUENCES)
        return {**write(self), **former, "exact": self.exact}

    @property
    def exact(self) -> bool | None:
        """Whether the sequence was recovered exactly; None if no sequence was guessed."""
        return None if (found := self.scores.get("exact")) is None else found == 1.0

    @property
    def token_recall(self) -> float | None:
        """Share of the true tokens that were recovered, in any order."""
        return self.scores.get("token_recall")

    @property
    def token_precision(self) -> float | None:
        """Share of the guessed tokens that are in the true sequence, with counts.

        For a bag of tokens it is the share of the bag that is anywhere in the batch. None in results before 1.2.
        """
        return self.scores.get("token_precision")

    @property
    def outcome(self) -> Literal["recovered", "search gave up", "out of reach"] | None:
        """Whether the sequence was recovered or in reach; None if that is unknown.

        It is unknown if the attack guesses no sequences, or does not say what was in reach.

        The attack's own test decides if there is one. Otherwise a sequence was in reach if every token was a candidate. The value
        `out of reach` means "not by these attacks": another attack may reach it. The name is kept for readers of earlier results.
        """
        if self.exact is None or self.exact:
            return "recovered" if self.exact else None
        if self.passes is None and self.reachable is None:
            return None
        in_reach = self.reachable == 1.0 if self.passes is None else self.passes
        return "search gave up" if in_reach else "out of reach"


_FINISHED = (AttemptStatus.RAN, AttemptStatus.BUDGET_EXHAUSTED)
"""How an attack ended that ran. The attribute of an enum takes longer to read, and every rule asks every attempt."""


class Attempt(ResultsModel):
    """One attack on one step under one defence."""

    step: str
    """Id of the attacked step."""
    attack: str
    """Name of the attack with its options."""
    defense: str
    """Name of the defence with its options; `none` for the update as it was sent."""
    seed: int
    """Seed of the attack's random numbers."""
    status: AttemptStatus
    """How it ended."""
    reason: str = ""
    """Reason for every status except `ran`. It never holds private text; of an exception it names only the type and the place."""
    stop: str = ""
    """Why the attack stopped: `done`, `converged`, `budget`."""
    adaptive: bool = True
    """Whether the attack knew the parameters of the defence."""
    granted: tuple[str, ...] = ()
    """What the threat model gave the attack besides the update: `labels`, `lengths`."""
    wall_s: Amount = 0.0
    """Seconds that it took."""
    gpu_s: Amount = 0.0
    """Seconds of them on a GPU."""
    events: tuple[str, ...] = ()
    """`exact_sentence`: a sequence of at least `min_tokens` tokens was recovered exactly. `exact_sequence`: any sequence.
    `all_words`: every token of the batch was named, in any order, and at least half of the named tokens are true. `most_words`: at
    least half of the tokens of a sequence of `min_tokens` tokens or more were recovered, in any order, and at least half of the
    guessed tokens are true. `label_counts`: the class counts were recovered exactly, and the attack could tell them from chance.
    If the attack does not know the batch size (fact `batch_size_known` is 0), the shares of the classes were recovered exactly."""
    sequences: tuple[SequenceScore, ...] = ()
    """One entry for each true text of the step; empty if no text was guessed."""
    scores: dict[str, Measured] = {}
    """Name of a metric -> number, or why there is none. If the attack ran, every registered metric has an entry."""
    facts: dict[str, FiniteFloat] = {}
    """Diagnostics of the attack by name, such as `rank`, `candidates` or `loss`."""
    told_by: dict[str, Fraction] = {}
    """Parameter name -> share of what the attack read that this parameter's update told. Empty if the attack does not say it, and in results
    before 1.8."""
    guess_perplexity: Amount | Missing | None = None
    """Perplexity of the guessed texts: the exponential of the mean over the texts of the negative log-likelihood per token. The client's own
    model judges if it predicts next tokens, else the prior that the attack uses. A low number means that the guess reads like text, not that
    it is right. None if no text was guessed, and in results before 1.4."""
    reachable_tokens: Measured | None = None
    """Mean share of a true sequence's tokens that were among the attack's candidates, or why that is unknown. None if
    it was not measured: the attack did not run, or the results are older than 1.1."""
    reachable_sequences: Measured | None = None
    """Share of the true sequences that would have passed the attack's own test, of the `n` that could be tested."""

    @property
    def finished(self) -> bool:
        """Whether the attack ran, even if out of time; only then are there numbers."""
        return self.status in _FINISHED

    @property
    def leaked(self) -> bool:
        """Whether at least one leak event happened."""
        return bool(self.events)

    @property
    def recovers_every_text(self) -> bool:
        """Whether it recovered every text of the step word for word."""
        return self.finished and bool(self.sequences) and all(s.exact for s in self.sequences)


class Control(ResultsModel):
    """Count of control steps: k of n were recovered.

    A positive control must be recovered, a negative one must not.
    """

    k: Count = 0
    """Control steps that were recovered or, for the negative control, matched."""
    n: Count = 0
    """Control steps that count."""
    note: str = ""
    """Why there is no count, or what limits it; empty if nothing does."""


Kind = Literal["text", "words", "labels"]
"""What is recovered: a whole text, every word of a batch, or the label counts."""


class Tally(ResultsModel):
    """k of n control steps."""

    k: Count = 0
    """Control steps that were recovered."""
    n: Count = 0
    """Control steps that count."""


class KindControl(Tally):
    """Canary steps from which one kind was recovered, by any attack."""

    by: dict[str, Tally] = {}
    """The same for each attack: steps that it recovered, of those on which it ran. An attack that does not apply to a canary is not here."""


class Controls(ResultsModel):
    """Both controls of the audit."""

    positive: Control = Control.model_construct(note="not run")
    """Canary steps from which every kind came back that the battery has attacks for. The gate reads `kinds`."""
    negative: Control = Control.model_construct(note="not run")
    """Reconstructions from another batch that match the real batch; none should."""
    kinds: dict[Kind, KindControl] = {}
    """The positive control of each kind. Empty if no control ran, and in results before 1.5."""


class Summary(ResultsModel):
    """One attack under one defence over all attacked steps.

    Scores are fractions.

    A summary is a description, not evidence: it includes unverifiable steps and attempts that ran out of time, while the gate's
    bounds leave out attempts that prove nothing.
    """

    attack: str
    """Name of the attack with its options."""
    defense: str
    """Name of the defence with its options."""
    steps: Count
    """Steps with a scored attempt."""
    sequences: Count
    """True texts of these steps."""
    scores: dict[str, Fraction] = {}
    """Name of a metric -> its mean. A metric that measured nothing is absent."""
    spread: dict[str, Amount] = {}
    """Name of a metric -> sample standard deviation of its means over the seeds of a simulation. Absent where fewer than two seeds have a mean."""
    texts_found: Count | None = None
    """Number of texts that `sentences_found` counts, of all `sequences`. None if no sequence was guessed, and in results before 1.4."""
    guess_perplexity: Amount | None = None
    """Geometric mean of the attempts' perplexities; None if no attempt has one, and in results before 1.4."""
    seconds_per_step: Amount | None
    """Median over scored attempts."""
    status_counts: dict[str, Count]
    """How an attempt ended -> number of attempts."""
    reachable_tokens: Fraction | None = None
    """Mean of `reachable_tokens` of the attempts; None if none has one."""
    reachable_sequences: Fraction | None = None
    """Share of the true texts that would have passed the attack's own test; None if unknown."""

    @model_validator(mode="before")
    @classmethod
    def _from_former_keys(cls, data: Any) -> Any:
        return read_into_scores(data, former_keys.OF_SUMMARIES)

    @model_serializer(mode="wrap")
    def _with_former_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**write(self), **written_from_scores(self.scores, former_keys.OF_SUMMARIES)}


class Utility(ResultsModel):
    """How well a model does after training under a defence.

    It is compared with the same training without the defence: the same start, data, order of the data and seeds.
    """

    defense: str
    """Label of the defence in the battery; `none` for the training without one."""
    metric: str
    """Name of the measured number, such as `accuracy` or `loss`."""
    value: FiniteFloat
    """Mean over the seeds, in the metric's own units."""
    baseline: FiniteFloat | None = None
    """The same without the defence."""
    higher_is_better: bool = True
    """Whether a larger number means a better model."""
    difference: FiniteFloat | None = None
    """`value - baseline`, paired by seed and evaluated example; None if nothing was paired."""
    lower: FiniteFloat | None = None
    """Lower end of the 95 % interval of the difference; None if there are too few seeds for one."""
    upper: FiniteFloat | None = None
    """Upper end of that interval."""
    seeds: tuple[Count, ...] = ()
    """Seeds of the trainings."""
    steps: Count | None = None
    """Steps of optimization of each training."""
    examples: Count | None = None
    """Examples on which the metric was measured."""
    learning_rate: Amount | None = None
    """Learning rate of the trainings under this defence."""
    diverged: Count = 0
    """Trainings that ended with a loss that is not finite; they are in no mean."""


class Price(ResultsModel):
    """What a defence costs in time and traffic, relative to the training without it."""

    defense: str
    """Label of the defence in the battery."""
    seconds: Amount | None = None
    """Median seconds of a training step with the defence over those without it, measured in one process."""
    traffic: Amount | None = None
    """Bytes of an update in its smallest usual form over those of the update without the defence in float32."""


class Privacy(ResultsModel):
    """A guarantee of differential privacy, as an accountant of the run states it.

    The audit repeats the claim and does not confirm it.
    """

    defense: str = "none"
    """Label of the defence in the battery; `none` for what the run itself ships."""
    epsilon: Amount | None = None
    """None if no accountant gave one."""
    delta: Amount | None = None
    """The delta of the guarantee; None if no accountant gave one."""
    accountant: str = ""
    """Who computed it, such as `opacus rdp`."""
    noise_multiplier: Amount | None = None
    """Standard deviation of the noise over the bound on a gradient's norm; None if unknown."""
    max_grad_norm: Amount | None = None
    """Bound on the norm of the gradient of one example; None if unknown."""
    sampling_rate: Amount | None = None
    """Share of the examples in one step, as the accountant assumes it."""
    sampling: Literal["poisson", "shuffled", "unknown"] = "unknown"
    """How the run draws its batches."""
    steps: Count | None = None
    """Steps that the accountant counted."""
    origin: Literal["accountant", "claim", "computed"] = "claim"
    """Where epsilon is from. `accountant`: the accountant of the training run. `claim`: the configuration of the audit. `computed`: the audit,
    from the defence's noise and from the sampling rate and the steps that the configuration names."""
    covers: Literal["run", "message"] = "run"
    """What epsilon is about: the whole training run, or one message of a client."""
    note: str = ""
    """What a reader of epsilon has to know besides, in a sentence; empty if nothing."""
    why_not: str = ""
    """Why there is no epsilon; empty if there is one."""


class Canary(ResultsModel):
    """A lower bound on epsilon, from the secrets that one attack recovered.

    It can contradict what a mechanism claims of one step, and never confirms it.
    """

    defense: str
    """Label of the defence in the battery; `none` for what the run itself ships."""
    attack: str
    """Label of the attack in the battery."""
    k: Count
    """Steps in which one of the attack's guesses was the secret."""
    n: Annotated[int, Field(ge=1)]
    """Steps with a secret; those on which the attack did not run are counted as not recovered."""
    values: Annotated[int, Field(ge=2)]
    """M: number of values from which each secret was drawn."""
    guesses: Count
    """L: largest number of guesses of one step. By chance a secret is recovered with probability L / M."""
    delta: Amount
    """The delta for which the bound holds."""
    confidence: Fraction
    """With which the bounds of all attacks under this defence hold together."""
    attacks: Annotated[int, Field(ge=1)] = 1
    """Number of these attacks; each has its share of 1 - confidence."""
    epsilon_lower: Amount
    """Lower bound on the epsilon of one step, for data sets with and without one record; 0 if nothing is bounded."""
    covers: Literal["step"] = "step"
    """What the bound is about: one step in which the record certainly took part, so without amplification by sampling."""
    claimed: Amount | None = None
    """The epsilon of one such step that the defence's mechanism claims, at the same delta; None if nothing claims one."""
    claimed_by: str = ""
    """Where `claimed` comes from, as a clause."""
    notes: tuple[str, ...] = ()
    """Conditions under which the bound holds, in sentences."""

    @property
    def verdict(self) -> Literal["contradicted", "not contradicted", "no claim"]:
        """What the bound says of the claim."""
        if self.claimed is None:
            return "no claim"
        return "contradicted" if self.epsilon_lower > self.claimed else "not contradicted"


class NotTested(ResultsModel):
    """One thing that the audit says nothing about."""

    what: str
    """What was not tested."""
    why: str
    """Why not."""


class Coverage(ResultsModel):
    """What was not tested, and which registered attacks did not run."""

    not_tested: tuple[NotTested, ...] = ()
    """What the audit says nothing about, with the reason."""
    not_run: tuple[NotTested, ...] = ()
    """Registered attacks that did not run, with the reason."""
    audited_steps: Count = 0
    """Number of entries in `steps`."""
    skipped_snapshots: Count = 0
    """Snapshots that were refused and whose step is unknown. Early versions also counted steps that were due while attacks ran.
    `not_tested` lists the steps that were not kept, with the reason."""
    total_steps: Count | None = None
    """Optimizer steps of the whole run; None if unknown."""


class Battery(ResultsModel):
    """The battery that ran: name, version, members, and a digest of all options."""

    name: str = "custom"
    """Name of the battery."""
    version: str = "1"
    """Version of the battery."""
    digest: str
    """Digest of attacks, defences, options, budget, seed and version of leakaudit."""
    attacks: tuple[str, ...]
    """Names of the attacks with their options, in the order in which they ran."""
    defenses: tuple[str, ...]
    """Names of the defences with their options; `none` comes first."""
    budget_s: Amount
    """Time limit of each attempt, in seconds."""
    slow: tuple[str, ...] = ()
    """Attacks that ran when every waiting step had had the others."""


class TakenPolicy(ResultsModel):
    """The policy as it was when the run began."""

    name: str
    """Name of the policy."""
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    """Of its content, as `verdict.json` has it."""
    taken_at: str
    """Time in UTC, in ISO 8601."""


class TrackerRun(ResultsModel):
    """What an experiment tracker calls the training run."""

    kind: str
    """The tracker: `TensorBoard`, `W&B`, `MLflow` or `Trackio`."""
    id: str = ""
    """Id of the run; empty if it has none."""
    name: str = ""
    """Name of the run, as its owner or the tracker chose it. It may be private."""
    url: str = ""
    """Address of the run, without a password and a query; empty if no server has it."""


class RunInfo(ResultsModel):
    """The run of the audit: when, by which version, with which settings."""

    id: str
    """Id of the audit."""
    started: str
    """Time of the beginning in UTC, in ISO 8601."""
    finished: str
    """Time of the end in UTC, in ISO 8601; empty if it did not end."""
    tool: str
    """Version of leakaudit."""
    battery: Battery
    text_mode: TextMode = TextMode.HASH
    """How much of the private text the files of the audit may show."""
    seed: int = 0
    """Seed of the attacks."""
    command: str = ""
    """The command that made the run; empty if unknown."""
    environment: dict[str, str] = {}
    """Versions and hardware: python, torch, transformers, device, threads."""
    interrupted: bool = False
    """Whether the audit was stopped before its end."""
    simulated: bool = False
    """Whether `leakaudit simulate` made the steps, and no training run. Before 1.5 results do not say it."""
    pairing: Mark = ""
    """Id of the key of the steps' marks. Audits with the same id can be compared step by step."""
    policy: TakenPolicy | None = None
    """The policy when the run began, of which a later change shows. None in results before 1.7."""
    trackers: tuple[TrackerRun, ...] = ()
    """Runs of the training's trackers. Empty without a known one, and in results before 1.7."""


class Artifact(ResultsModel):
    """A file that is released, such as the weights of a model."""

    name: str
    """Path from the working folder; the file's name alone where that path leaves it."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the content, in hex."""


class Subject(ResultsModel):
    """The audited model, what it comes from, and the files that the run made."""

    model: str
    """Class of the model."""
    config_digest: str
    """Digest of the model's configuration."""
    parameters: Count
    """Number of the model's parameters."""
    code_commit: str | None = None
    """Commit of the code in the training's working folder; None if git could not say it, and in results before 1.7."""
    code_dirty: bool | None = None
    """Whether that folder had changes that were not committed."""
    base_model: str = ""
    """`sha256:` and a digest of the weights that training began with, or `hub:NAME@REVISION`. Empty if unknown, and in results before 1.7."""
    data: str = ""
    """Name of the data set, as its owner calls it. Empty if unknown, and in results before 1.7."""
    data_invented: bool = False
    """Whether the owner says that all texts were invented, so that they are nobody's. False in results before 1.8."""
    artifacts: tuple[Artifact, ...] = ()
    """Files that the run made. Empty if none was named, and in results before 1.7."""


class ThreatModel(ResultsModel):
    """The adversary, with what it sees and knows."""

    adversary: str = "honest-but-curious server"
    """Who attacks."""
    sees: str = "one client's transmitted update"
    """What the adversary sees."""
    knows: tuple[str, ...] = ("architecture", "weights before the step", "tokenizer")
    """What it knows besides."""
    granted: tuple[str, ...] = ()
    """What the audit gave the attacks besides, such as `labels`."""


class Regime(ResultsModel):
    """The circumstances that decide which attack can work."""

    dtype: str = "float32"
    """Number format of the training step: that of autocast, else that of the weights."""
    training_mode: bool
    """Whether the model was in training mode, so that dropout was on."""
    dropout: Fraction
    """Largest dropout rate in the model."""
    hidden: Count | None
    """Hidden size D of the model; None if unknown."""
    trainable: str
    """`all`, or the frozen part."""
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Largest number of micro-batches whose gradients make one step."""
    max_grad_norm: Amount | None = None
    """Norm to which the gradient is clipped; None without clipping."""
    batch_size: Count | None = None
    """Texts of one batch; None if unknown."""
    update: str = ""
    """What the client sends, such as `difference of weights after 10 steps of AdamW`; empty in results that do not say it."""
    declared_defenses: tuple[str, ...] | None = None
    """Names of the defences that the run declares; the `shipped_defense` of every step is made of these. None in results before 1.2."""
    declared: tuple[str, ...] = ()
    """The same defences with their numbers, such as `gaussian-noise(scale=0.1)`, whether or not they were found in the updates. Empty in results
    before 1.6."""
    tokens: str = ""
    """Number of tokens of the largest step, as a power-of-two range; empty for arrays, and in results before 1.4."""
    embeddings: Literal["trained", "frozen"] | None = None
    """Whether the word embeddings are trained. If they are, their rows name words, however large the batch is. None if the model has none,
    and in results before 1.4."""
    head: Literal["trained", "tied", "frozen"] | None = None
    """The output layer. `tied`: a language model whose head is the trained table of the word embeddings. None if none was found, and in results
    before 1.4."""
    adapters_rank: Count | None = None
    """Rank of the adapters, 0 for adapters without a rank; None without adapters, and in results before 1.4."""


class Overhead(ResultsModel):
    """The cost of the audit to the training run, in the training process.

    Attacks in a side process are not counted.
    """

    blocked_s: Amount = 0.0
    """Seconds that the training thread spent in the audit."""
    training_s: Amount | None = None
    """Seconds of the whole training; None if unknown."""
    check_s: Amount = 0.0
    """The part of `blocked_s` in which earlier versions computed kept steps again in the training process; 0 today."""
    writer_s: Amount | None = None
    """Seconds that a thread beside training checked, hashed and wrote kept steps."""
    memory_mb: Amount | None = None
    """Size of the copies of a kept step in the trainer's memory, in units of 10^6 bytes."""
    disk_mb: Amount | None = None
    """Total size of the kept steps on the disk, in units of 10^6 bytes."""


class PluginEntry(ResultsModel):
    """The description of a plugin."""

    label: str
    """Name for readers, such as `TAG`."""
    meaning: str
    """What it does or measures, in a sentence for a glossary."""
    source: str
    """Paper, section, equation."""


class AttackEntry(PluginEntry):
    """The description of an attack."""

    goal: Kind
    """What it recovers: whole sequences, a bag of words, or class counts."""
    threat_model: str
    """What the attacker sees and what it needs, in a sentence."""
    token_limit: bool = False
    """Whether it can read nothing where a step has as many tokens as the hidden size. It then says nothing about such steps."""


class MetricEntry(PluginEntry):
    """The description of a metric."""

    level: Literal["sequence", "batch", "step"]
    """Whether it scores one sequence, all sequences of a step together, or the label counts of a step."""
    higher_is_better: bool
    """Whether a higher number means that more leaked."""


class Catalogue(ResultsModel):
    """The attacks, defences and metrics that took part, by their names.

    The rest of the results uses the same names. It is empty in results before 1.3.
    """

    attacks: dict[str, AttackEntry] = {}
    """Name of an attack, without options -> what it is."""
    defenses: dict[str, PluginEntry] = {}
    """Name of a defence, without options -> what it is."""
    metrics: dict[str, MetricEntry] = {}
    """Name of a metric -> what it measures."""

    def metric_label(self, name: str) -> str:
        """Return the label of a metric, or its name if the catalogue does not have it."""
        return self.metrics[name].label if name in self.metrics else name


class Results(ResultsModel):
    """One audit. `leakaudit schema results` prints the JSON Schema of this class."""

    schema_: str = Field(default=SCHEMA, alias="schema")
    """Version of the schema that the file has."""
    run: RunInfo
    subject: Subject
    threat_model: ThreatModel = ThreatModel.model_construct()
    regime: Regime
    steps: tuple[StepRecord, ...]
    """The audited client steps, by time."""
    attempts: tuple[Attempt, ...]
    """Every attack on every step under every defence."""
    summaries: tuple[Summary, ...]
    """One entry for each attack under each defence, over all steps."""
    controls: Controls = Controls.model_construct()
    utility: tuple[Utility, ...] = ()
    """How well the model does under each defence; empty if it was not measured."""
    prices: tuple[Price, ...] = ()
    """What each defence costs in time and traffic; empty if it was not measured."""
    privacy: tuple[Privacy, ...] = ()
    """Guarantees of differential privacy, as an accountant states them; empty without one."""
    conformance: Conformance | None = None
    """Whether the updates carry the noise that an accountant assumes. None if the run declares no noise, and in results before 1.8."""
    canaries: tuple[Canary, ...] = ()
    """Bounds on epsilon from secrets that attacks recovered; empty if no step held one."""
    membership: Membership | None = None
    """How many texts of the steps the updates name. None if nobody asked or no step could be tested, and in results before 1.8."""
    coverage: Coverage = Coverage.model_construct()
    overhead: Overhead = Overhead.model_construct()
    catalogue: Catalogue = Catalogue.model_construct()
    min_tokens: Annotated[int, Field(ge=1)] = 8
    """Least number of tokens of a sequence that counts as a sentence in `exact_sentence`, `most_words` and `in_reach`."""
    digest: str | None = None
    """`sha256:` over everything else in the file, which shows that the file was not changed. It guards against accidents, but not against
    somebody who computes it again; to prevent that, sign the file. None in results before 1.2, and before `with_digest`."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, defer_build=True)
