"""The differences between the code of a client's model and of a rebuilt one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from leakaudit.models.code_marks import ACCOUNTED, CodeMarks, code_marks, kind_of, named_layers, pattern_of
from leakaudit.models.quantised_layers import stands_in

NAMED = 3
"""Most differences that are said in words."""


FORWARD = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})
"""Functions of a class that compute its outputs."""


def code_differences(client: CodeMarks, model: nn.Module) -> tuple[str, ...]:
    """Return what the client's model ran and a rebuilt one does not run.

    The result is in words, the most relevant difference first. It is empty if nothing is known of the client's code.

    Args:
        client: the marks of the client's process.
        model: the rebuilt model, in this process.
    """
    if not client.layers:
        return ()
    here = code_marks(model)
    found = [*_layers(client, model), *_own(client, here)]
    versions = list(_versions(client, here))
    if not versions:  # digests of another version differ everywhere
        found += [words for _, words in sorted(_functions(client, here), key=lambda one: one[0])]
    return tuple(dict.fromkeys(versions + found))


def in_words(differences: tuple[str, ...]) -> str:
    """Return a sentence on differences of code; empty if there are none."""
    if not differences:
        return ""
    left = len(differences) - NAMED
    more = f", and {left} more" if left > 0 else ""
    return (
        f"the client ran other code than the model that attacks get: {'; '.join(differences[:NAMED])}{more}: say how the model is "
        "made with `rebuilt_by`"
    )


def _versions(client: CodeMarks, here: CodeMarks) -> Iterator[str]:
    for what, version in client.versions.items():
        now = here.versions.get(what, version)
        if now != version:
            yield f"{what} {version} instead of {now}"


def _layers(client: CodeMarks, model: nn.Module) -> Iterator[str]:
    """Yield the layers that are of another class."""
    swapped: dict[tuple[str, str], list[str]] = {}
    for name, layer in named_layers(model):
        if stands_in(layer):
            continue  # the recipe says so
        now = kind_of(layer)
        was = client.layers.get(name) or client.layers.get(pattern_of(name))
        if was is not None and not _alike(was, now):
            swapped.setdefault((was, now), []).append(name)
    for (was, now), names in swapped.items():
        one, other = was.rpartition(":")[2], now.rpartition(":")[2]
        if one == other:
            one, other = was, now
        what = f"the layer {names[0]!r}" if names[0] else "the model"
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        yield f"{what}{more} is a {one} instead of {other}"


def _alike(one: str, other: str) -> bool:
    """Return whether two classes are the same one; a script's module has two names."""
    return one == other or (
        "__main__" in (one.partition(":")[0], other.partition(":")[0])
        and one.partition(":")[2] == other.partition(":")[2]
    )


def _own(client: CodeMarks, here: CodeMarks) -> Iterator[str]:
    """Yield hooks and the like that only the client's model has.

    Those of the model itself are first.
    """
    for what, names in sorted(client.own.items(), key=lambda one: "" not in one[1]):
        extra = [name for name in names if name not in here.own.get(what, ())]
        if not extra:
            continue
        first, more = extra[0], f" and {len(extra) - 1} more layers" if len(extra) > 1 else ""
        where = "" if "on all modules" in what else f" on {first!r}{more}" if first else f" on the model itself{more}"
        yield f"{what}{where}"


def _functions(client: CodeMarks, here: CodeMarks) -> Iterator[tuple[int, str]]:
    """Yield a rank and words for each function that differs."""
    for place, now in here.functions.items():
        kind, _, name = place.partition(" ")
        was = next((found for other, found in client.functions.items() if _same_place(other, place)), None)
        if was is None:
            continue
        for key in dict.fromkeys([*now, *was]):
            if was.get(key) == now.get(key):
                continue
            home = was.get(key, "").partition(" ")[2]
            if key not in now and (_by_a_library(home) and key not in FORWARD if home else kind != "class"):
                continue  # a library adds it later, and nothing that the model ran before calls it
            yield _in_words(kind, name, key, home, key in was)


def _by_a_library(home: str) -> bool:
    """Return whether a package of a known version defines a function."""
    return home.partition(".")[0] in ACCOUNTED


def _same_place(one: str, other: str) -> bool:
    return one == other or (one.startswith("class ") and other.startswith("class ") and _alike(one[6:], other[6:]))


def _in_words(kind: str, place: str, key: str, home: str, is_there: bool) -> tuple[int, str]:
    said = f" (defined in {home})" if home else ""
    if kind == "class":
        module, _, name = place.partition(":")
        rank = 0 if key in FORWARD and not module.startswith("torch.") else 1 if key in FORWARD else 4
        verb = "runs another" if is_there else "lacks its"
        return rank, f"the class {name} of {module} {verb} `{key}`{said}"
    if kind == "table":
        return 2, f"{key!r} in {place} of transformers was replaced{said}"
    return (3 if place.startswith("torch.") else 1), f"the function `{key}` of {place} was replaced{said}"
