"""Canaries: sentences for the controls, invented for this project.

They have usual lengths and common tokens. They are not text from any training data.
"""

from __future__ import annotations

CANARIES = (
    "the old lighthouse keeper wrote a short letter to his sister every morning",
    "seven green bottles stood behind the door until the garden party was over",
    "our neighbour lost a silver watch near the bridge on a cold winter evening",
    "nobody in the village remembered who had painted the station roof bright red",
    "she carried two heavy books and a small lamp across the empty market square",
    "the night train to the coast stopped twice because of snow on the line",
    "a tired fox slept under the kitchen window while the rain kept falling",
    "his uncle sold the boat last summer and bought a piano for the school",
)
