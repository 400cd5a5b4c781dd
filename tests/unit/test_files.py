"""What is written stays whole where writing fails, and says what could not be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from topologies import topology_of

from holmes import files
from holmes.cluster.topology import Topology

#: Python ignores SIGXFSZ, so that a file that would be longer is an OSError, as on a disk that is full.
_NO_ROOM = """
import resource, sys
from pathlib import Path
from holmes import files
from holmes.cluster.topology import Topology
data = Topology.load(sys.argv[1]).to_dict()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    files.save(data, sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["topology.yaml", "topology.json"])
def test_a_saved_file_outlives_a_disk_that_is_full(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    topology_of([[2, 2], [2, 2]]).save(path)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", _NO_ROOM, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert str(path) in done.stdout
    assert path.read_bytes() == before
    assert Topology.load(path).hosts
    assert os.listdir(tmp_path) == [name]


def test_a_link_and_the_rights_of_a_file_stay(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    file, link = tmp_path / "own" / "plan.yaml", tmp_path / "plan.yaml"
    file.write_text("")
    file.chmod(0o640)
    link.symlink_to(file)
    files.save({"kind": "one"}, link)
    assert link.is_symlink()
    assert files.load(file) == {"kind": "one"}
    assert file.stat().st_mode & 0o777 == 0o640


def test_what_is_written_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    code = f"from holmes import files; files.replace({str(path)!r}, '\\u00dcn\\u00ef')"
    of_c = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env=of_c, timeout=60, check=True)
    assert path.read_text(encoding="utf-8") == "\u00dcn\u00ef"


def test_a_device_and_a_pipe_are_written_to() -> None:
    code = "from holmes import files; files.replace('/dev/stdout', 'told')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "told"


def test_a_command_prints_what_the_terminal_has_no_letters_for(tmp_path: Path) -> None:
    topology_of([[2, 2], [2, 2]]).save(tmp_path / "topology.yaml")
    text = (tmp_path / "topology.yaml").read_text().replace("name: c0h0", 'name: "n\\u0153ud"')
    (tmp_path / "topology.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "holmes", "topology", str(tmp_path / "topology.yaml")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "n\\u0153ud" in done.stdout


def test_what_no_number_or_stack_holds_names_the_file(tmp_path: Path) -> None:
    deep, large = tmp_path / "deep.json", tmp_path / "large.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"deep\.json cannot be read as json: it is nested too deeply"):
        Topology.load(deep)
    host = {"name": "a", "ranks_per_host": 1, "gpu_tflops": 10**400}
    large.write_text(json.dumps({"kind": "holmes topology", "version": 2, "hosts": [host]}))
    with pytest.raises(ValueError, match=r"large\.json: hosts\[0\]\.gpu_tflops is 10+; it must be a number above 0"):
        Topology.load(large)
