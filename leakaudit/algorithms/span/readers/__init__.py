"""Readers of the span attack: one module for each kind of update.

A reader has two functions:

- `fits(problem: SpanProblem) -> bool` says whether the update is of its kind. It is cheap: it reads only facts and the
  span.
- `read(problem: SpanProblem) -> Reconstruction | None` returns what was recovered, or None to leave the problem to the
  next reader.

To add a reader, write a module here with these two functions and add it to `READERS` in
`leakaudit.algorithms.span.recover`, before the readers that would otherwise take its problems. A reader may import the
modules of `algorithms.span`. From another reader it may use public functions only.

- `local_steps`: a difference of weights after several steps of SGD.
- `adam_adapters`: low-rank adapters of a decoder after the first step of Adam.
- `first_adam_step`: whole layers after the first step of Adam.
- `adaptive_steps`: local steps whose difference hides the gradients; it gives words.
- `lora`: updates of low-rank adapters alone.
- `early_dropout`, `dropout`: dropout before and after the normalisation that feeds the attention.
- `decoder`, `encoder`: updates without dropout; `decoder` for causal attention, `encoder` for other attention.
- `bag_of_words`: inputs without positions; it gives words without order.
- `noisy`: any update in which no input lies exactly in the span.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
