"""The commands around registries: ``python -m flyte_ddp.release --help``."""

import sys
from collections.abc import Iterator

import click

from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.release import versions
from flyte_ddp.release.registry import Registry


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def release() -> None:
    """Look after registries of models."""


@release.command("audit")
@click.argument("name")
@click.option("--registry", envvar="FLYTE_DDP_REGISTRY", required=True, help="Its folder or address.")
@click.option("--files", is_flag=True, help="Also read all files of each version, and compare their SHA-256.")
def audit_registry(name: str, registry: str, files: bool) -> None:
    """Check the whole log of a model, and that its versions are there; print each fault, and exit with 1 if any."""
    found = False
    for line in find_faults(Registry(registry, name), files=files):
        found = True
        click.echo(line)
    if found:
        sys.exit(1)
    click.echo(f"{name}: nothing is wrong")


def find_faults(registry: Registry, *, files: bool = False) -> Iterator[str]:
    """Yield a line for each entry or version's file that is missing, damaged or altered; ``files`` also reads files."""
    entries, faults = registry.inspect_log()
    yield from faults
    for name, manifest in dict.fromkeys((entry.version, entry.manifest) for entry in entries):
        try:
            version = versions.read_version(registry, name, manifest)
            if files:
                yield from (error.message for error in versions.find_damaged_files(registry, version))
        except UnreachableError:
            raise
        except UserError as error:
            yield error.message


if __name__ == "__main__":
    release(prog_name="python -m flyte_ddp.release")
