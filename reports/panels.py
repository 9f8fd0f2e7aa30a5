"""Panels of loss and learning rate below a picture of steps, from 0."""

from __future__ import annotations

from collections.abc import Sequence

from leakaudit.reports.svg import BAND, HAIRLINE, MUTED, hairline, line, middle_text, polyline, symbol

PANEL_ROOM = 66
"""Height of one panel, in pixels."""

Places = Sequence[tuple[float, float, float] | None]
"""(x, least, largest) of each step or column; None where there is no number, at which the line breaks."""


def panels(parts: Sequence[tuple[str, Places]], width: float, y: float) -> tuple[str, float]:
    """Draw panels below each other.

    Args:
        parts: name and places of each panel; one without a number is left out.
        width: of the axis, in pixels.
        y: upper end of the first, in pixels.

    Returns:
        Elements, and their height in pixels.
    """
    drawn, height = "", 0.0
    for name, places in parts:
        if any(places):
            drawn += panel(name, places, width, y + height)
            height += PANEL_ROOM
    return drawn, height


def panel(name: str, places: Places, width: float, y: float) -> str:
    """Draw one number over the steps, on an axis from 0.

    Args:
        name: of the number; each word is a line of its own.
        places: where it stands.
        width: of the axis, in pixels.
        y: upper end, in pixels.
    """
    top, tall = y + 8, PANEL_ROOM - 16
    most = max((one[2] for one in places if one), default=0.0) or 1.0

    def at(value: float) -> float:
        return top + tall * (1 - max(0.0, value) / most)

    drawn = [hairline((0, top), (width, top), HAIRLINE), hairline((0, top + tall), (width, top + tall), BAND)]
    drawn += [middle_text(f"{most:.3g}", (-7, top), "end", MUTED), middle_text("0", (-7, top + tall), "end", MUTED)]
    words = name.split(" ")
    for turn, word in enumerate(words):
        row = top + tall / 2 + 16 * (turn - (len(words) - 1) / 2)
        drawn.append(middle_text(word, (-68, row), "end", MUTED))
    joined: list[list[tuple[float, float]]] = [[]]
    for one in places:
        if one is None:
            joined.append([])
            continue
        x, least, largest = one
        if largest > least:
            drawn.append(line((x, at(largest)), (x, at(least)), BAND, 4))
        joined[-1].append((x, at(largest)))
    drawn += [polyline(part, MUTED) for part in joined if len(part) > 1]
    drawn += [symbol("circle", 20, part[0], fill=MUTED) for part in joined if len(part) == 1]
    return "".join(drawn)
