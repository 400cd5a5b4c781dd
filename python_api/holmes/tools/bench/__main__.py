"""`python -m holmes.tools.bench SETTINGS OUTPUT`: one rank, started by `launch`."""

import sys

from holmes.tools.bench.rank import run_rank
from holmes.tools.bench.settings import Output, Settings

if __name__ == "__main__":
    settings, output = sys.argv[1:]
    sys.exit(0 if run_rank(Settings.from_json(settings), Output.from_json(output)) else 1)
