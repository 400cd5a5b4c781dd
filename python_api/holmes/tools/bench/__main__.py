"""`python -m holmes.tools.bench SETTINGS OUTPUT`: one rank, started by `launch`."""

import sys

from holmes.interrupt import ending_early
from holmes.tools.bench.rank import run_rank
from holmes.tools.bench.settings import Output, Settings

if __name__ == "__main__":
    settings, output = sys.argv[1:]
    with ending_early():
        is_right = run_rank(Settings.from_json(settings), Output.from_json(output))
    sys.exit(0 if is_right else 1)
