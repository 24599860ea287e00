"""The runner: a plugin before a script that knows nothing of it, and what helps to write its settings.

accelerate launch --multi_gpu --num_processes 2 -m accelerate_plugins --plugin_config zero2.yaml train.py --lr 1e-3
accelerate launch ... -m accelerate_plugins --plugin powersgd --matrix_approximation_rank 2 -m my_package.train
torchrun --nproc-per-node 2 -m accelerate_plugins --plugin zero_stage_2 train.py
python -m accelerate_plugins config [FILE]       asks, and writes a file
python -m accelerate_plugins validate FILE       says what is wrong with one
python -m accelerate_plugins schema              prints a JSON schema for editors
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from accelerate_plugins import config


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line says.

    Raises:
        SystemExit: with what is wrong, on every rank alike, before anything is sent.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    commands = {"config": _config, "validate": _validate, "schema": _schema}
    if args and args[0] in commands:
        commands[args[0]](args[1:])
        return
    try:
        overrides, file, target, is_module = _parsed(args)
        _set_up(overrides, file)
    except (ValueError, RuntimeError) as error:
        print(f"accelerate_plugins: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    _run(target, is_module)


def _set_up(overrides: dict[str, str], file: str | None) -> None:
    """Have every Accelerator of this process carry out the plugin."""
    # Imported here, so that a wrong command line is said before Accelerate is loaded.
    from accelerate_plugins import accelerator, install, launch

    plugin = config.plugin_of(config.gathered(file, overrides))
    if plugin is None:
        raise config.ConfigError("no plugin is named: give --plugin_config FILE, --plugin NAME, or their variables")
    config.export(file, overrides)
    accelerator.refuse_by_environment(plugin)
    launch.check_that_all_were_started()
    launch.use_cpu_if_there_is_nothing_else()
    install.install(plugin)


def _run(target: Sequence[str], is_module: bool) -> None:
    """As ``python target`` or ``python -m target`` would."""
    script, sys.argv = target[0], list(target)
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


def _parsed(args: list[str]) -> tuple[dict[str, str], str | None, list[str], bool]:
    """Settings, file, what is to be run with its arguments, and whether that is a module."""
    parser = argparse.ArgumentParser(
        prog="accelerate_plugins",
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--plugin_config", metavar="FILE", help="YAML: `plugin: zero_stage_2`, and its settings")
    parser.add_argument("-m", dest="is_module", action="store_true", help="what is to be run is a module")
    for key in config.known_keys():
        parser.add_argument(f"--{key}", metavar="VALUE", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    begin = _first_of_target(args)
    try:
        found, unknown = parser.parse_known_args(args[:begin])
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    for option in unknown:
        match = get_close_matches(option.lstrip("-").partition("=")[0], config.known_keys(), 1)
        meant = f"; did you mean --{match[0]}?" if match else ""
        raise ValueError(f"{option}: no plugin has such a setting{meant}")
    if begin == len(args):
        raise ValueError("no script is given to run; `python -m accelerate_plugins --help` says how")
    overrides = {key: value for key, value in vars(found).items() if key not in ("plugin_config", "is_module")}
    return overrides, found.plugin_config, args[begin:], found.is_module


def _first_of_target(args: Sequence[str]) -> int:
    """Where the options end: all of ours but -m and --help take a value."""
    at = 0
    while at < len(args) and args[at].startswith("-"):
        at += 1 if args[at] in ("-m", "-h", "--help") or "=" in args[at] else 2
    return min(at, len(args))


def _validate(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="accelerate_plugins validate")
    parser.add_argument("file")
    file = parser.parse_args(args).file
    try:
        plugin = config.plugin_of(config.gathered(file, {}))
    except ValueError as error:
        print(f"accelerate_plugins: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{file}: {plugin}")


def _schema(args: Sequence[str]) -> None:
    from accelerate_plugins.schema import schema

    argparse.ArgumentParser(prog="accelerate_plugins schema").parse_args(args)
    print(json.dumps(schema(), indent=2))


def _config(args: Sequence[str]) -> None:
    """Ask for what differs from the defaults, and write a file that is valid."""
    import yaml

    from accelerate_plugins.plugin import PLUGINS, load
    from accelerate_plugins.schema import in_words, settings

    parser = argparse.ArgumentParser(prog="accelerate_plugins config")
    parser.add_argument("file", nargs="?", default="plugin.yaml")
    file = parser.parse_args(args).file
    answers: dict[str, Any] = {}

    def ask(key: str, question: str) -> bool:
        """Whether there is an answer; asks again if it is wrong."""
        while answer := input(question).strip():
            given = config.Setting(yaml.safe_load(answer), "that")
            others = {name: config.Setting(value, "that") for name, value in answers.items()}
            try:
                config.check({**others, key: given})
            except ValueError as error:
                print(f"  {error}")
                continue
            answers[key] = given.value
            return True
        return False

    while not ask("plugin", f"plugin ({', '.join(PLUGINS)}): "):
        pass
    path, preset = PLUGINS[answers["plugin"]]
    print("Return keeps the default.")
    for key, its in settings(load(path)).items():
        if key not in preset:
            ask(key, f"\n{key}: {its['description']}\n  {in_words(its)} [{its['default']}]: ")
    found = {key: config.Setting(value, file) for key, value in answers.items()}
    try:
        config.plugin_of(found)
    except ValueError as error:
        print(f"accelerate_plugins: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    Path(file).write_text(yaml.safe_dump(answers, sort_keys=False), encoding="utf-8")
    print(f"written to {file}; now: accelerate launch -m accelerate_plugins --plugin_config {file} train.py")


if __name__ == "__main__":
    main()
