"""The commands around registries: ``python -m flyte_ddp.release --help``."""

import sys

import click

from flyte_ddp.release.registry import Registry


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def release() -> None:
    """Look after registries of models."""


@release.command("audit")
@click.argument("name")
@click.option("--registry", envvar="FLYTE_DDP_REGISTRY", required=True, help="Its folder or address.")
@click.option("--files", is_flag=True, help="Also read all files of each version, and compare their SHA-256.")
def audit_registry(name: str, registry: str, files: bool) -> None:
    """Check the whole log of a model, and that its versions are there: a line for each fault, and exit code 1."""
    from flyte_ddp.release.audit import audit

    found = False
    for line in audit(Registry(registry, name), files=files):
        found = True
        click.echo(line)
    if found:
        sys.exit(1)
    click.echo(f"{name}: nothing is wrong")


if __name__ == "__main__":
    release(prog_name="python -m flyte_ddp.release")
