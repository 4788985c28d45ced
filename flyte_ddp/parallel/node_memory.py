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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flyte_ddp.errors import CollectiveTimeoutError, PeerGoneError
from flyte_ddp.parallel.distributed import from_rank_0, rank, timeout, world_size

LONGEST_MESSAGE = 64
ALIGNMENT = 64  # bytes: every tensor starts on a cache line

Piece = tuple[int, torch.dtype]  # number of elements, and their type


class NodeMemory:
    """Memory that all ranks of the process group map: two halves, each uint8 [size], of zeros at first.

    Double buffering: a fast rank may write one half while slower ranks still read the other. The barrier between two
    uses of a half guarantees that all ranks have finished reading it.

    All ranks make it together, with the same size. ``peers`` are connections by rank: rank 0's to all others, another
    rank's to rank 0. Rank 0 sends the memory through them, as an open file that has no name.
    """

    def __init__(self, size: int) -> None:
        """Map two halves of ``size`` bytes, at least one; OSError if the ranks are not on one machine."""
        self.peers: dict[int, socket.socket] = {}
        size = max(size, 1)
        with translate_socket_errors("a rank", timeout()):
            file = self._offer(2 * size) if rank() == 0 else self._accept()
        self.halves = torch.frombuffer(mmap.mmap(file, 2 * size), dtype=torch.uint8).view(2, size)
        self.turn = 0  # which half is being filled
        os.close(file)

    def _offer(self, size: int) -> int:
        # A name that starts with \0 is in no file system, and found by processes of the same network namespace only.
        address = f"\0flyte-ddp-{secrets.token_hex(16)}"
        file = os.memfd_create("flyte-ddp")
        os.ftruncate(file, size)
        with new_socket() as listener:
            listener.bind(address)
            listener.listen(world_size())
            from_rank_0(address)
            while len(self.peers) < world_size() - 1:
                peer, _ = listener.accept()
                peer.settimeout(timeout())
                self.peers[int(receive(peer))] = peer
                socket.send_fds(peer, [b"memory"], [file])
        return file

    def _accept(self) -> int:
        self.peers[0] = peer = new_socket()
        peer.connect(from_rank_0(""))
        peer.send(str(rank()).encode())
        _, files, _, _ = socket.recv_fds(peer, LONGEST_MESSAGE, 1)
        if not files:
            raise ConnectionResetError
        return files[0]

    def barrier(self) -> None:
        """Wait until all ranks have called this; each then sees what the others wrote, and fills the other half next.

        Every rank sends a message to rank 0 and gets one back: two wake-ups, where the backend's barrier takes more.

        Raises:
            CollectiveTimeoutError: a rank did not come within the time limit of collectives.
            PeerGoneError: a rank has ended.
        """
        for other, peer in self.peers.items():
            with translate_socket_errors(f"rank {other}", peer.gettimeout()):
                if rank() != 0:
                    peer.send(b"here")
                receive(peer)
        if rank() == 0:
            for other, peer in self.peers.items():
                with translate_socket_errors(f"rank {other}", peer.gettimeout()):
                    peer.send(b"here")
        self.turn = 1 - self.turn


class NodeGather:
    """Gathers a few numbers of all ranks, much faster than a collective of gloo. All ranks make it together."""

    def __init__(self, most: int) -> None:
        """``most``: how many numbers a rank may give at once; the same on all ranks."""
        self.memory = NodeMemory(world_size() * most * torch.float64.itemsize)
        self.places = self.memory.halves.view(torch.float64).view(2, world_size(), most)

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return the fp64 [n] of all ranks as [ranks, n]; n is the same on all ranks."""
        places = self.places[self.memory.turn, :, : numbers.numel()]
        places[rank()] = numbers
        self.memory.barrier()
        return places.clone()

    def __deepcopy__(self, _: object) -> NodeGather:
        """Return this object: a model's copy exchanges through the same memory."""
        return self


def sizes(pieces: Sequence[Piece]) -> list[int]:
    """Return the bytes that each piece takes up, with the gap behind it."""
    return [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in pieces]


def cut(memory: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return flat views, one for each piece, that lie one after another in a uint8 tensor."""
    offsets = itertools.accumulate(sizes(pieces), initial=0)
    return [
        memory[offset : offset + count * dtype.itemsize].view(dtype)
        for (count, dtype), offset in zip(pieces, offsets, strict=False)
    ]


def new_socket() -> socket.socket:
    """Return a socket for messages between processes of one machine, with the time limit of collectives."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout())
    return made


def receive(peer: socket.socket) -> bytes:
    """Return the next message; ConnectionResetError if the peer has ended."""
    if not (message := peer.recv(LONGEST_MESSAGE)):
        raise ConnectionResetError
    return message


@contextmanager
def translate_socket_errors(who: str, limit: float | None) -> Iterator[None]:
    """Raise errors of sockets as CollectiveTimeoutError or PeerGoneError that name ``who`` was waited for."""
    try:
        yield
    except TimeoutError:
        raise CollectiveTimeoutError(f"{who} did not come within {limit:g} s") from None
    except ConnectionError:
        raise PeerGoneError(f"{who} has ended while others waited for it") from None
