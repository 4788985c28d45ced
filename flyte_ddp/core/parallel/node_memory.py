"""Memory that the ranks of one machine share, with a barrier. Linux only.

The memory has no name in a file system. So nothing is left behind, and the size of ``/dev/shm`` (64 MB in a pod) is no
limit.
"""

import itertools
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from flyte_ddp.core.errors import CollectiveTimeoutError, PeerGoneError
from flyte_ddp.core.parallel import distributed
from flyte_ddp.core.parallel.distributed import broadcast_object, rank, world_size

LONGEST_MESSAGE = 64
ALIGNMENT = 64  # bytes: every tensor starts on a cache line

Piece = tuple[int, torch.dtype]  # number of elements, and their type


class NodeMemory:
    """Memory that all ranks of the process group map: two halves, uint8 [size] each, with zeros at first.

    A fast rank may write one half while slower ranks still read the other half. The barrier between two uses of a half
    guarantees that all ranks have finished reading.
    """

    def __init__(self, size: int) -> None:
        """Map two halves of ``size`` bytes, at least 1. Collective, with the same size on all ranks."""
        self.peers: dict[int, socket.socket] = {}
        with translate_socket_errors("a rank", distributed.timeout_seconds):
            file = self._create_and_send_memory(2 * size) if rank() == 0 else self._receive_memory_descriptor()
        self.halves = torch.frombuffer(mmap.mmap(file, 2 * size), dtype=torch.uint8).view(2, size)
        self.turn = 0  # which half is being filled
        os.close(file)

    def _create_and_send_memory(self, size: int) -> int:
        """Create shared memory of ``size`` bytes on rank 0, and send its file descriptor to all other ranks.

        Waits for all ranks, and keeps a socket to each rank in ``peers``. Returns the file descriptor.
        """
        # A name that starts with \0 is in no file system, and found by processes of the same network namespace only.
        address = f"\0flyte-ddp-{secrets.token_hex(16)}"
        file = os.memfd_create("flyte-ddp")
        os.ftruncate(file, size)
        with create_socket() as listener:
            listener.bind(address)
            listener.listen(world_size())
            broadcast_object(address)
            while len(self.peers) < world_size() - 1:
                peer, _ = listener.accept()
                peer.settimeout(distributed.timeout_seconds)
                self.peers[int(receive_message(peer))] = peer
                socket.send_fds(peer, [b"memory"], [file])
        return file

    def _receive_memory_descriptor(self) -> int:
        """Connect to rank 0, wait for the shared memory, and return its file descriptor. Collective.

        Keeps the socket in ``peers``. Raises OSError if rank 0 sends no file descriptor.
        """
        self.peers[0] = peer = create_socket()
        peer.connect(broadcast_object(""))
        peer.send(str(rank()).encode())
        _, files, _, _ = socket.recv_fds(peer, LONGEST_MESSAGE, 1)
        if not files:
            raise ConnectionResetError
        return files[0]

    def wait_at_barrier(self) -> None:
        """Wait until all ranks call this method, and set ``turn`` to the other half of the memory, to fill next.

        Afterwards each rank sees the writes of all ranks.

        Raises:
            CollectiveTimeoutError: A rank did not come within ``distributed.timeout_seconds``.
            PeerGoneError: A rank has ended.
        """
        # Every rank sends rank 0 a message and gets a message back: two wake-ups. The backend's barrier takes more.
        steps = [receive_message, send_message] if rank() == 0 else [send_message, receive_message]
        for step in steps:
            for other, peer in self.peers.items():
                with translate_socket_errors(f"rank {other}", peer.gettimeout()):
                    step(peer)
        self.turn = 1 - self.turn


class NodeGather:
    """Gathers a few numbers of all ranks of one machine, faster than gloo. Creation is collective."""

    def __init__(self, max_numbers: int) -> None:
        """Map memory for at most ``max_numbers`` numbers of a rank in a call. Collective."""
        self.memory = NodeMemory(world_size() * max_numbers * torch.float64.itemsize)
        self.places = self.memory.halves.view(torch.float64).view(2, world_size(), max_numbers)

    def __call__(self, numbers: Tensor) -> Tensor:
        """Return all ranks' ``numbers``, fp64 [n], as [ranks, n], by rank. Collective, with the same n on all ranks."""
        places = self.places[self.memory.turn, :, : numbers.numel()]
        places[rank()] = numbers
        self.memory.wait_at_barrier()
        return places.clone()

    def __deepcopy__(self, _: object) -> Self:
        return self  # a copy of a model uses the same memory


def compute_aligned_sizes(pieces: Sequence[Piece]) -> list[int]:
    """Return the size of each piece in bytes, rounded up to a multiple of ALIGNMENT (64 bytes)."""
    return [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in pieces]


def split_memory(memory: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return a flat view of ``memory`` (uint8) for each piece, in the type of the piece.

    The views follow one another, and each begins at a multiple of 64 bytes.
    """
    placed = zip(pieces, itertools.accumulate(compute_aligned_sizes(pieces), initial=0), strict=False)
    return [memory[offset : offset + count * dtype.itemsize].view(dtype) for (count, dtype), offset in placed]


def create_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(distributed.timeout_seconds)
    return made


def send_message(peer: socket.socket) -> None:
    peer.send(b"here")


def receive_message(peer: socket.socket) -> bytes:
    """Wait for a message of another rank, and return it. Raises ConnectionResetError if the rank has ended."""
    if not (message := peer.recv(LONGEST_MESSAGE)):
        raise ConnectionResetError
    return message


@contextmanager
def translate_socket_errors(peer: str, limit: float | None) -> Iterator[None]:
    """Turn socket errors of the block into errors about ``peer``, the name of a rank.

    Raises:
        CollectiveTimeoutError: ``peer`` did not respond within ``limit`` seconds.
        PeerGoneError: ``peer`` has ended.
    """
    try:
        yield
    except TimeoutError:
        raise CollectiveTimeoutError(f"{peer} did not respond within {limit:g} s") from None
    except ConnectionError:
        raise PeerGoneError(f"{peer} exited while other ranks waited") from None
