"""Kernels of torch that only move memory, made of copies: the fake CUDA runtime has copies, not those kernels.

What calls them (DDP's flattening, FSDP2's collectives) is torch's own, as it is.
"""

from __future__ import annotations

import math

import torch

_library = torch.library.Library("aten", "IMPL")  # as long as it lives, so do these


def cat(tensors, dim=0):
    tensors = [one for one in tensors if one.dim() > 1 or one.numel()]
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    out, at = tensors[0].new_empty(shape), 0
    for one in tensors:
        move(out.narrow(dim, at, one.shape[dim]), one)
        at += one.shape[dim]
    return out


def move(to, source):
    """Row by row, where they are not contiguous."""
    if to.dim() > 1 and not (to.is_contiguous() and source.is_contiguous()):
        for row, from_row in zip(to, source, strict=True):
            move(row, from_row)
    else:
        to.copy_(source)


def foreach_copy(targets, sources, non_blocking=False):
    for target, source in zip(targets, sources, strict=True):
        move(target, source)


def split_with_sizes_copy(whole, sizes, dim=0, *, out):
    for target, part in zip(out, whole.split_with_sizes(sizes, dim), strict=True):
        move(target.view(part.shape), part)


def chunk_cat(tensors, dim, num_chunks, *, out):
    """Of `dim` 0: row r of `out` has chunk r of each tensor, padded."""
    assert dim == 0
    rows, at = out.view(num_chunks, -1), 0
    for one in tensors:
        each = math.ceil(one.shape[0] / num_chunks)
        width = each * one[0].numel()
        flat = one.reshape(-1)
        for chunk, row in enumerate(rows):
            part = flat[chunk * width : (chunk + 1) * width]
            row[at + part.numel() : at + width].fill_(0)
            row[at : at + part.numel()].copy_(part)
        at += width
    return out


for name, function in (
    ("cat", cat),
    ("_foreach_copy_", foreach_copy),
    ("split_with_sizes_copy.out", split_with_sizes_copy),
    ("_chunk_cat.out", chunk_cat),
):
    _library.impl(name, function, "CUDA")
