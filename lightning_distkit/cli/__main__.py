"""``distkit COMMAND``: each command is a function of its own file, its docstring the help."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        import jsonargparse
    except ModuleNotFoundError as error:
        sys.exit(f"distkit needs {error.name}: pip install 'lightning-distkit[cli]'")
    from lightning_distkit.cli.advise import advise
    from lightning_distkit.cli.convert import convert
    from lightning_distkit.cli.estimate import estimate

    jsonargparse.auto_cli(
        {"advise": advise, "convert": convert, "estimate": estimate}, as_positional=True, prog="distkit"
    )


if __name__ == "__main__":
    main()
