"""What runs on this machine, from /proc."""

from pathlib import Path


def children_of(pid: int) -> list[str]:
    """Command lines of the living children, but for multiprocessing's own, torch's compiler's and the tests'."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
            fields = rest.split()
            command = stat.with_name("cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        own = name.endswith("(zygote") or "resource_tracker" in command or "/torch/_inductor/" in command
        if int(fields[1]) == pid and fields[0] != "Z" and not own:
            found.append(command)
    return found


def living_with(text: str) -> list[str]:
    """Command lines of living processes in whose environment the text is."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text in environment.read_text(errors="replace"):
                found.append(environment.with_name("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
