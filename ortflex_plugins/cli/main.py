"""``ortflex``: the commands, each imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from ortflex_core import __version__

COMMANDS: Mapping[str, str] = {
    "train": "Train a model with the settings in a recipe (a TOML file).",
    "init": "Write a commented recipe for a model.",
    "find-rate": "Suggest a learning rate for a recipe.",
    "predict": "Write the predictions of a trained model to a file.",
    "evaluate": "Print the loss and the metrics of a trained model.",
    "export": "Write the trained model of a run or a checkpoint to a file.",
    "check": "Show which nodes of MODEL can be trained, and with which backends.",
    "compare": "Run the same steps on every available backend and show where the results differ.",
    "graph": "Draw the graph of a model or of a training step as SVG, HTML or PNG.",
    "report": "Write an HTML report about one or more runs.",
    "diff": "Show the differences between two models, for example before and after training.",
    "verify": "Check an exported model against its receipt, or repeat its training.",
    "quantize": "Quantize a float MODEL to integers and train the quantized model.",
    "shrink": "Remove the channels of MODEL that its outputs do not need.",
    "export-step": "Export the training step of a recipe for use with any onnxruntime build, or as C code.",
    "apply-state": "Write a copy of MODEL with the trained weights from STATE.",
    "new-plugin": "Create a package that contains a new plugin called NAME and its tests.",
    "new-flower-app": "Create a Flower project that trains RECIPE on many clients.",
    "plugins": "List the installed plugins, the plugins of a kind, or the parameters of a plugin.",
    "doctor": "Show the installed runtime, what works with it, and how to fix problems.",
}
"""The help line of each command, so that ``ortflex --help`` imports no command.

The command ``new-plugin`` is the function ``new_plugin`` of the module ``new_plugin``.
"""


ELSEWHERE = {
    **dict.fromkeys(("fit", "run", "resume", "finetune"), "train"),
    **dict.fromkeys(("new", "create", "config"), "init"),
    **dict.fromkeys(("eval", "test", "score", "validate"), "evaluate"),
    **dict.fromkeys(("infer", "inference"), "predict"),
    **dict.fromkeys(("info", "inspect", "summary"), "check"),
    **dict.fromkeys(("draw", "show"), "graph"),
    **dict.fromkeys(("export-model", "export-onnx", "save", "convert"), "export"),
    "lr-find": "find-rate",
    "prune": "shrink",
    "list": "plugins",
}
"""Commands of other tools, and what they are called here."""


class LazyGroup(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of their use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"ortflex_plugins.cli.{name}")
        return getattr(module, name)  # type: ignore[no-any-return]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a call, or suggest the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from ortflex_core import suggest

            word = args[0]
            file = {".toml": "train", ".onnx": "init"}.get(os.path.splitext(word)[1])
            hint = suggest(word, COMMANDS, ELSEWHERE)
            if word in ("help", "version"):
                hint = f"did you mean --{word}?"
            elif file is not None:
                hint = f"did you mean `ortflex {file} {word}`?"
            ctx.fail(f"unknown command {word!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; errors of ortflex are printed as messages, without a traceback."""
        return guarded(lambda: click.Group.invoke(self, ctx))


def guarded(command: Callable[[], Any]) -> Any:
    """Print an ortflex error and exit with 1; ORTFLEX_DEBUG=1 shows the traceback instead."""
    from ortflex_core import ConfigError, OrtflexError, printable

    if os.environ.get("ORTFLEX_DEBUG", "") not in ("", "0"):
        return command()
    try:
        return command()
    except ConfigError as error:
        head = "" if len(error.problems) == 1 else f"{len(error.problems)} problems\n"
        click.echo(printable(f"error: {head}{error}"), err=True)
    except OrtflexError as error:
        click.echo(printable(f"error: {error}"), err=True)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(130) from None
    raise SystemExit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ortflex")
def main() -> None:
    """Train ONNX models with onnxruntime. Losses, optimizers, backends and all other parts are plugins.

    The exit code is 0 on success, 1 after an error, 2 if the command line is invalid, and 130 after
    Ctrl-C. Commands that check something, such as `ortflex verify`, also report their result through
    the exit code, as their descriptions explain. Set the environment variable ORTFLEX_DEBUG to 1 to see the
    traceback of an error.
    """


if __name__ == "__main__":
    sys.exit(main())
