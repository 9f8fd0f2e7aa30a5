"""The ways in which a private text could hide in a file."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote


def spellings(text: str) -> set[str]:
    """Return the ways in which `text` could hide in a file."""
    raw = text.encode()
    coded = {base64.b64encode(raw[shift:]).decode()[4:-4] for shift in range(3)} if len(raw) > 14 else set()
    return coded | {
        text,
        text.lower(),
        text[::-1],
        html.escape(text),
        "".join(f"&#{ord(char)};" for char in text),
        json.dumps(text)[1:-1],
        repr(text)[1:-1],
        quote(text),
        raw.hex(),
        ",".join(str(byte) for byte in raw),
    }
