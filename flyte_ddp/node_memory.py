"""Memory that the ranks of one machine share, with a barrier of its own.

The memory has no name in any file system: whatever ends the ranks, nothing is left behind, and the size of ``/dev/shm``
(64 MB in a pod) is no limit. Linux only.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from flyte_ddp.distributed import from_rank_0, rank, timeout, world_size
from flyte_ddp.errors import CollectiveTimeoutError, PeerGoneError

LONGEST_MESSAGE = 64
ALIGNMENT = 64  # bytes: every tensor starts on a cache line

Piece = tuple[int, torch.dtype]  # number of elements, and their type


class NodeMemory:
    """Memory that all ranks of the process group map, as uint8 [size] in ``bytes``; zeros at first.

    All ranks make it together, with the same size.
    """

    def __init__(self, size: int) -> None:
        """Makes ``size`` bytes, at least one.

        Raises:
            OSError: the ranks are not on one machine, or the memory cannot be had.

        """
        memory, self.peers = share(max(size, 1))
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def barrier(self) -> None:
        """Returns once all ranks have called it; each then sees what the others wrote before.

        Every rank sends a message to rank 0 and gets one back: two wake-ups, where the backend's barrier takes more.

        Raises:
            RuntimeError: a rank has ended, or did not come within the time limit of collectives.

        """
        for other, peer in self.peers.items():
            if rank() != 0:
                send(peer, other)
            receive(peer, other)
        if rank() == 0:
            for other, peer in self.peers.items():
                send(peer, other)


class NodeGather:
    """Hands each rank the numbers of all; for a few numbers much faster than a collective of gloo.

    All ranks make it together, with the same arguments.
    """

    def __init__(self, most: int) -> None:
        """Makes places for at most so many numbers of each rank."""
        # Two sets of places, used in turn: see SharedMemorySync.
        self.memory = NodeMemory(2 * world_size() * most * torch.float64.itemsize)
        self.places = self.memory.bytes.view(torch.float64).view(2, world_size(), most)
        self.turn = 0

    def __call__(self, numbers: Tensor) -> Tensor:
        """fp64 [n] to fp64 [ranks, n]; n is the same on all ranks."""
        places = self.places[self.turn, :, : numbers.numel()]
        self.turn = 1 - self.turn
        places[rank()] = numbers
        self.memory.barrier()
        return places.clone()

    def __deepcopy__(self, _: object) -> NodeGather:
        """Itself: a model's copy talks through the same memory."""
        return self


def sizes(pieces: Sequence[Piece]) -> list[int]:
    """Bytes that each piece takes up, with the gap behind it."""
    return [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in pieces]


def cut(memory: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Flat tensors, one for each piece, that lie one after another in a uint8 tensor."""
    offsets = itertools.accumulate(sizes(pieces), initial=0)
    return [
        memory[offset : offset + count * dtype.itemsize].view(dtype)
        for (count, dtype), offset in zip(pieces, offsets, strict=False)
    ]


def share(size: int) -> tuple[mmap.mmap, dict[int, socket.socket]]:
    """Memory of ``size`` bytes, and connections by rank: rank 0's to all others, another's to rank 0.

    Rank 0 hands the memory on through the connections, as an open file that has no name.

    Raises:
        RuntimeError: a rank has ended, or did not come within the time limit of collectives.

    """
    try:
        return shared_by_rank_0(size) if rank() == 0 else shared_with_rank_0(size)
    except TimeoutError:
        raise CollectiveTimeoutError(f"a rank did not come within {timeout():g} s") from None
    except ConnectionError:
        raise PeerGoneError("a rank has ended while others waited for it") from None


def shared_by_rank_0(size: int) -> tuple[mmap.mmap, dict[int, socket.socket]]:
    """See :func:`share`."""
    # A name that starts with \0 is in no file system, and found by processes of the same network namespace only.
    address = f"\0flyte-ddp-{secrets.token_hex(16)}"
    peers: dict[int, socket.socket] = {}
    file = os.memfd_create("flyte-ddp")
    os.ftruncate(file, size)
    with new_socket() as listener:
        listener.bind(address)
        listener.listen(world_size())
        from_rank_0(address)
        while len(peers) < world_size() - 1:
            peer, _ = listener.accept()
            peer.settimeout(timeout())
            if not (number := peer.recv(LONGEST_MESSAGE)):
                raise ConnectionResetError
            peers[int(number)] = peer
            socket.send_fds(peer, [b"memory"], [file])
    return mapped(file, size), peers


def shared_with_rank_0(size: int) -> tuple[mmap.mmap, dict[int, socket.socket]]:
    """See :func:`share`."""
    peer = new_socket()
    peer.connect(from_rank_0(""))
    peer.send(str(rank()).encode())
    _, files, _, _ = socket.recv_fds(peer, LONGEST_MESSAGE, 1)
    if not files:
        raise ConnectionResetError
    return mapped(files[0], size), {0: peer}


def mapped(file: int, size: int) -> mmap.mmap:
    """An open file's contents; the file is closed."""
    memory = mmap.mmap(file, size)
    os.close(file)
    return memory


def new_socket() -> socket.socket:
    """A socket between processes of one machine, which keeps messages apart."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout())
    return made


def send(peer: socket.socket, other: int) -> None:
    """Tells another rank that this one is here, or raises RuntimeError if that has ended."""
    try:
        peer.send(b"here")
    except ConnectionError:
        raise gone(other) from None


def receive(peer: socket.socket, other: int) -> None:
    """Waits until another rank is here, or raises RuntimeError if it has ended or does not come."""
    try:
        message = peer.recv(LONGEST_MESSAGE)
    except TimeoutError:
        raise CollectiveTimeoutError(f"rank {other} did not come within {peer.gettimeout():g} s") from None
    except ConnectionError:
        message = b""
    if not message:
        raise gone(other)


def gone(other: int) -> PeerGoneError:
    """The error for a rank whose connection is closed."""
    return PeerGoneError(f"rank {other} has ended while others waited for it")
