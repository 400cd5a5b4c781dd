"""The `holmes` command, and `python -m holmes`. Imports nothing that takes long before Ctrl-C is seen to."""

from holmes.interrupt import end_while_importing


def main() -> None:
    """Entry point of the `holmes` command."""
    end_while_importing()
    from holmes.tools.cli import main as run

    run()


if __name__ == "__main__":
    main()
