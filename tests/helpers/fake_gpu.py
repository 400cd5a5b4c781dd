"""Arrays in the "memory" of the fake CUDA driver (tests/fake_nccl), for tests of the NCCL backend without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
from paths import ROOT

BUILD = ROOT / "build"
VERSIONS = [21803, 22105, 22707, 23007, 23203]
# HOLMES_TEST_LONG=1: also what the default suite has no time for (benchmarks/gpu_check.sh says so).
IS_LONG = bool(os.environ.get("HOLMES_TEST_LONG"))


def find(name: str) -> Path | None:
    """A library of tests/fake_nccl in a build tree; None where the C++ tests were not built (HOLMES_TESTS=ON)."""
    found = [path for path in BUILD.glob(f"*/tests/cpp/fake_nccl/lib{name}.so") if "sanitize" not in str(path)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def environment(version: int) -> dict[str, str]:
    """Variables with which Holmes loads the fakes."""
    return {
        **os.environ,
        "HOLMES_CUDA_LIBRARY": str(find("fake_cuda")),
        "HOLMES_NCCL_LIBRARY": str(find(f"fake_nccl_{version}")),
    }


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["HOLMES_CUDA_LIBRARY"])


class Array:
    """An array on a fake GPU; `values` is a numpy view, to look at once the stream is done."""

    def __init__(self, values: Any, device: int, stream: int | None = None) -> None:
        source = np.ascontiguousarray(values)
        address = ctypes.c_ulonglong()
        cuda = _driver()
        context = ctypes.c_void_p()
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        before = ctypes.c_void_p()
        cuda.cuCtxGetCurrent(ctypes.byref(before))
        cuda.cuCtxSetCurrent(context)
        mode = ctypes.c_int(2)  # relaxed: memory may be had in a capture
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(source.nbytes, 1))) == 0
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        cuda.cuCtxSetCurrent(before)
        self.address = address.value
        self.stream = stream
        block = (ctypes.c_char * max(source.nbytes, 1)).from_address(self.address)
        self.values = np.frombuffer(block, source.dtype, source.size).reshape(source.shape)
        self.values[...] = source

    def __del__(self) -> None:
        _driver().cuMemFree_v2(ctypes.c_ulonglong(self.address))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.stream,
        }

    def part(self, begin: int, end: int) -> View:
        """Elements begin to end of a one-dimensional array."""
        return View(self, begin, end)


class View:
    """Part of an Array."""

    def __init__(self, base: Array, begin: int, end: int) -> None:
        self.base = base
        self.values = base.values[begin:end]
        self.offset = begin * base.values.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.base.__cuda_array_interface__)
        return interface | {"shape": self.values.shape, "data": (self.base.address + self.offset, False)}


def make_stream() -> int:
    stream = ctypes.c_void_p()
    assert _driver().cuStreamCreate(ctypes.byref(stream), 1) == 0
    return int(stream.value or 0)


def synchronize(stream: int) -> None:
    """Waits until all that was put on the stream is done."""
    assert _driver().cuStreamSynchronize(ctypes.c_void_p(stream)) == 0


def keep_busy(stream: int, milliseconds: int) -> None:
    assert _driver().fake_cuda_busy(ctypes.c_void_p(stream), milliseconds) == 0


def compute(device: int, stream: int, microseconds: int, most: int, label: str) -> None:
    """A kernel that computes for so long, on up to `most` multiprocessors of the device."""
    arguments = (ctypes.c_int(device), ctypes.c_void_p(stream), ctypes.c_int(microseconds), ctypes.c_int(most))
    assert _driver().fake_cuda_compute(*arguments, label.encode()) == 0


def copy(to: Array, source: Array, stream: int) -> None:
    """As a kernel that copies would: on the stream, after what is there."""
    arguments = (ctypes.c_ulonglong(to.address), ctypes.c_ulonglong(source.address))
    assert _driver().cuMemcpyAsync(*arguments, ctypes.c_size_t(source.values.nbytes), ctypes.c_void_p(stream)) == 0


def most_owners() -> int:
    """How many communicators' operations ever ran on one GPU at once."""
    return int(_driver().fake_cuda_most_owners())


def capture(stream: int) -> None:
    """Begins the capture of `stream` into a CUDA graph; in global mode, as torch does: any thread may break it."""
    assert _driver().cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 0) == 0


def end_capture(stream: int) -> int:
    graph = ctypes.c_void_p()
    status = _driver().cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    assert status == 0, {901: "the capture was broken", 904: "work was not joined"}.get(status, status)
    return int(graph.value or 0)


def destroy(graph: int) -> None:
    assert _driver().cuGraphDestroy(ctypes.c_void_p(graph)) == 0


def count(name: str) -> int:
    """How often the fakes saw this."""
    return int(_driver().fake_cuda_count(name.encode()))


def take_calls() -> dict[str, int]:
    """What this thread has called of the fakes since the last question, by name."""
    text = ctypes.create_string_buffer(1 << 16)
    _driver().fake_cuda_calls(0, text, ctypes.c_size_t(len(text)))
    return {name: int(count) for name, count in (line.split() for line in text.value.decode().splitlines())}


def launch(graph: int, stream: int) -> None:
    assert _driver().cuGraphLaunch(ctypes.c_void_p(graph), ctypes.c_void_p(stream)) == 0


def find_module(name: str) -> Path | None:
    """A Python module of tests/fake_nccl in a build tree; None where it was not built."""
    found = [path for path in BUILD.glob(f"*/tests/cpp/fake_nccl/{name}.so") if "sanitize" not in str(path)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def load_module(name: str) -> Any:
    """That module; torch has been imported."""
    path = find_module(name)
    assert path is not None, f"{name} was not built"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
