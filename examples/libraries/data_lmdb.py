# /// script
# dependencies = ["lmdb==3.0.0"]
# ///
"""LMDB.

A process may open an environment once, and a second `lmdb.open` fails. A fork must not use its parent's environment.
Therefore each process keeps one environment, for both sides. `lock=False` reads without `lock.mdb`, which each reader
would change. `readahead=False` suits samples in random order. Keys are sorted by their bytes. Write numbers with
leading zeros or, as here, big-endian.
"""

import os
from functools import cache

import lmdb
import numpy as np

from flyte_ddp import on_demand


class Rows:
    def __init__(self, environment, part):
        self.reader = environment.begin(environment.open_db(part))

    def __len__(self):
        return self.reader.stat()["entries"]

    def __getitem__(self, number):
        row = np.frombuffer(self.reader.get(number.to_bytes(8)), np.float32)
        return row[:-1], int(row[-1])


@cache
def open_once(source, process):  # noqa: ARG001
    return lmdb.open(source, readonly=True, lock=False, readahead=False, max_dbs=2)


def samples(source):
    environment = open_once(source, os.getpid())
    return on_demand(Rows(environment, b"train"), Rows(environment, b"test"))


def write(folder, part, inputs, labels):
    with lmdb.open(str(folder), max_dbs=2) as environment, environment.begin(write=True) as writer:
        rows = environment.open_db(part.encode(), writer)
        for number, (row, label) in enumerate(zip(inputs, labels, strict=True)):
            writer.put(number.to_bytes(8), np.float32([*row, label]).tobytes(), db=rows)
