"""A Plan as a folder to start from: launch script, host file, settings (`holmes plan export --output`)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes.planning.plan.plan import Plan
from holmes.training.integrations.export import export_plan
from holmes.training.integrations.flagscale import flagscale_hostfile, flagscale_overrides
from holmes.training.integrations.megatron import megatron_arguments
from holmes.training.integrations.start_order import hosts_in_order, renumbered
from holmes.training.integrations.torchtitan import torchtitan_arguments
from holmes_comm.errors import UsageError

SCRIPT = "launch.sh"
HOSTS = "hostfile"
PLAN = "plan.yaml"
_ARGUMENTS = "arguments.txt"

_HEAD = """\
#!/usr/bin/env bash
# {title}
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
if (($# == 0)); then
  echo "usage, {where}: $0 {usage}" >&2
  exit 2
fi
"""
_NODE = """\
hosts=({hosts})
ranks=({ranks})
node=${{NODE_RANK:-}}
if [[ -z $node ]]; then
  for index in "${{!hosts[@]}}"; do
    if [[ ${{hosts[index]}} == "$(uname -n)" ]]; then node=$index; fi
  done
fi
if [[ -z $node ]]; then
  echo "$0: $(uname -n) is none of the plan's hosts ${{hosts[*]}}; set NODE_RANK to this host's place in them" >&2
  exit 2
fi
"""
_READ = f"""\
mapfile -t arguments <"$here/{_ARGUMENTS}"  # a word a line
"""
# What the plan says comes last: of an option that is given twice, trainers take the last one.
_TORCHRUN = """\
exec torchrun --nnodes {nodes} --node-rank "$node" --nproc-per-node "${{ranks[node]}}" \\
  --master-addr "${{MASTER_ADDR:-${{hosts[0]}}}}" --master-port "${{MASTER_PORT:-29500}}" \\
  "$@" {options}
"""
_OWN_RUNNER = """\
exec python "$@" {options}
"""


@dataclass(frozen=True)
class _Start:
    """How a trainer is started and told its settings. `files`: name and text of each; `options`: as the shell reads
    them; `is_own`: it starts ranks on all hosts itself, by the host file."""

    usage: str
    files: Callable[[Plan], dict[str, str]]
    options: str = '"${arguments[@]}"'
    is_own: bool = False


def launch_files(plan: Plan, trainer: str) -> dict[str, str]:
    """Texts by name: the launch script, the host file in the plan's order, the trainer's settings. Local.

    Raises NotExpressible as `export_plan` and `hosts_in_order`, ValueError for what is no trainer.
    """
    if trainer not in _STARTS:
        raise UsageError(f"cannot start {trainer!r}; it must be one of {', '.join(_STARTS)}, or leave out --output")
    start, hosts = _STARTS[trainer], hosts_in_order(plan)
    files = start.files(plan)
    where = "once" if start.is_own else "on every host"
    script = _HEAD.format(title=f"{trainer}: {plan.describe().splitlines()[0]}", where=where, usage=start.usage)
    if not start.is_own:
        names, ranks = (" ".join(shlex.quote(str(pair[i])) for pair in hosts) for i in (0, 1))
        script += _NODE.format(hosts=names, ranks=ranks)
    if _ARGUMENTS in files:
        script += _READ
    script += (_OWN_RUNNER if start.is_own else _TORCHRUN).format(nodes=len(hosts), options=start.options)
    listed = "".join(f"{host} slots={count}\n" for host, count in hosts)
    return {SCRIPT: script, HOSTS: flagscale_hostfile(plan) if start.is_own else listed, **files}


def write_launch_files(plan: Plan, trainer: str, folder: Path) -> list[Path]:
    """Writes `launch_files` into the folder, which is made where its parent is there, and the plan as ranks are
    numbered then; the script is executable."""
    texts = launch_files(plan, trainer)
    try:
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / SCRIPT).chmod(0o755)
        renumbered(plan).save(folder / PLAN)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}; name a folder of yours") from error
    return [folder / name for name in (*texts, PLAN)]


def _words(of: Callable[[Plan], Sequence[str]]) -> Callable[[Plan], dict[str, str]]:
    return lambda plan: {_ARGUMENTS: "".join(f"{word}\n" for word in of(plan))}


def _deepspeed(plan: Plan) -> dict[str, str]:
    text = export_plan(plan, "deepspeed")
    return {"parallelism.json": text, "deepspeed.json": json.dumps(json.loads(text)["config"], indent=2) + "\n"}


_STARTS: dict[str, _Start] = {
    "megatron": _Start("pretrain_gpt.py [ARGUMENT ...]", _words(megatron_arguments)),
    "deepspeed": _Start(
        "TRAINING_SCRIPT [ARGUMENT ...]", _deepspeed, '--deepspeed --deepspeed_config "$here/deepspeed.json"'
    ),
    "torchtitan": _Start(
        "-m torchtitan.train --module MODULE --config CONFIG [ARGUMENT ...]",
        _words(lambda plan: torchtitan_arguments(renumbered(plan))),
    ),
    "flagscale": _Start(
        "run.py --config-path FOLDER --config-name NAME [ARGUMENT ...]",
        _words(flagscale_overrides),
        '"${arguments[@]}" "++experiment.runner.hostfile=\'$here/hostfile\'"',
        is_own=True,
    ),
}
