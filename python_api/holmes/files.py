"""Reading and writing plans and topologies: YAML or JSON by the name's ending, with a kind and a version inside."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml

from holmes_comm.errors import UsageError

_Made = TypeVar("_Made")

SUFFIXES = (".yaml", ".yml", ".json")
PICTURES = (".svg", ".png", ".pdf")
# Ten times as fast where PyYAML has them: the topology of 100,000 ranks is a large file.
_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_SAFE_LOADER):  # type: ignore[misc]
    """The last of two equal keys would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=_twice(key.value), problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _twice(key: str) -> str:
    return f"the key {key!r} stands twice in one mapping; leave one"


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(_twice(next(key for key in keys if keys.count(key) > 1)))
    return found


def parse_yaml(text: str) -> Any:
    """What a YAML text holds. Raises yaml.YAMLError, also where a key stands twice in one mapping."""
    return yaml.load(text, Loader=_Loader)


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
        replace(path, json.dumps(data, indent=2) + "\n")
    else:
        replace(path, yaml.dump(dict(data), Dumper=_DUMPER, sort_keys=False, default_flow_style=None, width=120))


def replace(path: str | Path, text: str) -> None:
    """Writes a file in UTF-8 that is whole at any moment: where that fails, what was there stays, and only that.

    Raises OSError naming the file.
    """
    path = Path(path)
    is_device = path.exists() and not path.is_file()  # or a pipe
    try:
        if is_device or not os.access(path.resolve().parent, os.W_OK):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def load(path: str | Path) -> dict[str, Any]:
    """The mapping in a .yaml, .yml or .json file. Raises ValueError naming the file where it holds none."""
    os.stat(path)  # that it is not there is said before what its name should end in
    path = _checked(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_object) if path.suffix == ".json" else parse_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    except RecursionError:
        raise UsageError(f"{path} cannot be read as {path.suffix[1:]}: it is nested too deeply") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a mapping, but holds {type(data).__name__}")
    return data


def load_as(path: str | Path, make: Callable[[Mapping[str, Any]], _Made]) -> _Made:
    """What `make` reads of the mapping in a file. Raises ValueError naming the file, also where `make` refuses it."""
    data = load(path)
    try:
        return make(data)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


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


def make_folder(path: str | Path) -> Path:
    """Makes a folder and those above it, where they are not there. Raises ValueError naming what is in the way."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a folder of yours") from error
    return Path(path)


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
