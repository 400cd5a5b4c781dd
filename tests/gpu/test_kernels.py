"""holmes_comm.kernels on every library at hand against plain numpy: dtypes, shapes, odd sizes, alignments, mistakes.

The same tests run the CUDA kernels where there is a GPU. Their code on the host: tests/cpp/test_kernels.cpp.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from holmes_comm import UsageError, cuda_kernels, kernels

HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
PLACES = ["numpy", "torch", pytest.param("cuda", marks=[NEEDS_GPU, pytest.mark.gpu])]
if importlib.util.find_spec("cupy"):
    PLACES.append(pytest.param("cupy", marks=[NEEDS_GPU, pytest.mark.gpu]))
DTYPES = ["float32", "float16", "bfloat16", "float64"]
# Of tensors and bucket. From float64 to 16 bits torch rounds twice, and no kernel does it.
PAIRS = [(a, b) for a in DTYPES for b in DTYPES if not {a, b} & {"float64"} or {a, b} <= {"float32", "float64"}]
COUNTS = [0, 1, 7, 8, 9, 31, 255, 256, 1021, 8191, 8193]

pytestmark = pytest.mark.parametrize("place", PLACES)


def skip_without(place: str, *dtypes: str) -> None:
    if place in ("numpy", "cupy") and "bfloat16" in dtypes:
        pytest.skip("needs torch: numpy and cupy have no bfloat16")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 (or float64) values as `dtype` holds them, as float64."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        return values.astype(dtype).astype(np.float64)


def make(place: str, values: np.ndarray, dtype: str, offset: int = 0):
    """An array of `values` that begins `offset` elements after an aligned address."""
    padded = np.concatenate([np.zeros(offset), np.asarray(values, np.float64)])
    if place in ("torch", "cuda"):
        device = "cuda" if place == "cuda" else "cpu"
        return torch.tensor(padded, dtype=getattr(torch, dtype), device=device)[offset:]
    module = np if place == "numpy" else importlib.import_module("cupy")
    return module.asarray(padded, dtype=dtype)[offset:]


def read(array) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.double().cpu().numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array, np.float64)


def values(count: int, seed: int, dtype: str) -> np.ndarray:
    return rounded(np.random.default_rng(seed).standard_normal(count).astype(np.float32) * 3, dtype)


@pytest.mark.parametrize(("tensor_dtype", "bucket_dtype"), PAIRS)
def test_pack_and_unpack(place: str, tensor_dtype: str, bucket_dtype: str) -> None:
    skip_without(place, tensor_dtype, bucket_dtype)
    wide = "float64" if "float64" in (tensor_dtype, bucket_dtype) else "float32"
    for scale in (1.0, 0.3):
        factor = np.dtype(wide).type(scale)
        parts = [values(count, count, tensor_dtype) for count in COUNTS]
        tensors = [make(place, part, tensor_dtype, index % 3) for index, part in enumerate(parts)]
        bucket = make(place, np.full(sum(COUNTS) + 2, 7.0), bucket_dtype)
        kernels.pack(bucket[1:], tensors, scale=scale)
        wanted = np.concatenate([rounded(part.astype(wide) * factor, bucket_dtype) for part in parts])
        np.testing.assert_array_equal(read(bucket), np.concatenate([[7.0], wanted, [7.0]]))
        # Back, each to another place's size.
        offsets = list(np.cumsum([1, *COUNTS[:-1]]))
        kernels.unpack(bucket, tensors, [int(offset) for offset in offsets], scale=scale)
        for tensor, offset, count in zip(tensors, offsets, COUNTS, strict=True):
            source = read(bucket)[offset : offset + count].astype(wide) * factor
            np.testing.assert_array_equal(read(tensor), rounded(source, tensor_dtype))


@pytest.mark.parametrize("tensor_dtype", ["float32", "float16", "bfloat16"])
def test_accumulate_keeps_float32(place: str, tensor_dtype: str) -> None:
    skip_without(place, tensor_dtype)
    parts = [values(count, count, tensor_dtype) for count in COUNTS]
    bucket = make(place, np.zeros(sum(COUNTS)), "float32", 1)
    wanted = np.zeros(sum(COUNTS), np.float32)
    for step in range(3):
        tensors = [make(place, part, tensor_dtype, (index + step) % 2) for index, part in enumerate(parts)]
        kernels.accumulate(bucket, tensors, scale=0.125 + step)
        wanted = wanted + np.concatenate(parts).astype(np.float32) * np.float32(0.125 + step)
    np.testing.assert_array_equal(read(bucket), wanted.astype(np.float64))


def test_a_table_serves_many_calls(place: str) -> None:
    parts = [values(count, count, "float32") for count in COUNTS]
    tensors = [make(place, part, "float32", index % 2) for index, part in enumerate(parts)]
    bucket = make(place, np.zeros(sum(COUNTS)), "float32")
    table = kernels.Table(bucket, tensors)
    for scale in (1.0, 0.5):
        table.pack(scale=scale)
        wanted = np.concatenate(parts).astype(np.float32) * np.float32(scale)
        np.testing.assert_array_equal(read(bucket), wanted)
    table.accumulate()
    table.unpack(scale=2.0)
    wanted = (wanted + np.concatenate(parts).astype(np.float32)) * np.float32(2.0)
    np.testing.assert_array_equal(np.concatenate([read(tensor) for tensor in tensors]), wanted)
    with pytest.raises(UsageError, match="ends beyond the bucket"):
        kernels.Table(bucket, [*tensors, tensors[1]])
    with pytest.raises(UsageError, match="no tensors"):
        kernels.Table(bucket, [])


def test_many_tensors_of_any_shape(place: str) -> None:
    """More than one launch takes; nothing depends on the shape."""
    count = 300
    tensors = [make(place, np.full(6, index), "float32").reshape(2, 3) for index in range(count)]
    bucket = make(place, np.zeros(6 * count), "float32")
    kernels.pack(bucket, tensors, scale=2.0)
    np.testing.assert_array_equal(read(bucket), np.repeat(np.arange(count) * 2.0, 6))
    kernels.pack(bucket, [])


@pytest.mark.parametrize("output_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard_dtype", ["float16", "bfloat16", "float32"])
def test_sum_shards_rounds_once(place: str, shard_dtype: str, output_dtype: str) -> None:
    skip_without(place, shard_dtype, output_dtype)
    for shards, offset in ((1, 0), (3, 1), (16, 0)):
        for count in (0, 1, 1021, 8193):
            parts = [values(count, 50 + shard, shard_dtype) for shard in range(shards)]
            output = make(place, np.zeros(count), output_dtype)
            kernels.sum_shards(
                output, [make(place, part, shard_dtype, offset * i) for i, part in enumerate(parts)], scale=0.25
            )
            total = np.zeros(count, np.float32)
            for part in parts:
                total += part.astype(np.float32)
            np.testing.assert_array_equal(read(output), rounded(total * np.float32(0.25), output_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm(place: str, dtype: str) -> None:
    skip_without(place, dtype)
    parts = [values(count, count, dtype) for count in COUNTS]
    weights = [1.0 + index % 2 / 2 for index in range(len(parts))]
    tensors = [make(place, part, dtype, index % 2) for index, part in enumerate(parts)]
    wanted = sum(weight * np.dot(part, part) for part, weight in zip(parts, weights, strict=True))
    assert float(kernels.squared_norm(tensors, weights)) == pytest.approx(wanted, rel=1e-6)
    assert float(kernels.squared_norm(tensors)) == pytest.approx(sum(np.dot(p, p) for p in parts), rel=1e-6)
    large = 6e4 if dtype == "float16" else 1e30  # its square is no float32
    alone = make(place, np.full(100, large), dtype)
    assert float(kernels.squared_norm([alone])) == pytest.approx(100 * float(read(alone)[0]) ** 2, rel=1e-6)
    for place_of_bad in (0, 8191):
        for bad in (np.nan, np.inf, -np.inf):
            part = values(8192, 1, dtype)
            part[place_of_bad] = bad
            assert not np.isfinite(float(kernels.squared_norm([tensors[3], make(place, part, dtype)])))


def test_what_does_not_fit_is_refused(place: str) -> None:
    bucket = make(place, np.zeros(10), "float32")
    tensor = make(place, np.zeros(6), "float32")
    for call, text in [
        (lambda: kernels.pack(bucket, [tensor], [5]), "ends beyond the bucket of 10 elements"),
        (lambda: kernels.pack(bucket, [tensor], [-1]), "offset -1"),
        (lambda: kernels.pack(bucket, [tensor, tensor]), "ends beyond"),
        (lambda: kernels.unpack(bucket, [tensor], [0, 1]), "2 offsets for 1 tensors"),
        (lambda: kernels.pack(bucket, [tensor, make(place, np.zeros(2), "float16")]), "a call for each dtype"),
        (lambda: kernels.pack(make(place, np.zeros(9), "int32"), [tensor]), "int32 is no floating dtype"),
        (lambda: kernels.pack(bucket, [bucket.reshape(2, 5).T]), "is not contiguous"),
        (lambda: kernels.accumulate(make(place, np.zeros(9), "float16"), [tensor]), "must be float32"),
        (lambda: kernels.sum_shards(bucket, [tensor]), "shard 0 has 6 elements, the output 10"),
        (lambda: kernels.sum_shards(bucket, []), "no shards"),
        (lambda: kernels.squared_norm([]), "no tensors"),
        (lambda: kernels.squared_norm([tensor], [1.0, 2.0]), "2 weights for 1 tensors"),
        (lambda: kernels.pack([1.0], [tensor]), "list is none of torch"),
        (lambda: kernels.pack(bucket, [np.zeros(3) if place != "numpy" else torch.zeros(3)]), "another library"),
    ]:
        with pytest.raises(UsageError, match=text):
            call()
    np.testing.assert_array_equal(read(bucket), 0.0)


def test_what_works_is_told(place: str) -> None:
    on_gpu = place in ("cuda", "cupy") and cuda_kernels.load() is not None
    library = "torch" if place in ("torch", "cuda") else place
    told = kernels.implementation(make(place, np.zeros(3), "float32"))
    assert told == ("CUDA kernels" if on_gpu else f"{library} operations")
