"""No forged transmission leaves an NVFlare client, and clean ones do.

A real side process judges every one. The forgeries are judged as if no attack ever found anything, so that each is blocked because the
audited update does not explain it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leakaudit.callbacks.rounds import finish
from tests.support.nvflare_stand_in import stand_in
from tests.support.transmissions import NOISE, OTHER, Site, Trained, Weights, dxo, whatever_is_explained, with_adapters

TEXT = "the old dog chased a cat ."
ADAPTERS = "adapters"
"""Name of the client that trains LoRA."""
SECRET = base64.b64encode(TEXT.encode()).decode()
BITS = np.unpackbits(np.frombuffer(TEXT.encode(), dtype=np.uint8))


pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module", params=["in-process", pytest.param("external", marks=pytest.mark.integrations)])
def sites(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Site]]:
    """Return one client for each declared defence, with one worker each.

    The filter finds its rounds in its own process, or on the disk only.
    """
    opened: dict[str, Site] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)

        def site(declared: str) -> Site:
            if declared not in opened:
                make = with_adapters if declared == ADAPTERS else None
                opened[declared] = Site(
                    tmp_path_factory.mktemp("site"),
                    declared.removeprefix(ADAPTERS),
                    make,
                    elsewhere=request.param == "external",
                )
            return opened[declared]

        yield site
        for one in opened.values():
            one.left()
        finish()


def payload(like: Tensor) -> Tensor:
    """Return the bits of the text, repeated to the shape of a tensor."""
    return torch.as_tensor(np.resize(BITS, tuple(like.shape)).astype(np.int32))


def low_bits(weights: Weights, names: Any) -> Weights:
    """Write the text into the last bit of each trained weight."""
    return {n: with_last_bit(w) if n in names else w for n, w in weights.items()}


def with_last_bit(w: Tensor) -> Tensor:
    whole = {4: torch.int32, 2: torch.int16}[w.element_size()]
    written: Tensor = ((w.contiguous().view(whole) & ~1) | payload(w).to(whole)).view(w.dtype)
    return written


def as_weights(change: Callable[[Trained], dict[str, Any]]) -> Callable[[Trained], Any]:
    return lambda r: dxo(change(r))


def as_differences(change: Callable[[Trained], Weights]) -> Callable[[Trained], Any]:
    return lambda r: dxo(change(r), kind="WEIGHT_DIFF")


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    return {n: w.to(dtype) for n, w in weights.items()}


def permuted(r: Trained) -> Weights:
    """Exchange two hidden units, which no output of the model shows."""
    up = next(n for n in r.names if "intermediate.dense.weight" in n)
    bias, down = up.replace("weight", "bias"), up.replace("intermediate", "output")
    order = torch.randperm(r.after[up].shape[0], generator=r.generator)
    return {**r.after, up: r.after[up][order], bias: r.after[bias][order], down: r.after[down][:, order]}


def quantized(r: Trained, bits: int) -> Weights:
    """Round each difference to one of a few levels, at random."""
    steps, rng = 2 ** (bits - 1) - 1, r.generator

    def level(d: Tensor) -> Tensor:
        largest = d.abs().max()
        if not largest > 0:
            return d
        chosen = (d / largest * steps + torch.rand(d.shape, generator=rng)).floor().clamp(-steps, steps)
        sent: Tensor = chosen * (largest / steps)
        return sent

    return {n: level(d) for n, d in r.changed().items()}


def pruned(r: Trained, share: float) -> Weights:
    every = torch.cat([d.abs().flatten() for d in r.changed().values()])
    least = every.kthvalue(int(share * len(every))).values
    return {n: d * (d.abs() > least) for n, d in r.changed().items()}


def clipped(r: Trained, norm: float, sigma: float = 0.0) -> Weights:
    factor = min(1.0, norm / float(torch.cat([d.flatten() for d in r.changed().values()]).norm()))
    rng = r.generator
    return {n: factor * d + sigma * torch.randn(d.shape, generator=rng) for n, d in r.changed().items()}


def other_batch(r: Trained) -> Weights:
    return r.one_more_step(OTHER, anew=True)


def as_noise(r: Trained, hidden: Weights) -> Weights:
    """Add something else than noise, as large as the declared noise."""
    every = torch.cat([h.flatten() for h in hidden.values()])
    factor = NOISE * r.rms() / float(every.std())
    return r.having({n: d + factor * hidden[n] for n, d in r.changed().items()})


def spikes(r: Trained) -> Weights:
    """Return the text as large entries, one in eight."""
    return {
        n: (payload(d) * 2.0 - 1) * (torch.rand(d.shape, generator=r.generator) < 0.125) for n, d in r.changed().items()
    }


def in_one_tensor(r: Trained) -> Weights:
    return {n: torch.randn(d.shape, generator=r.generator) * (n == r.first) for n, d in r.changed().items()}


def changed_by(r: Trained, other: Weights) -> Weights:
    return {n: other[n] - r.before[n] for n in r.names}


def moved(r: Trained, by: float) -> Weights:
    """Return weights of which one entry carries a number."""
    one = r.after[r.first].clone()
    one.view(-1)[5] += by
    return {**r.after, r.first: one}


PLAIN: dict[str, Callable[[Trained], Any]] = {
    "extra tensor": lambda r: dxo({**r.after, "control": r.changed()[r.first]}),
    "renamed keys": lambda r: dxo({f"x.{n}": w for n, w in r.after.items()}),
    "alias with another value": lambda r: dxo({**r.after, f"module.{r.first}": r.before[r.first]}),
    "raw difference in meta": lambda r: dxo(r.after, meta={"SCAFFOLD_CTRL_DIFF": r.changed()}),
    "text in meta": lambda r: dxo(r.after, meta={"note": TEXT}),
    "base64 as a key of meta": lambda r: dxo(r.after, meta={SECRET: 1}),
    "tensor in a header": lambda r: dxo(r.after, headers={"control": r.changed()[r.first]}),
    "cookie": lambda r: dxo(r.after, headers={"__cookie_jar__": {"a": SECRET}}),
    "props beside the DXO": lambda r: dxo(r.after, props={"raw": r.changed()[r.first]}),
    "bytes for a tensor": lambda r: dxo({**r.after, r.first: r.after[r.first].numpy().tobytes()}),
    "string for a tensor": lambda r: dxo({**r.after, r.first: SECRET}),
    "nested DXOs": lambda r: dxo({"a": dxo(r.after)["DXO"], "b": dxo(r.changed())["DXO"]}, kind="COLLECTION"),
    "weights among metrics": lambda r: dxo({"loss": r.after[r.first]}, kind="METRICS"),
    "float64 with a text in the low digits": as_weights(
        lambda r: {n: w.double() * (1 + 1e-12 * payload(w).double()) for n, w in r.after.items()}
    ),
    "float32 with a text in the last bits": as_weights(lambda r: low_bits(r.after, r.names)),
    "float16 with a text in the last bits": as_weights(lambda r: low_bits(cast(r.after, torch.float16), r.names)),
    "bfloat16 with a text in the last bits": as_weights(lambda r: low_bits(cast(r.after, torch.bfloat16), r.names)),
    "differences with a text in the last bits": as_differences(lambda r: low_bits(r.changed(), r.names)),
    "float16 differences with a text in the last bits": as_differences(
        lambda r: low_bits(cast(r.changed(), torch.float16), r.names)
    ),
    "text where the update is zero": as_weights(
        lambda r: r.mapped(lambda d: torch.where(d == 0, 1e-9 * payload(d).float(), d))
    ),
    "text as tiny differences": as_differences(
        lambda r: {n: torch.where(d == 0, 1e-9 * payload(d).float(), d) for n, d in r.changed().items()}
    ),
    "signs of zeros that a type keeps": as_weights(
        lambda r: {**r.after, r.first: r.after[r.first].to(torch.float16) + 1e-7 * payload(r.after[r.first])}
    ),
    "int8": as_weights(lambda r: {n: (w * 100).to(torch.int8) for n, w in r.after.items()}),
    "four bits packed in uint8": lambda r: dxo({n: (w * 8).to(torch.uint8).flatten()[::2] for n, w in r.after.items()}),
    "int8 without a declaration": as_differences(lambda r: quantized(r, 8)),
    "undefined numbers": as_weights(lambda r: {**r.after, r.first: r.after[r.first] * float("nan")}),
    "text in the payload of undefined numbers": as_weights(
        lambda r: {**r.after, r.first: (payload(r.after[r.first]) + 0x7FC00000).view(torch.float32)}
    ),
    "infinity": lambda r: dxo(moved(r, float("inf"))),
    "huge number": lambda r: dxo(moved(r, 3e38)),
    "one number moved": lambda r: dxo(moved(r, 0.125)),
    "one number moved a little": lambda r: dxo(moved(r, 1e-5)),
    "huge single number in meta": lambda r: dxo(
        r.after, meta={"NUM_STEPS_CURRENT_ROUND": int.from_bytes(TEXT.encode())}
    ),
    "update of another batch": lambda r: dxo(other_batch(r)),
    "differences of another batch": as_differences(lambda r: changed_by(r, other_batch(r))),
    "weights of the last round": lambda r: dxo(dict(r.last or {})),
    "both batches in sum": as_differences(
        lambda r: {n: d + changed_by(r, other_batch(r))[n] for n, d in r.changed().items()}
    ),
    "one step more than audited": lambda r: dxo(r.one_more_step(OTHER, anew=False)),
    "the same step once more": lambda r: dxo(r.one_more_step(TEXT, anew=False)),
    "frozen layer that was trained": as_weights(lambda r: {n: w + 1e-3 * ("pooler" in n) for n, w in r.after.items()}),
    "layer that the model does not have": lambda r: dxo(
        {**r.after, "bert.encoder.layer.2.output.dense.weight": r.after[r.first]}
    ),
    "batch statistics that moved": as_weights(lambda r: {**r.after, "running_mean": torch.tensor([3.0, 1.0, 4.0])}),
    "sparse tensor": as_weights(lambda r: {**r.after, r.first: r.after[r.first].to_sparse()}),
    "another shape": as_weights(lambda r: {**r.after, r.first: r.after[r.first].t().contiguous()}),
    "permuted units": as_weights(permuted),
    "rows in another order": as_weights(lambda r: {**r.after, r.first: r.after[r.first].flip(0)}),
    "negated update": as_weights(lambda r: r.mapped(lambda d: -d)),
    "factor for each tensor": as_weights(
        lambda r: r.having({n: (1 + 0.1 * i) * d for i, (n, d) in enumerate(r.changed().items())})
    ),
    "one tensor scaled": as_weights(lambda r: r.having({**r.changed(), r.first: 3 * r.changed()[r.first]})),
    "noise that nobody declared": lambda r: dxo(r.with_noise(NOISE)),
    "pruned without a declaration": as_differences(lambda r: pruned(r, 0.9)),
    "clipped by value": as_differences(lambda r: {n: d.clamp(-1e-4, 1e-4) for n, d in r.changed().items()}),
    "complex": as_weights(lambda r: {**r.after, r.first: torch.complex(r.after[r.first], r.after[r.first])}),
}
"""Name -> a forged transmission of a client that declares no defence."""

DECLARED: dict[str, tuple[str, Callable[[Trained], Any]]] = {
    "undefended update": ("gaussian-noise(scale=20)", lambda r: dxo(r.after)),
    "a tenth of the noise": ("gaussian-noise(scale=20)", lambda r: dxo(r.with_noise(NOISE / 10))),
    "noise on one tensor": (
        "gaussian-noise(scale=20)",
        lambda r: dxo({**r.after, r.first: r.with_noise(NOISE)[r.first]}),
    ),
    "another batch with noise": (
        "gaussian-noise(scale=20)",
        as_weights(
            lambda r: {**r.after, **{n: r.with_noise(NOISE)[n] + other_batch(r)[n] - r.after[n] for n in r.names}}
        ),
    ),
    "another batch as noise": (
        "gaussian-noise(scale=20)",
        as_weights(lambda r: as_noise(r, changed_by(r, other_batch(r)))),
    ),
    "text as noise": ("gaussian-noise(scale=20)", as_weights(lambda r: as_noise(r, spikes(r)))),
    "signs of a text as noise": (
        "gaussian-noise(scale=20)",
        as_weights(lambda r: as_noise(r, {n: payload(d) * 2.0 - 1 for n, d in r.changed().items()})),
    ),
    "all noise in one tensor": ("gaussian-noise(scale=20)", as_weights(lambda r: as_noise(r, in_one_tensor(r)))),
    "weights of the last round with noise": (
        "gaussian-noise(scale=20)",
        lambda r: dxo({n: w + r.with_noise(NOISE)[n] - r.after[n] for n, w in (r.last or {}).items()}),
    ),
    "noise and a huge number": (
        "gaussian-noise(scale=20)",
        as_weights(
            lambda r: {
                **(w := r.with_noise(NOISE)),
                r.first: w[r.first]
                + 60 * NOISE * r.rms() * (torch.arange(w[r.first].numel()).view_as(w[r.first]) == 7),
            }
        ),
    ),
    "pruned to another share": ("prune(share=0.9)", as_differences(lambda r: pruned(r, 0.5))),
    "pruned to the bits of a text": (
        "prune(share=0.9)",
        as_differences(lambda r: {n: d * payload(d) for n, d in r.changed().items()}),
    ),
    "pruned, with a text in the last bits": (
        "prune(share=0.9)",
        as_differences(lambda r: {n: torch.where(d != 0, with_last_bit(d), d) for n, d in pruned(r, 0.9).items()}),
    ),
    "not clipped": ("clip-noise(bound=0.01)", lambda r: dxo(r.after)),
    "clipped, and a text": (
        "clip-noise(bound=0.01)",
        as_differences(lambda r: {n: d * (1 + 1e-5 * payload(d)) for n, d in clipped(r, 0.01).items()}),
    ),
    "not pruned": ("prune(share=0.9)", as_differences(lambda r: r.changed())),
    "int8 levels that spell a text": (
        "quantize(bits=8)",
        as_differences(lambda r: {n: spelled(d) for n, d in r.changed().items()}),
    ),
    "int8 with two bits": ("quantize(bits=8)", as_differences(lambda r: quantized(r, 2))),
}
"""Name -> the declared defence, and a forged transmission that pretends to have it."""


def spelled(d: Tensor) -> Tensor:
    """Round a difference to a neighbouring level, up where a bit of the text is 1."""
    level = d.abs().max() / 127
    if not level > 0:
        return d
    sent: Tensor = ((d / level).floor() + payload(d)).clamp(-127, 127) * level
    return sent


def cases(table: dict[str, Any], *quick: str) -> list[Any]:
    """Return the names of a table; all but some run with `make integrations`."""
    assert set(quick) <= set(table)
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.integrations) for kind in table]


UNSEEN = list(PLAIN)[: list(PLAIN).index("float32 with a text in the last bits")]
"""Forgeries that are refused before anything is attacked."""


@pytest.mark.parametrize(
    "kind",
    cases(
        PLAIN,
        *UNSEEN,
        "infinity",
        "sparse tensor",
        "another shape",
        "complex",
        "batch statistics that moved",
        "float32 with a text in the last bits",
        "frozen layer that was trained",
        "layer that the model does not have",
        "update of another batch",
        "weights of the last round",
    ),
)
def test_what_the_audited_update_does_not_explain_is_blocked(
    kind: str, sites: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a client that declares no defence."""
    whatever_is_explained(monkeypatch)
    site = sites("")
    if "last round" in kind:
        site.trained()
    gone, why = site.answer(PLAIN[kind](site.trained()))
    assert gone is None
    assert TEXT not in why and SECRET not in why and "not finished" not in why


