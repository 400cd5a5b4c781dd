"""Models by name, or from a file that a person wrote."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holmes import files
from holmes.planning.model.gpt import Transformer
from holmes_comm.errors import UsageError

#: Published sizes. gpt-*b: table 1 of Narayanan et al. (arXiv 2104.04473), of which the Holmes paper (arXiv 2312.03549)
#: trains the first three; gpt3-175b: Brown et al. (arXiv 2005.14165); llama-2-*: Touvron et al. (arXiv 2307.09288);
#: llama-3-*: table 3 of arXiv 2407.21783, samples of 8192 tokens.
PRESETS: Mapping[str, Transformer] = {
    "gpt-3.6b": Transformer(30, 3072, 32),
    "gpt-7.5b": Transformer(36, 4096, 32),
    "gpt-39.1b": Transformer(48, 8192, 64),
    "gpt-18.4b": Transformer(40, 6144, 48),
    "gpt-76.1b": Transformer(60, 10240, 80),
    "gpt-145.6b": Transformer(80, 12288, 96),
    "gpt-310.1b": Transformer(96, 16384, 128),
    "gpt-529.6b": Transformer(105, 20480, 128),
    "gpt-1008b": Transformer(128, 25600, 160),
    "gpt3-175b": Transformer(96, 12288, 96, vocabulary=50257),
    **{
        name: Transformer(
            layers,
            hidden,
            heads,
            sequence,
            vocabulary,
            kv_heads=kv_heads,
            mlp_hidden=mlp_hidden,
            gated=True,
            tied=False,
            learned_positions=False,
        )
        for name, layers, hidden, heads, sequence, vocabulary, kv_heads, mlp_hidden in (
            ("llama-2-7b", 32, 4096, 32, 4096, 32000, 32, 11008),
            ("llama-2-70b", 80, 8192, 64, 4096, 32000, 8, 28672),
            ("llama-3-8b", 32, 4096, 32, 8192, 128256, 8, 14336),
            ("llama-3-70b", 80, 8192, 64, 8192, 128256, 8, 28672),
            ("llama-3-405b", 126, 16384, 128, 8192, 128256, 8, 53248),
        )
    },
}


def load_model(name_or_path: str) -> Transformer:
    """A preset's sizes, or those in a .yaml or .json file with the fields of `Transformer`.

    Raises ValueError naming the nearest preset, or the file and the field that is wrong.
    """
    if name_or_path.lower() in PRESETS:
        return PRESETS[name_or_path.lower()]
    if Path(name_or_path).suffix in files.SUFFIXES:
        return files.load_as(name_or_path, model_from_dict)
    near = difflib.get_close_matches(name_or_path.lower(), PRESETS, 1, 0.0)[0]
    raise UsageError(
        f"model {name_or_path!r} is unknown; the nearest is {near!r} (all: {', '.join(PRESETS)}); or give a .yaml file "
        "with layers, hidden, heads, sequence and vocabulary"
    )


def model_from_dict(data: Mapping[str, Any]) -> Transformer:
    """The sizes in a mapping, as `files.plain` writes them. Raises ValueError naming what is missing or wrong."""
    known = {field.name: field for field in dataclasses.fields(Transformer)}
    given = {name: value for name, value in data.items() if name not in ("kind", "version")}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise UsageError(f"a model has no field {name!r}; the nearest is {near!r} (all: {', '.join(known)})")
        kinds = (bool,) if isinstance(known[name].default, bool) else (int, type(known[name].default))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = "true or false" if kinds == (bool,) else "a whole number"
            raise UsageError(f"{name}={value!r} of a model must be {wanted}")
    missing = [name for name in ("layers", "hidden", "heads") if name not in given]
    if missing:
        raise UsageError(f"a model needs {', '.join(missing)} (whole numbers)")
    return Transformer(**given)
