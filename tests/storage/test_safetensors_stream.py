"""The stream has the bytes that the library would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save
from torch import Tensor

from leakaudit.errors import SnapshotError
from leakaudit.storage.digests import digest_of
from leakaudit.storage.safetensors_stream import DTYPES, PIECE, TensorSink, TensorStream
from leakaudit.storage.snapshot_files import write_tensors


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Compare names, types, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and bytes(left[name].contiguous().reshape(-1).view(torch.uint8).tolist())
        == bytes(right[name].contiguous().reshape(-1).view(torch.uint8).tolist())
        for name in left
    )


shapes = st.lists(st.integers(0, 4), max_size=3)
named = st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(DTYPES, key=str)), shapes))


@settings(deadline=None, max_examples=60)
@given(named)
def test_the_library_reads_what_is_streamed(parts: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    """Every dtype, scalars, empty tensors and any name are read."""
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in parts.items()}
    stream = TensorStream(tensors)
    written = stream.readall()
    assert len(written) == stream.size
    assert same(load(written), tensors)
    assert int.from_bytes(written[:8], "little") % 8 == 0
    theirs, ours = save(tensors), written
    size = int.from_bytes(theirs[:8], "little")
    header = json.loads(theirs[8 : 8 + size])
    assert {key: header[key] for key in tensors}.keys() == json.loads(
        ours[8 : 8 + int.from_bytes(ours[:8], "little")]
    ).keys()


def test_tensors_larger_than_a_piece_and_views_come_through(tmp_path: Path) -> None:
    """Transposed and strided views are written as they look, not as they lie."""
    large = torch.arange(PIECE // 4 + 1000, dtype=torch.float32)
    tensors = {"large": large, "turned": large[:12].reshape(3, 4).T, "every other": large[:10:2]}
    name, digest = write_tensors(tmp_path / "t.safetensors", tensors)
    assert same(load_file(tmp_path / name), {key: value.contiguous() for key, value in tensors.items()})
    assert digest == digest_of(tmp_path / name)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("count", [1, 7, 8192])
def test_reading_in_bits_of_any_size_gives_the_same_bytes(count: int) -> None:
    """Encryption asks for 8 KiB at a time."""
    tensors = {"a": torch.arange(5000), "b": torch.ones(3, dtype=torch.bool)}
    whole, stream, parts = TensorStream(tensors).readall(), TensorStream(tensors), []
    while part := stream.read(count):
        parts.append(part)
    assert b"".join(parts) == whole


def test_a_type_without_a_name_is_refused() -> None:
    """By the tensor's name; nothing of it is quoted."""
    with pytest.raises(SnapshotError, match=r"tensor 'z' is of type torch\.complex64, which a snapshot cannot hold"):
        TensorStream({"z": torch.zeros(2, dtype=torch.complex64)})


def test_a_file_that_exists_or_a_link_is_not_written_through(tmp_path: Path) -> None:
    """Whoever put it there does not get the batch."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("mine", "link"):
        with pytest.raises(FileExistsError):
            write_tensors(tmp_path / name, {"a": torch.ones(1)})
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "elsewhere").exists()


def header_of(head: bytes) -> dict[str, Any]:
    return dict(json.loads(head[8:]))


@pytest.mark.parametrize("piece", [1, 7, 64, 10**6])
def test_a_sink_makes_the_tensors_of_a_stream_however_it_is_cut(piece: int) -> None:
    """In their own memory: the file is never whole in memory beside them."""
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7), "empty": torch.zeros(0, 4), "c": torch.tensor(True)}
    tensors["half"] = torch.randn(9).bfloat16()
    data = b"".join(TensorStream(tensors).pieces())
    sink = TensorSink(header_of, most=len(data))
    for start in range(0, len(data), piece):
        assert not sink.whole
        sink.write(data[start : start + piece])
    assert sink.whole
    assert same(sink.tensors, tensors)


def test_a_sink_takes_nothing_that_is_cut_short_too_long_or_larger_than_its_file() -> None:
    """A header that promises too much is refused before memory is taken."""
    data = b"".join(TensorStream({"a": torch.randn(3, 5)}).pieces())
    for cut in (data[:-1], data + b"x"):
        sink = TensorSink(header_of, most=len(data) + 1)
        sink.write(cut)
        assert not sink.whole
    lies = [
        {"a": {"dtype": "F32", "shape": [10**9, 10**3], "data_offsets": [0, 4 * 10**12]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
    ]
    for lie in lies:
        text = json.dumps(lie).encode()
        sink = TensorSink(header_of, most=1000)
        with pytest.raises(ValueError, match="offsets"):
            sink.write(len(text).to_bytes(8, "little") + text)
        assert isinstance(sink.failure, ValueError) and not sink.tensors
