"""Reading and writing plans and topologies: YAML or JSON by the name's ending, with a kind and a version inside."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from holmes_comm.errors import UsageError

SUFFIXES = (".yaml", ".yml", ".json")
PICTURES = (".svg", ".png", ".pdf")
# Ten times as fast where PyYAML has them: the topology of 100,000 ranks is a large file.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as dicts and lists that YAML and JSON can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def save(data: Mapping[str, Any], path: str | Path) -> None:
    """Writes `data` to a .yaml, .yml or .json file. Raises ValueError for another ending."""
    path = _checked(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(data, indent=2) + "\n")
    else:
        path.write_text(yaml.dump(dict(data), Dumper=_DUMPER, sort_keys=False, default_flow_style=None, width=120))


def replace(path: str | Path, text: str) -> None:
    """Writes a file that is whole at any moment."""
    path = Path(path)
    if not path.is_file() and path.exists():  # a device or a pipe
        path.write_text(text)
        return
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def load(path: str | Path) -> dict[str, Any]:
    """The mapping in a .yaml, .yml or .json file. Raises ValueError naming the file where it holds none."""
    os.stat(path)  # that it is not there is said before what its name should end in
    path = _checked(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_LOADER)
    except (json.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a mapping, but holds {type(data).__name__}")
    return data


def check_writable(path: str | Path | None) -> None:
    """Before the work whose result is to be written there. Raises ValueError naming what is in the way."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}; make it, or name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written by this user; name another file")


def check_savable(path: str | Path | None) -> None:
    """As `check_writable`, for what `save` writes: the ending too."""
    if path is not None:
        check_writable(_checked(path))


def check_picture(path: str | Path | None) -> None:
    """As `check_writable`, for a picture. Raises ValueError also where its ending is no format's, or matplotlib is
    missing."""
    if path is None:
        return
    if Path(path).suffix not in PICTURES:
        raise UsageError(f"{path}: a picture's name must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    check_writable(path)
    if find_spec("matplotlib") is None:
        raise UsageError(f"{path}: drawing needs matplotlib; run: pip install 'holmes-comm[plot]'")


def check_kind(data: Mapping[str, Any], kind: str, version: int) -> None:
    """Raises ValueError unless `data` says it is a `kind` of this version."""
    if data.get("kind") != kind:
        raise UsageError(f"expected a '{kind}' file, but it says kind: {data.get('kind')!r}")
    if data.get("version") != version:
        raise UsageError(f"{kind} version {data.get('version')!r} is unknown; this release reads version {version}")


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
    return path
