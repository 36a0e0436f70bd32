"""The entry point of `rgo` and `python -m rgo`: the command line, or what it needs."""

import sys


def main() -> None:
    """Run the command line, which needs the extra `lab`; the library itself does not."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"rgo's commands need {error.name}, which is not installed: pip install 'rgo[lab]'")
    run()


if __name__ == "__main__":
    main()
