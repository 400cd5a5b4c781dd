"""tools/check_layers.py: this tree goes one way, and what does not is found."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOOL = ROOT / "tools" / "check_layers.py"


def check(repository: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, repository], capture_output=True, text=True)


def write(repository: Path, path: str, text: str = "") -> None:
    file = repository / "csrc" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_this_tree():
    run = check(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def test_includes_down_and_inside_a_folder(tmp_path):
    write(tmp_path, "holmes/core/a.hpp", '#include "holmes/core/b.hpp"\n')
    write(tmp_path, "holmes/core/b.hpp", '#include "holmes/core/a.hpp"\n')
    write(tmp_path, "holmes/comm/c.hpp", '#include <vector>\n#include "holmes/core/a.hpp"\n')
    assert check(tmp_path).returncode == 0


def test_include_that_goes_up(tmp_path):
    write(tmp_path, "holmes/core/a.hpp", '// up\n#include "holmes/comm/c.hpp"\n')
    write(tmp_path, "holmes/comm/c.hpp")
    run = check(tmp_path)
    assert run.returncode == 1
    assert run.stdout == "csrc/holmes/core/a.hpp:2: holmes/core must not use holmes/comm (holmes/comm/c.hpp)\n"


def test_folders_beside_each_other(tmp_path):
    write(tmp_path, "holmes/p2p/a.hpp", '#include "holmes/collectives/b.hpp"\n')
    write(tmp_path, "holmes/collectives/b.hpp", '#include "holmes/p2p/a.hpp"\n')
    assert len(check(tmp_path).stdout.splitlines()) == 2


def test_folder_inside_a_folder_is_a_layer(tmp_path):
    write(tmp_path, "holmes/transport/shm/a.hpp", '#include "holmes/transport/b.hpp"\n')
    write(tmp_path, "holmes/transport/b.hpp", '#include "holmes/transport/shm/a.hpp"\n')
    assert "csrc/holmes/transport/b.hpp:1" in check(tmp_path).stdout
    assert "shm/a.hpp:" not in check(tmp_path).stdout


def test_new_folder_needs_a_place(tmp_path):
    write(tmp_path, "holmes/somewhere/a.hpp")
    run = check(tmp_path)
    assert run.returncode == 1
    assert "in no layer" in run.stdout
