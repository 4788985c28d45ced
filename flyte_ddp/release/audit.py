"""The check of a whole registry, which readers of the champion do without."""

from collections.abc import Iterator

from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.release import versions
from flyte_ddp.release.registry import Registry


def audit(registry: Registry, *, files: bool = False) -> Iterator[str]:
    """Yield a line for each fault of a model's registry: of the log, champion.json, and the versions in the log.

    Args:
        registry: of the model.
        files: whether to read all files of these versions, too, and compare their SHA-256 with the manifest's.

    Raises:
        UserError: the registry cannot be read.
    """
    entries, faults = registry.inspect_log()
    yield from faults
    for name, manifest in dict.fromkeys((entry.version, entry.manifest) for entry in entries):
        try:
            version = versions.read_version(registry, name, manifest)
            if files:
                yield from (error.message for error in versions.damaged_files(registry, version))
        except UnreachableError:
            raise
        except UserError as error:
            yield error.message
