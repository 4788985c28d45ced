"""Loaders that read images from a server: this library's, and simple ones as a baseline."""

import io
import json
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.image_loaders import WORKERS, Epoch, Fast, Side, decode_and_crop, ours

DOWNLOADS = 4  # shards at the same time


def s3_client() -> Any:
    """A client of S3 with its own settings, but for the place."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(max_pool_connections=DOWNLOADS, s3={"addressing_style": "path"}))


def download_and_decode(order: dict[str, Any], _: Path) -> Epoch:
    """All shards by one GET each, some at the same time, while threads decode and crop what has come."""
    bucket, _, index = order["dataset"].partition("://")[2].partition("/")
    client = s3_client()
    folder = index.rpartition("/")[0]
    shards = json.load(client.get_object(Bucket=bucket, Key=index)["Body"])["shardlist"]
    keys = [f"{folder}/{shard['url']}" for shard in shards]

    def stored(key: str) -> list[bytes]:
        content = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        with tarfile.open(fileobj=io.BytesIO(content)) as shard:
            return [shard.extractfile(member).read() for member in shard if member.name.endswith(".jpg")]  # type: ignore[union-attr]

    def epoch(_: int) -> Iterator[Tensor]:
        with ThreadPoolExecutor(DOWNLOADS) as downloads, ThreadPoolExecutor(WORKERS) as decoders:
            tasks = []
            for images in downloads.map(stored, keys):
                starts = range(0, len(images), 8)
                tasks += [decoders.submit(decode_and_crop, images[start : start + 8]) for start in starts]
            for task in tasks:
                yield torch.empty(task.result())

    return epoch


class Objects(Dataset[Tensor]):
    """Images that are objects, each by a GET when it is wanted."""

    def __init__(self, bucket: str, keys: list[str]) -> None:
        self.bucket, self.keys, self.transform = bucket, keys, Fast()
        self.client: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> Tensor:
        self.client = self.client or s3_client()  # each worker its own
        return self.transform(self.client.get_object(Bucket=self.bucket, Key=self.keys[number])["Body"].read())


def one_at_a_time(order: dict[str, Any], _: Path) -> Epoch:
    """A DataLoader whose workers ask for one image after another."""
    bucket, _, prefix = order["dataset"].partition("://")[2].partition("/")
    pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    loader = DataLoader(Objects(bucket, keys), order["batch_size"], shuffle=True, num_workers=WORKERS)
    return lambda _: loader


SIDES: dict[str, Side] = {
    "ours, empty cache": ours,
    "download and decode alone": download_and_decode,
    "ours from a folder": ours,
    "one GET at a time": one_at_a_time,
}
