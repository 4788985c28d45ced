"""The addresses at which the processes of a run wait for connections, from /proc."""

from contextlib import suppress
from pathlib import Path

from torch import ones
from torch.distributed import all_reduce, init_process_group

LISTENING = "0A"  # linux/tcp_states.h
LOOPBACKS = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def list_new_ports(root: int, before: dict[str, str]) -> list[str]:
    """Return the new ports beyond the loopback, by :func:`list_open_ports`. Runs as a rank's function."""
    init_process_group("gloo")
    all_reduce(ones(1))  # afterwards all connections of the ranks exist
    new = {socket: address for socket, address in list_open_ports(root).items() if socket not in before}
    assert new, "the ranks' own at least"
    all_reduce(ones(1))
    return sorted(address for address in new.values() if address.partition(":")[0] not in LOOPBACKS)


def list_open_ports(root: int) -> dict[str, str]:
    """Return hexadecimal address and port of each socket at which ``root`` and its descendants listen."""
    sockets = {link for process in [root, *descendants(root)] for link in list_sockets(process)}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and (socket := f"socket:[{rest[5]}]") in sockets:
                found[socket] = local
    return found


def descendants(root: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for known in found:
        found += [process for process, parent in parents.items() if parent == known]
    return found[1:]


def list_sockets(process: int) -> list[str]:
    links = []
    with suppress(OSError):
        for name in Path(f"/proc/{process}/fd").iterdir():
            links.append(str(name.readlink()))
    return links
