"""What a folder holds after packing."""

from pathlib import Path
from typing import Any

from flyte_ddp.shards.dataset import ShardDataset


def contents(index: Path) -> list[dict[str, Any]]:
    return list(ShardDataset(index, index.parent / "cache", decode=False))


def all_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []
