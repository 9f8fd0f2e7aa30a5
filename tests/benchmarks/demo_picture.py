"""Writes the picture of the demo's report at the top of README.md.

    make demo
    python -m tests.benchmarks.demo_picture leakaudit-demo/undefended/report.html docs/pictures/demo_report.png

It is the first screen at 1,280 x 800 in a headless Chromium. Its colours are reduced to 256, so that the file is small.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE = (1280, 800)
COLOURS = 256
STEP = 8
"""Channels are rounded to multiples of this before colours are counted, which anti-aliased text needs."""


def screen_of(page: Path, browser: str) -> bytes:
    """Return the first screen of a local page as a PNG file."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "screen.png")
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={picture}"]
        words += [f"--window-size={SIZE[0]},{SIZE[1]}", page.resolve().as_uri()]
        subprocess.run(words, capture_output=True, check=True, timeout=300)
        return picture.read_bytes()


def pixels_of(picture: bytes) -> Pixels:
    """Return the pixels of a PNG file with 8 bits and three channels, (H, W, 3).

    Raises:
        ValueError: the file has another form.
    """
    if picture[:8] != SIGNATURE:
        raise ValueError("this is no PNG file")
    at, data, width, height = 8, b"", 0, 0
    while at < len(picture):
        size, kind = struct.unpack(">I4s", picture[at : at + 8])
        body = picture[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, *form = struct.unpack(">IIBBBBB", body)
            if form != [8, 2, 0, 0, 0]:
                raise ValueError(f"8 bits and three channels are expected, found {form}")
        data += body if kind == b"IDAT" else b""
        at += 12 + size
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 3 * width)
    found = np.zeros((height, width, 3), np.int64)
    above = np.zeros((width, 3), np.int64)
    for number, row in enumerate(rows):
        above = found[number] = _unfiltered(int(row[0]), row[1:].reshape(width, 3).astype(np.int64), above)
    return found.astype(np.uint8)


def _unfiltered(kind: int, row: NDArray[np.int64], above: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a row of pixels without its filter (PNG specification, section 9)."""
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row, axis=0) % 256
    if kind == 2:
        return (row + above) % 256
    found = np.zeros_like(row)
    left = corner = np.zeros(3, np.int64)
    for i, (own, up) in enumerate(zip(row, above, strict=True)):
        if kind == 3:
            guess = (left + up) // 2
        else:
            near = np.abs(np.stack([up - corner, left - corner, left + up - 2 * corner]))
            is_left = (near[0] <= near[1]) & (near[0] <= near[2])
            guess = np.where(is_left, left, np.where(near[1] <= near[2], up, corner))
        left, corner = (own + guess) % 256, up
        found[i] = left
    return found


def in_few_colours(pixels: Pixels) -> bytes:
    """Return pixels as a PNG file with a palette."""
    height, width, _ = pixels.shape
    rough = np.minimum(255, (pixels.astype(np.int64) + STEP // 2) // STEP * STEP).reshape(-1, 3)
    exact, own, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    frequent = exact[np.argsort(-counts)[: COLOURS // 4]]  # the page's own colours stay as they are
    others, many = np.unique(rough, axis=0, return_counts=True)
    palette = np.unique(np.concatenate([frequent, others[np.argsort(-many)[: COLOURS * 3 // 4]]]), axis=0)
    distance = ((exact[:, None].astype(np.int64) - palette[None].astype(np.int64)) ** 2).sum(axis=2)
    index = distance.argmin(axis=1)[own.reshape(-1)].astype(np.uint8).reshape(height, width)
    lines = b"".join(b"\0" + row.tobytes() for row in index)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", header), (b"PLTE", palette.astype(np.uint8).tobytes())]
    parts += [(b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def main() -> None:
    """Write the picture of a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args()
    made = in_few_colours(pixels_of(screen_of(options.page, options.browser)))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_bytes(made)
    print(f"{options.picture}: {len(made):,} bytes")


if __name__ == "__main__":
    main()
