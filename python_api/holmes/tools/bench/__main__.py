"""`python -m holmes.tools.bench SETTINGS OUTPUT`: one rank, started by `launch`."""

import signal
import sys
from typing import Any

from holmes.tools.bench.rank import run_rank
from holmes.tools.bench.settings import Output, Settings

INTERRUPTED = 128 + signal.SIGINT


class Interrupt:
    """Of SIGINT. Remembers that it came: what fails then, fails of it."""

    has_come = False

    def __call__(self, *_: Any) -> None:
        """Raises KeyboardInterrupt."""
        self.has_come = True
        raise KeyboardInterrupt


if __name__ == "__main__":
    settings, output = sys.argv[1:]
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    try:
        sys.exit(0 if run_rank(Settings.from_json(settings), Output.from_json(output)) else 1)
    except BaseException as error:
        if interrupt.has_come and not isinstance(error, SystemExit):
            sys.exit(INTERRUPTED)
        raise
