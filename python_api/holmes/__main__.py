"""`python -m holmes`: the same as the `holmes` command."""

from holmes.cli import main

main()
