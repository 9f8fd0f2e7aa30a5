"""The configuration of an audit, read from YAML and validated.

Only the entry points read it; functions below them take plain arguments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from leakaudit.config.canaries import CanariesConfig
from leakaudit.config.membership import MembershipConfig
from leakaudit.config.privacy import PrivacyConfig
from leakaudit.results.schema import TextMode

NIGHT_VARIABLE = "LEAKAUDIT_NIGHT"
"""Environment variable of a training that `leakaudit nightly` runs: the folder for what its callback keeps. The night attacks it afterwards."""

DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"

MAX_PLUGINS = 1_000
"""Most attacks, and most defences, of one audit. Our choice: at the default budget a thousand attacks take up to 17 hours on one step."""
MAX_COUNT = 10**9
"""Largest number of steps, snapshots, tokens or controls. Our choice: no training run needs more."""
MAX_SECONDS = 10**9
"""Longest budget or wait in seconds: 31 years."""
MAX_DAYS = 36_500
"""Longest retention in days: a hundred years."""
MAX_SEED = 2**32 - 1
"""Largest seed that every library accepts (numpy's `seed` has 32 bits)."""
MAX_GIGABYTES = 10**6
"""Largest spool in units of 10^9 bytes: a petabyte."""

DATA_NAME = r"^[A-Za-z0-9._-]{0,64}$"
"""Names of data sets. Our choice: they can stand in a file name and in a table."""

RUN_NAME = "{run_name}"
"""Place of the run's name in `out_dir`."""

Scalar = bool | int | FiniteFloat | str
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def _number_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Replace pydantic's several errors, one for each type, by one sentence."""
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(f"write auto, or a whole number from 1 to {MAX_COUNT}") from None


def _only_rebuilt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Say what became of a value that earlier versions had."""
    if value == "in_place":
        raise ValueError(
            "the check in place is gone, because it called the user's model a second time in the training process; remove the key"
        )
    return handler(value)


CountOrAuto = Annotated[Annotated[int, Field(ge=1, le=MAX_COUNT)] | Literal["auto"], WrapValidator(_number_or_auto)]


class PluginSpec(BaseModel):
    """The name of a plugin and its options: `span`, or `{name: tag, steps: 300}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    """Registered name."""
    options: dict[str, Scalar] = {}
    """Option -> value."""

    def __hash__(self) -> int:
        """Hash the name and the names of the options."""
        return hash((self.name, *sorted(self.options)))

    @property
    def label(self) -> str:
        """The name with its options, as shown in tables: `gaussian-noise(scale=0.1)`."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    @classmethod
    def parse(cls, text: str) -> PluginSpec:
        """Read `name` or `name(key=value, key=value)`.

        Values stay text; `Registry.create` converts them to the types of the plugin's options.

        Raises:
            ValueError: the text has another form.
        """
        name, bracket, rest = text.strip().partition("(")
        if not bracket:
            return cls(name=name)
        if not rest.endswith(")"):
            raise ValueError(f"{text!r}: expected name(key=value, ...)")
        pairs = [pair.partition("=") for pair in rest[:-1].split(",") if pair.strip()]
        bare = next((value.strip() for value, equals, _ in pairs if not equals), None)
        if bare is not None:
            raise ValueError(
                f"{text!r}: {bare} stands without the name of an option; expected name(key=value, ...). "
                f"`leakaudit attacks {name}` or `leakaudit defenses {name}` lists the options"
            )
        return cls(name=name, options={key.strip(): value.strip() for key, _, value in pairs})


def _as_spec(value: Any) -> Any:
    """Convert `span`, `prune(share=0.9)` or `{name: prune, share: 0.9}` from YAML."""
    if isinstance(value, str):
        return PluginSpec.parse(value)
    if isinstance(value, dict) and "name" in value and "options" not in value:
        return {"name": value["name"], "options": {key: v for key, v in value.items() if key != "name"}}
    return value


def _only_the_runs_name(value: Path) -> Path:
    """Refuse a place for another name than the run's."""
    if {"{", "}"} & set(str(value).replace(RUN_NAME, "")):
        raise ValueError(f"{RUN_NAME} is the only name that can stand in braces here")
    return value


Plugin = Annotated[PluginSpec, BeforeValidator(_as_spec)]

DEFAULT_ATTACKS = tuple(
    PluginSpec(name=name) for name in ("embedding-rows", "span", "rare-rows", "idlg", "llg", "ilrg", "feature-labels")
)
LABEL_ATTACKS = tuple(PluginSpec(name=name) for name in ("random-labels", "idlg", "llg", "llg-star", "ilrg"))
"""Default attacks on batches without text. They need neither labelled data nor a search."""

NONE = PluginSpec(name="none")


def _undefended_first(specs: tuple[PluginSpec, ...]) -> tuple[PluginSpec, ...]:
    """Put `none` first: each defence is compared with the update as it was sent."""
    return (NONE, *(spec for spec in dict.fromkeys(specs) if spec != NONE))


class AuditConfig(BaseModel):
    """The configuration of one audit: attacks, defences, limits and text mode.

    Every key has a default. `leakaudit schema config` prints the descriptions below.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    out_dir: Annotated[Path, AfterValidator(_only_the_runs_name)] = Path("leakaudit-audit")
    """Folder for snapshots, results and report of the latest run. Only its owner can read it (mode 0700). Files of an earlier run move
    to `<out_dir>.1`, `<out_dir>.2` and so on. For the runs of a sweep write `audits/{run_name}`: the name is the trainer's or a tracker's, in
    letters, digits, `.`, `_` and `-`."""
    trackers: Literal["numbers", "report", False] = "numbers"
    """What the trainer's experiment trackers get. `numbers`: scores of each audited step. `report`: also the report, as an artefact of W&B or
    MLflow, unless `text` is full; it then lies on their server. `false`: nothing."""
    unit: Literal["step", "round"] = "step"
    """What is kept and counted. `step`: one optimizer step. `round`: one `train()`, `fit()` or `with watch(...)` as a whole, as a federated
    client does between two messages; what is observed is the difference of the weights. All rounds with the same `out_dir` are one audit with
    one report. The keys about steps (`every_n_steps`, `first_step`, `max_snapshots`) then count rounds."""
    rounds: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Rounds that are planned, with `unit: round`; null if unknown. The audit ends with the last of them. Until then a later process with the
    same `out_dir` and configuration continues it."""
    sent_elsewhere: bool = False
    """Whether another process says what is sent of a round, with `unit: round`: NVFlare's filter, if the training runs in an external
    process. The round waits for it, also after this process has ended."""
    every_n_steps: CountOrAuto = "auto"
    """Optimizer steps from one kept step to the next. `auto` spreads the steps that the policy needs (or `max_snapshots`) over the run, at
    least 10 steps apart. It keeps 10 to 19 steps of a run of 20 to 99 steps, and every step of a shorter run. If the length of the run is
    unknown, the distance grows: steps 0, 1, 2, 4, 8, 16, 26, 36 and so on; from step 100 on it is a tenth of the steps so far."""
    first_step: Count = 0
    """First optimizer step to keep, counted from 0."""
    max_snapshots: CountOrAuto = "auto"
    """Most steps to keep in one training run. `auto`: a tenth more than the policy needs to pass, and at least 10, because some steps may
    not be evidence. The built-in policy needs 59 steps, so `auto` is 65."""
    attacks: Annotated[tuple[Plugin, ...], Field(min_length=1, max_length=MAX_PLUGINS)] = DEFAULT_ATTACKS
    """Attacks to run on each kept step. Write a name, or a name with options: `{name: tag, steps: 300}`."""
    defenses: Annotated[tuple[Plugin, ...], Field(max_length=MAX_PLUGINS), AfterValidator(_undefended_first)] = (NONE,)
    """Defences to compare: each attack runs on each kept step under each defence. `none` is the update as it was sent; it always comes
    first."""
    shipped_defense: Plugin = NONE
    """Defence that the training run itself applies, as its owner declares it. Attacks know it, because an attacker would."""
    privacy: PrivacyConfig = PrivacyConfig()
    """What is known of the run's differential privacy: `{delta: 1e-5}`, a claim with `epsilon`, or `sampling_rate` and `steps`, from which an
    accountant computes the epsilon of each defence that adds noise. The audit repeats an epsilon and does not confirm it."""
    canaries: CanariesConfig | None = None
    """Invented records with secrets, which `leakaudit.with_canaries` puts into the training data, to see whether they come back: `{this_run_is_an_audit:
    true, template: "patient {digits:8}", rate: 0.01}`. Null: none. They change the trained model, so a run must be marked as made for an audit."""
    defense: Plugin | None = None
    """Defence that the callback applies to the update which training uses, such as `gaussian-noise(scale=0.1)`: the gradients change right before
    each step of the optimizer. It is declared as `shipped_defense`. A training that cannot apply it ends with an error."""
    server: Plugin | None = None
    """An active server, such as `wide-pooler(activation=selu)`. Each client step is then computed again on the model that this server
    would have sent. Without it the audit is about an eavesdropper or an honest server. One audit never mixes the two."""
    budget_s: Annotated[FiniteFloat, Field(gt=0, le=MAX_SECONDS)] = 60.0
    """Most seconds for one attack on one step under one defence."""
    attack_recovered_steps: bool = False
    """Run every attack on every step. By default attacks on texts are left out, as `not needed`, where an earlier one has recovered every text of
    the step. A comparison of attacks needs them all; a verdict does not."""
    adaptive: bool = True
    """Whether attacks know the declared defences, as an adversary does who reads the protocol. `false` shows what an attack from the literature
    reads that ignores them. It is for comparison only: what such an attack misses is no evidence."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Seed of the attacks. The same seed on the same steps gives the same results."""
    min_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 8
    """Fewest tokens of a text that counts as a sentence in the events `exact_sentence`, `most_words` and `in_reach`."""
    sentence_model: Path | None = None
    """Folder of a sentence encoder; it adds the score `semantic_similarity`. It is never the model under attack."""
    entity_tagger: str | None = None
    """A spaCy pipeline that finds named entities: the name of an installed one, such as en_core_web_sm, or its folder. It adds the score
    `nerr_f1`, and `nerr` where the data names no entities. It needs the extra `entities`."""
    controls: Count = 3
    """Control steps in the whole audit, at most one for each snapshot. A control step is an undefended step with known text, which must be
    recovered. Its reconstruction is also scored against the real batch, and the two must not match. With 29 control steps or more the gate
    compares confidence bounds instead of plain shares."""
    text: TextMode = TextMode.MASKED
    """How much of the private text the report may show: `hash`, `masked` or `full`."""
    allow_full: bool = False
    """Allows `text: full`, which writes training text to disk."""
    keep_snapshots: bool = False
    """Keep snapshots in the spool after their audit. They hold the private batch."""
    conformance: bool = True
    """Whether the noise of a run that declares differential privacy is compared with what its accountant assumes. It computes the gradient of
    every example of a kept step twice, in the side process."""
    membership: MembershipConfig | None = None
    """Whether each kept step is also asked which texts were in it: `{nonmembers: held_back.jsonl}` names a file of texts of the same source that
    the training does not use. Null: it is not asked. The gradient of about 200 texts is computed on each kept step, in the side process."""
    check: Annotated[Literal["rebuilt"], WrapValidator(_only_rebuilt)] = "rebuilt"
    """Where a kept step is computed again, to verify that its update comes from its batch. `rebuilt`, the only value: in the side process, on
    the model that the attacks get."""
    policy: Path | None = None
    """YAML policy of the gate. Default: the built-in policy."""
    artifacts: Annotated[tuple[Path, ...], Field(max_length=MAX_PLUGINS)] = ()
    """Files that the run makes and that are released, or folders of them. The results name them with their digests, as they are when the results
    are written, and `leakaudit gate --artifact` compares. A file that is written later is named by `leakaudit bind`."""
    data_name: Annotated[str, Field(pattern=DATA_NAME)] = ""
    """Name of the data set, which results and verdict show. No digest of the data is kept: whoever guesses a text could confirm it."""
    data_invented: bool = False
    """Whether all texts were invented, for a demonstration or a test, and are nobody's. A report with text (`text: full`) then says that its text is
    invented and not that it is real. Nothing else changes."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """Device of the side process: `cpu`, `cuda`, `cuda:1` and so on. `auto` takes an idle GPU other than the trainer's, else the trainer's GPU
    if it has room, else the CPU."""
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    """CPU threads of the side process."""
    pass_environment: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Names of environment variables that the side process gets besides those that computing needs, for a function of yours that builds the
    model from them. Their values are in no file. A credential that you name here is handed over."""
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Niceness of the side process: at 19 every other process has priority over it."""
    schedule: Literal["beside", "deferred", "inline"] = "beside"
    """When steps are attacked. `beside`: during training, in a side process. `deferred`: after training. `inline`: in the training process,
    which waits; for models that no other process can rebuild."""
    at_end: Literal["wait", "detach", "leave"] = "wait"
    """What happens at the end of training to steps that are not audited yet. `wait`: training waits for the side process. `detach`: the side
    process continues alone. `leave`: they stay for `leakaudit worker`, on this machine or another."""
    stop_on: Literal["critical"] | None = None
    """What ends the training early. `critical`: a leak that a rule of the policy with `severity: critical` and `max_count: 0` forbids at level
    error; training then stops at the next step boundary in the way of its framework. Null: nothing does."""
    wait_at_end_s: Annotated[FiniteFloat, Field(ge=0, le=MAX_SECONDS)] = 600.0
    """Most seconds that the end of training waits for the side process."""
    keep: Literal["auto", "all"] = "auto"
    """Which parts of a step are kept. `all`: everything. `auto`: everything of a step of up to 1 GB; of a larger step only what attacks on the
    first blocks read. Attacks that need the rest are then not applicable, and the results say so."""
    max_spool_gb: Annotated[FiniteFloat, Field(gt=0, le=MAX_GIGABYTES)] = 20.0
    """Most disk space of kept steps that wait for their attacks, in units of 10^9 bytes. A step that does not fit is not kept; the last line
    of training says how many were not."""
    retention_days: Annotated[FiniteFloat, Field(gt=0, le=MAX_DAYS)] = 7.0
    """Age in days at which kept snapshots are removed by the next command or run in their folder. `leakaudit snapshots hold` exempts a
    snapshot."""
    encrypt_to: tuple[Annotated[str, Field(pattern=r"^age1[0-9a-z]+$")], ...] = ()
    """Public keys (age format) that snapshots are encrypted to. After the run only the private keys open them. Needs the extra
    `leakaudit[encrypt]`."""

    @model_validator(mode="after")
    def _rounds_are_counted(self) -> AuditConfig:
        if self.rounds is not None and self.unit != "round":
            raise ValueError("`rounds` counts rounds, and this audit counts steps: set `unit: round` as well")
        if self.sent_elsewhere and (self.unit != "round" or self.encrypt_to):
            raise ValueError("`sent_elsewhere` needs `unit: round`, and no `encrypt_to`: the other process has no key")
        if self.unit == "round" and self.schedule == "inline":
            raise ValueError("`unit: round` attacks in a side process: set `schedule` to beside or deferred")
        return self

    @model_validator(mode="after")
    def _attacks_run_in_time_to_stop(self) -> AuditConfig:
        if self.stop_on is not None and self.unit == "round":
            raise ValueError(
                "`stop_on` ends a training between two steps, and this audit counts rounds: use `judge_round` instead"
            )
        if self.stop_on is not None and self.schedule == "deferred":
            raise ValueError("`stop_on` needs attacks during training: set `schedule` to beside or inline")
        return self

    @model_validator(mode="after")
    def _one_defense_is_shipped(self) -> AuditConfig:
        if self.defense is not None and self.shipped_defense not in (NONE, self.defense):
            raise ValueError(
                "`defense` is applied by the callback, `shipped_defense` by your own code: set one of the two keys"
            )
        return self

    @model_validator(mode="after")
    def _full_text_is_asked_for_twice(self) -> AuditConfig:
        if self.text is TextMode.FULL and not self.allow_full:
            raise ValueError("`text: full` writes private training text to disk: set `allow_full: true` as well")
        return self


def load_config(source: Path | str | AuditConfig) -> AuditConfig:
    """Return the configuration of a YAML file, or the object itself.

    A relative path of a policy or an artefact counts from the folder of the file.

    Raises:
        ConfigError: the file is missing or wrong; the message names every problem with file, line and key.
    """
    if isinstance(source, AuditConfig):
        return source
    from leakaudit.config.strict_yaml import read_yaml

    path = Path(source)
    config: AuditConfig = read_yaml(path, AuditConfig)
    places: dict[str, Any] = {}
    if config.artifacts:
        places["artifacts"] = tuple(path.parent / file for file in config.artifacts)
    if config.policy is not None:
        places["policy"] = path.parent / config.policy
    if config.membership is not None:
        held_back = path.parent / config.membership.nonmembers
        places["membership"] = config.membership.model_copy(update={"nonmembers": held_back})
    return config.model_copy(update=places)


def in_a_night() -> bool:
    """Return whether a night runs this training, and attacks its steps later."""
    return bool(os.environ.get(NIGHT_VARIABLE))


def for_tonight(config: AuditConfig) -> AuditConfig:
    """Return the configuration for a training that a night runs, else the same.

    The steps are kept in the folder of the night, which attacks them when the training has ended.
    """
    if not (folder := os.environ.get(NIGHT_VARIABLE)):
        return config
    tonight = {"out_dir": Path(folder), "schedule": "deferred", "at_end": "leave", "keep_snapshots": True}
    return config.model_copy(update=tonight)
