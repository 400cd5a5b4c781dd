"""`python -m holmes`: the same as the `holmes` command."""

from holmes.tools.cli import main

main()
