"""The audit's configuration: YAML -> one validated tree. Below this edge functions take plain arguments."""

from __future__ import annotations

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

from leakaudit.results.schema import TextMode

DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"

MAX_PLUGINS = 1_000
"""Attacks, or defences, in one audit. Our choice: each is run on each step, and a thousand take a working day on one step."""
MAX_COUNT = 10**9
"""Of steps, snapshots, tokens, controls. Our choice: no training run takes more."""
MAX_SECONDS = 10**9
"""Of a budget or a wait: 31 years."""
MAX_DAYS = 36_500
"""Of retention: a hundred years."""
MAX_SEED = 2**32 - 1
"""Largest seed that every library takes (numpy's `seed` has 32 bits)."""
MAX_GIGABYTES = 10**6
"""Of the spool, in units of 10^9 bytes: a petabyte."""

Scalar = bool | int | FiniteFloat | str
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def _number_or_auto(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Say in one sentence what may stand there, instead of one for each kind."""
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(f"write auto, or a whole number from 1 to {MAX_COUNT}") from None


CountOrAuto = Annotated[Annotated[int, Field(ge=1, le=MAX_COUNT)] | Literal["auto"], WrapValidator(_number_or_auto)]


class PluginSpec(BaseModel):
    """A plugin by name with its knobs: `span`, or `{name: tag, steps: 300}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    options: dict[str, Scalar] = {}

    def __hash__(self) -> int:
        """Hash by name and knobs."""
        return hash((self.name, *sorted(self.options)))

    @property
    def label(self) -> str:
        """Return the name with its knobs, as shown in tables: `gaussian-noise(scale=0.1)`."""
        knobs = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({knobs})" if knobs else self.name

    @classmethod
    def parse(cls, text: str) -> PluginSpec:
        """Read `name` or `name(key=value, key=value)`; values stay strings until the plugin's types convert them."""
        name, bracket, rest = text.strip().partition("(")
        if not bracket:
            return cls(name=name)
        if not rest.endswith(")"):
            raise ValueError(f"{text!r}: expected name(key=value, ...)")
        pairs = [pair.partition("=") for pair in rest[:-1].split(",") if pair.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError(f"{text!r}: expected name(key=value, ...)")
        return cls(name=name, options={key.strip(): value.strip() for key, _, value in pairs})


def _as_spec(value: Any) -> Any:
    """Let YAML write `span`, `prune(share=0.9)` or `{name: prune, share: 0.9}`."""
    if isinstance(value, str):
        return PluginSpec.parse(value)
    if isinstance(value, dict) and "name" in value and "options" not in value:
        return {"name": value["name"], "options": {key: v for key, v in value.items() if key != "name"}}
    return value


Plugin = Annotated[PluginSpec, BeforeValidator(_as_spec)]

DEFAULT_ATTACKS = tuple(
    PluginSpec(name=name) for name in ("embedding-rows", "span", "tag", "idlg", "llg", "ilrg", "feature-labels")
)
LABEL_ATTACKS = tuple(PluginSpec(name=name) for name in ("random-labels", "idlg", "llg", "llg-star", "ilrg"))
"""What is tried where batches hold no text: all that needs neither labelled data nor a search."""

NONE = PluginSpec(name="none")


def _undefended_first(specs: tuple[PluginSpec, ...]) -> tuple[PluginSpec, ...]:
    """Put `none` first, once: every defence is compared with the update as it was sent."""
    return (NONE, *(spec for spec in dict.fromkeys(specs) if spec != NONE))


class AuditConfig(BaseModel):
    """What to audit, with what, for how long, and what may be shown.

    Every key has a default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    out_dir: Path = Path("leakaudit-audit")
    """Folder for snapshots, results and report of the latest run; made private (0700). An earlier run's move to `<out_dir>.1`..."""
    every_n_steps: CountOrAuto = "auto"
    """Optimizer steps between two kept ones. `auto` spreads the steps that the policy needs (or `max_snapshots`) over the run, at least
    10 steps apart; of a run of 20 to 99 steps it keeps 10 to 19, and all steps of a shorter one. If the run's length is unknown, the distance grows:
    steps 0, 1, 2, 4, 8, 16, 26, 36... and from step 100 on a tenth of the steps so far."""
    first_step: Count = 0
    """First optimizer step to keep, counted from 0."""
    max_snapshots: CountOrAuto = "auto"
    """Steps to keep in one training run at most. `auto`: a tenth more than the policy needs to pass (65 for the built-in one, which
    needs 59), because some turn out to be no evidence; at least 10."""
    attacks: Annotated[tuple[Plugin, ...], Field(min_length=1, max_length=MAX_PLUGINS)] = DEFAULT_ATTACKS
    defenses: Annotated[tuple[Plugin, ...], Field(max_length=MAX_PLUGINS), AfterValidator(_undefended_first)] = (NONE,)
    """What the side process tries on each snapshot; `none` is the update as it was sent and always comes first."""
    shipped_defense: Plugin = NONE
    """The defence that the training run applies by itself, as its owner declares it; attacks know it."""
    server: Plugin | None = None
    """An active server, such as `wide-pooler(activation=selu)`: every client step is computed anew on the model that it would have sent
    out. None audits what an eavesdropper or an honest server sees. The two are never mixed in one audit."""
    budget_s: Annotated[FiniteFloat, Field(gt=0, le=MAX_SECONDS)] = 60.0
    """Seconds for one attack on one step under one defence."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    min_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 8
    """Tokens a sequence must have to count as a sentence in the event `exact_sentence`."""
    sentence_model: Path | None = None
    """Folder of an encoder of sentences, never the model under attack; scores then have `semantic_similarity`, too."""
    controls: Count = 3
    """Control steps in all, at most one per snapshot: an undefended canary step that must be recovered, whose reconstruction
    is also scored against the real batch, which it must not match. 29 let the gate use bounds instead of plain shares."""
    text: TextMode = TextMode.MASKED
    """How much of the private text the report may show: hash, masked, full."""
    allow_full: bool = False
    """`text: full` writes training text to disk; it needs this, too."""
    keep_snapshots: bool = False
    """Leave snapshots in the spool after the audit. They hold the private batch."""
    check: Literal["in_place", "rebuilt"] = "in_place"
    """Where a kept step is computed again to see that its update comes from its batch: `in_place`, on the model that is trained, which
    takes one forward and backward pass more; `rebuilt`, in the side process on the model that attacks get, whatever stamp the snapshot has."""
    policy: Path | None = None
    """YAML policy of the gate; the built-in one if none is given."""
    device: Annotated[str, Field(pattern=DEVICE_PATTERN)] = "auto"
    """Where the side process computes: cpu, cuda, cuda:1... `auto` takes another GPU than the trainer's if one is idle, the
    trainer's own if there is room on it, else the CPU."""
    threads: Annotated[int, Field(ge=1, le=4096)] = 1
    """CPU threads of the side process."""
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Scheduling priority of the side process; 19 yields to everything."""
    schedule: Literal["beside", "deferred", "inline"] = "beside"
    """When steps are attacked: `beside` training in a side process; `deferred` until training is over; `inline` in the training
    process, which waits: for models that no other process can rebuild."""
    at_end: Literal["wait", "detach", "leave"] = "wait"
    """What the end of training does about steps that are not audited yet: `wait` for the side process, `detach` it so that it
    goes on alone, or `leave` them to `leakaudit worker` on this machine or another."""
    wait_at_end_s: Annotated[FiniteFloat, Field(ge=0, le=MAX_SECONDS)] = 600.0
    """How long the end of training waits for the side process to finish."""
    keep: Literal["auto", "all"] = "auto"
    """What of a step is kept. `all`: everything. `auto`: everything up to 1 GB; of a larger step what attacks on the first blocks read, and
    attacks that read everything are then not applicable. The results say so."""
    max_spool_gb: Annotated[FiniteFloat, Field(gt=0, le=MAX_GIGABYTES)] = 20.0
    """Most that kept steps may take up on the disk while they wait for their attacks, in units of 10^9 bytes. A step that does not fit
    is not kept; the last line of training says how many."""
    retention_days: Annotated[FiniteFloat, Field(gt=0, le=MAX_DAYS)] = 7.0
    """Age at which kept snapshots are removed by whatever next runs in their folder; `leakaudit snapshots hold` exempts them."""
    encrypt_to: tuple[Annotated[str, Field(pattern=r"^age1[0-9a-z]+$")], ...] = ()
    """Public keys (age format) that snapshots are encrypted to; who has none of the private keys cannot read them once the run
    is over. Needs the extra `leakaudit[encrypt]`."""

    @model_validator(mode="after")
    def _full_text_is_asked_for_twice(self) -> AuditConfig:
        if self.text is TextMode.FULL and not self.allow_full:
            raise ValueError("`text: full` writes private training text to disk: set `allow_full: true` as well")
        return self


def load_config(source: Path | str | AuditConfig) -> AuditConfig:
    """Return the configuration of a YAML file, or the object itself. Relative paths are taken from the file's folder.

    Raises:
        ConfigError: the file is missing or wrong; names file, line and key, and every problem at once.
    """
    if isinstance(source, AuditConfig):
        return source
    from leakaudit.config.strict_yaml import read_yaml

    path = Path(source)
    config: AuditConfig = read_yaml(path, AuditConfig)
    policy = config.policy
    if policy is not None and not policy.is_absolute():
        config = config.model_copy(update={"policy": path.parent / policy})
    return config
