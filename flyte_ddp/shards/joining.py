"""One index for several data sets, each with a weight; the shards stay where they are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.shards.index import EXTENSION, KIND, ShardIndex, build_index
from flyte_ddp.shards.scanning import index_output


def join_indexes(
    addresses: Sequence[str], output: Path, *, weights: Sequence[float] = (), name: str = ""
) -> ShardIndex:
    """Write an index that refers to others, as ``datasets`` in wids' format, and return it.

    Args:
        addresses: of the others, each of which lists its shards itself.
        output: the index to write.
        weights: how many times an epoch goes through each of them, 0.5 for half of it; once, if there are none.
        name: of the whole; the index's own name if there is none.

    Raises:
        UserError: an index that cannot be read, is joined itself, has other classes or is given twice; a number of
            weights that is not that of indexes; a weight that is not above 0; an output that is one of them, or
            another file that is no index.
    """
    addresses = [str(storage.local_path(address) or address) for address in addresses]
    output = index_output(output, addresses)
    if len(set(addresses)) < max(2, len(addresses)):
        raise UserError(f"indexes {', '.join(addresses) or 'none'}: must be two or more, each given once")
    if len(weights) not in (0, len(addresses)):
        raise UserError(f"{len(weights)} weights: must be one for each of the {len(addresses)} indexes, or none")
    references = [
        {"source_url": address.removeprefix(f"{output.parent}/"), "weight": weight}
        for address, weight in zip(addresses, weights or [1.0] * len(addresses), strict=True)
    ]
    content: dict[str, Any] = {"__kind__": KIND, "wids_version": 1, "name": name or output.stem, "datasets": references}
    index = build_index(str(output), content)
    for reference, part in zip(references, index.parts, strict=True):
        reference["name"] = part.name
    content[EXTENSION] = {"classes": index.classes}
    with replacing(output) as file:
        file.write(f"{json.dumps(content, indent=1)}\n".encode())
    return index
