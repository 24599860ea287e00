"""``distkit COMMAND``: each command is a function of its own file, its docstring the help."""

from __future__ import annotations

import re
import sys


def main() -> None:
    try:
        import jsonargparse
    except ModuleNotFoundError as error:
        sys.exit(f"distkit needs {error.name}: pip install 'lightning-distkit[cli]'")
    from lightning_distkit.cli.advise import advise
    from lightning_distkit.cli.convert import convert
    from lightning_distkit.cli.estimate import estimate
    from lightning_distkit.cli.timeline import timeline

    arguments = [re.sub(r"^--[^=]+", _underscored, each) for each in sys.argv[1:]]
    jsonargparse.auto_cli(
        {"advise": advise, "convert": convert, "estimate": estimate, "timeline": timeline},
        args=arguments,
        as_positional=True,
        prog="distkit",
    )


def _underscored(option: re.Match[str]) -> str:
    """The name of an option as jsonargparse has it; --world-size is as good as --world_size."""
    return "--" + option[0][2:].replace("-", "_")


if __name__ == "__main__":
    main()