@pytest.mark.parametrize("kind", cases(DECLARED, "undefended update", "another batch as noise", "text as noise"))
def test_what_is_not_as_declared_is_blocked(
    kind: str, sites: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a client that declares a defence."""
    whatever_is_explained(monkeypatch)
    declared, forged = DECLARED[kind]
    site = sites(declared)
    if "last round" in kind:
        site.trained()
    gone, why = site.answer(forged(site.trained()))
    assert gone is None
    assert "not finished" not in why


NOISY = "gaussian-noise(scale=20)"

CLEAN: dict[str, tuple[str, Callable[[Trained], Any]]] = {
    "noise on the weights": (NOISY, lambda r: dxo(r.with_noise(NOISE))),
    "the next round with noise": (NOISY, lambda r: dxo(r.with_noise(NOISE))),
    "noise on the differences": (NOISY, as_differences(lambda r: r.noised())),
    "noise in float16": (NOISY, as_weights(lambda r: cast(r.with_noise(NOISE), torch.float16))),
    "noise in bfloat16": (NOISY, as_weights(lambda r: cast(r.with_noise(NOISE), torch.bfloat16))),
    "noise on a part": (NOISY, lambda r: dxo(part_with_noise(r))),
    "noise as NumPy arrays": (NOISY, as_weights(lambda r: {n: w.numpy() for n, w in r.with_noise(NOISE).items()})),
    "Laplace noise": ("laplace-noise(scale=20)", lambda r: dxo(with_laplace(r))),
    "clip and noise": ("clip-noise(bound=0.1, sigma=0.02)", as_differences(lambda r: clipped(r, 0.1, 0.02))),
}
"""Name -> the declared defence, and a transmission from which nothing came back."""

EXPLAINED: dict[str, tuple[str, Callable[[Trained], Any]]] = {
    "weights": ("", lambda r: dxo(r.after)),
    "the next round": ("", lambda r: dxo(r.after)),
    "differences": ("", as_differences(lambda r: r.changed())),
    "a part of the trained parameters": ("", as_weights(lambda r: {n: r.after[n] for n in r.names[3:]})),
    "float16": ("", as_weights(lambda r: cast(r.after, torch.float16))),
    "bfloat16": ("", as_weights(lambda r: cast(r.after, torch.bfloat16))),
    "float16 differences": ("", as_differences(lambda r: cast(r.changed(), torch.float16))),
    "float64 with the digits of float32": ("", as_weights(lambda r: cast(r.after, torch.float64))),
    "a factor for the whole update": ("", as_differences(lambda r: {n: 5 * d for n, d in r.changed().items()})),
    "clipped": ("clip-noise(bound=0.01)", as_differences(lambda r: clipped(r, 0.01))),
    "clipped weights": ("clip-noise(bound=0.01)", lambda r: dxo(r.having(clipped(r, 0.01)))),
    "a norm that does not clip": ("clip-noise(bound=100)", lambda r: dxo(r.after)),
    "pruned": ("prune(share=0.9)", as_differences(lambda r: pruned(r, 0.9))),
    "int8 levels": ("quantize(bits=8)", as_differences(lambda r: quantized(r, 8))),
    "LoRA": (ADAPTERS, as_weights(lambda r: {n: w for n, w in r.after.items() if "lora_" in n})),
}
"""Name -> the declared defence, and a transmission that the audited update explains."""


def part_with_noise(r: Trained) -> Weights:
    """Return the weights of the encoder with the noise that is declared."""
    part = {n: d for n, d in r.changed().items() if "encoder" in n}
    size = float(torch.cat([d.flatten() for d in part.values()]).square().mean().sqrt())
    rng = r.generator
    return {n: r.after[n] + NOISE * size * torch.randn(d.shape, generator=rng) for n, d in part.items()}


def with_laplace(r: Trained) -> Weights:
    """Add Laplace noise of the declared strength."""
    rng, sigma = np.random.default_rng(r.number), NOISE * r.rms()
    return r.mapped(lambda d: d + torch.as_tensor(rng.laplace(0, sigma / 2**0.5, tuple(d.shape))).float())


@pytest.mark.parametrize("kind", cases(CLEAN, "noise on the weights", "the next round with noise"))
def test_what_reveals_nothing_leaves(kind: str, sites: Callable[[str], Site]) -> None:
    """By the built-in policy, after the attacks."""
    declared, made = CLEAN[kind]
    site = sites(declared)
    given = made(site.trained())
    gone, why = site.answer(given)
    assert gone is not None, why
    for name, value in given["DXO"]["data"].items():
        assert bool((torch.as_tensor(gone["DXO"]["data"][name]) == torch.as_tensor(value)).all())


@pytest.mark.parametrize("kind", cases(EXPLAINED, "weights", "float16"))
def test_what_the_audited_update_explains_is_not_blocked_for_that(
    kind: str, sites: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the attacks find nothing."""
    whatever_is_explained(monkeypatch)
    declared, made = EXPLAINED[kind]
    site = sites(declared)
    gone, why = site.answer(made(site.trained()))
    assert gone is not None, why


def test_a_plain_update_that_leaks_is_blocked(sites: Callable[[str], Site]) -> None:
    """It is explained, and the attacks read its text."""
    site = sites("")
    gone, why = site.answer(dxo(site.trained().after))
    assert gone is None and "FAIL" in why
