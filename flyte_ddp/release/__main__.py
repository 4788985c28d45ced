"""Commands that read a registry: ``python -m flyte_ddp.release --help``."""

from collections.abc import Iterable

import click

from flyte_ddp.core.text.formatting import escape_controls
from flyte_ddp.pods.paths import read_registry_address
from flyte_ddp.release import listing
from flyte_ddp.release.registry import Registry

ADDRESS = click.option(
    "--registry",
    "address",
    help="Folder or address of the registry; by default FLYTE_DDP_REGISTRY, or the folder registry in the runs folder.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def release() -> None:
    """Read a registry of models. No command changes the registry."""


@release.command("list")
@ADDRESS
def list_models(address: str | None) -> None:
    """List the models of the registry with champion, score, and the time of the last promotion or rollback."""
    print_lines(listing.describe_models(address or read_registry_address()))


@release.command()
@click.argument("name")
@click.argument("version", default="")
@ADDRESS
def show(name: str, version: str, address: str | None) -> None:
    """Show a version of the model NAME: verdict, checks, scores, hyperparameters and files.

    VERSION is the SHA-256 of the version's weights, or at least the first 12 digits. The default is the champion.
    """
    print_lines(listing.describe_version(Registry(address or read_registry_address(), name), version))


@release.command()
@click.argument("name")
@ADDRESS
def history(name: str, address: str | None) -> None:
    """Show the promotions and rollbacks of the model NAME with author, time and reason, and all versions."""
    print_lines(listing.describe_history(Registry(address or read_registry_address(), name)))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(escape_controls(line))


if __name__ == "__main__":
    release(prog_name="python -m flyte_ddp.release")
