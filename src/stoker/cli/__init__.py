"""The `stoker` command: its verbs and their options. What a verb does lives in its own file.

For a quick start nothing but typer is imported at module level: a verb imports its file when it
runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from stoker import __version__

app = typer.Typer(
    name="stoker",
    help="Feeds PyTorch training: fast enough that it never waits, never more than fits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Everything a person reads can also be had as JSON; every verb takes the same option.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of text.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stoker {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Options that stand before the verb."""


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to run each contender.")] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Stoker beside stock torch on this machine: speed and memory, measured now."""
    from stoker.cli.demo import run

    raise typer.Exit(run(seconds=seconds, as_json=as_json))


def main() -> None:
    """Where the console script enters."""
    app()
