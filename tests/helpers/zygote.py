"""A process with the imports of Flyte's SDKs, ranks and this library. Each fork of it becomes a fresh interpreter.

A command that trains then takes about a quarter of the CPU time. A fork behaves like ``python -c CODE`` or ``python
SCRIPT``: it has separate arguments, environment, directory, files and signals, and is a child of the requesting
process. The modules of torch, matplotlib and the library are hidden until an import. If a fork finds the library in
another folder, as a pod does, the fork imports the files of that folder. flytekit itself is not imported, because its
import reads the environment. ``/proc`` shows the zygote's command line and environment for all forks, but a separate
name for each fork.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pkgutil
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

COMMANDS = (
    "flytekit.clis.sdk_in_container.pyflyte",
    "flytekit.bin.entrypoint",
    "flyte._bin.runtime",
    "flyte.cli._run",
    "flyte.io",
    "flyte.remote",
    "flyte._internal.runtime.entrypoints",
    "flyte._internal.runtime.task_serde",
)
SCRIPT_NAMES = ("flyte", "a0")  # of Flyte 2
LIBRARY = "flyte_ddp"
# flytekit imports our plugin by its entry point. Both SDKs read the environment when they are imported.
LEFT_OUT = ("flytekit", "flytekitplugins", "flyte", "flyteplugins", LIBRARY)
RANKS = ("torch", "torch._dynamo", "torchvision.models")
PAGES = ("matplotlib.figure", "matplotlib.style", "matplotlib.ticker", "jinja2", "PIL.Image")
NAME = "zygote"
# linux/prctl.h. flyte_ddp.core.machine.process has these calls, too. An import here would load this repository's module
# into each fork, but a pod must run the registered version.
PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 15, 36, 37
MOST_FILES = 64
HELPERS = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent
# Contains matplotlib's list of fonts. A folder for each home would cost a second for every training run.
MATPLOTLIB = Path(tempfile.gettempdir()) / f"flyte-ddp-tests-matplotlib-{os.getuid()}"
HIGH = 512  # above the numbers that a fork gives its files
cold_popen = subprocess.Popen
cold_spawn = util.spawnv_passfds


class Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loaded modules that stay hidden until an import of any of the modules.

    The library's modules stay hidden for ever if the first import finds another file. The module ``first`` is imported
    before the hidden modules appear (empty: none).
    """

    def __init__(self, modules: dict[str, types.ModuleType], first: str = "") -> None:
        self.modules, self.first = modules, first
        self.specs = {name: module.__spec__ for name, module in modules.items()}
        for name in modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        sys.meta_path.remove(self)
        if name.partition(".")[0] == LIBRARY:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is None or found.origin != self.specs[name].origin:
                return None
        if self.first:
            importlib.import_module(self.first)
        sys.modules.update(self.modules)
        del sys.modules[name]  # otherwise Python would load the module again
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.specs[module.__name__]


def main(number: int) -> None:
    """Serve requests from an open socket. In a fork, run the requested program."""
    set_name(NAME)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as ranks have it, before torch is imported
    os.environ["MPLCONFIGDIR"] = str(MATPLOTLIB)
    gc.disable()
    import_for_commands()
    launchers = import_library("torch", "scipy")
    groups = [import_group(group) for group in (RANKS, PAGES)]
    ranks = import_library("scipy")  # few forks need scipy, which takes long
    for group in groups:
        Hidden(group)
    Hidden(launchers)
    Hidden(ranks, "torch")
    gc.collect()
    gc.freeze()  # the collector writes to objects, and written memory is no longer shared
    gc.enable()
    become(serve(socket.socket(fileno=number)), sys.path[1:])


def run(arguments: list[str]) -> NoReturn:
    """Run the fork's program, and end the process."""
    option, *others = arguments
    sys.argv = ["-c", *others[1:]] if option == "-c" else arguments
    sys.modules["__main__"] = types.ModuleType("__main__")
    code: Any = 0
    try:
        if option == "-c":
            exec(others[0], vars(sys.modules["__main__"]))
        else:
            runpy.run_path(option, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # a normal exit spends a second on torch


def import_for_commands() -> None:
    """Import the packages that flytekit imports. A fork finds the names."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for name in COMMANDS:
            importlib.import_module(name)
        with os.fdopen(write, "w") as file:
            json.dump([name for name in sys.modules if name.partition(".")[0] not in LEFT_OUT], file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        names = json.load(file)
    os.waitpid(pid, 0)
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def import_group(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Import modules. Return all newly imported modules except the standard library's."""
    before = {*sys.modules}
    for name in names:
        importlib.import_module(name)
    return {name: sys.modules[name] for name in sys.modules.keys() - before if not is_standard(name)}


def import_library(*without: str) -> dict[str, types.ModuleType]:
    """Import the library's modules that need none of the packages. Return the newly imported modules."""
    before = {*sys.modules}
    blocked = [name for name in without if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # an import of None fails
    for found in pkgutil.walk_packages(importlib.import_module(LIBRARY).__path__, f"{LIBRARY}."):
        if not found.name.endswith(".__main__"):
            with suppress(ImportError):
                importlib.import_module(found.name)
    for name in blocked:
        del sys.modules[name]
    return {name: sys.modules[name] for name in sys.modules.keys() - before if name.partition(".")[0] == LIBRARY}


def is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request until the socket is closed. Return the request in each fork."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a whole process group may get these signals
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, MOST_FILES)
        if not message:
            os._exit(0)
        said, says = os.pipe()
        goes, go = os.pipe()
        if not (between := os.fork()):
            # When the process between ends, Linux makes the fork a child of the subreaper, the requesting process.
            if os.fork():
                os._exit(0)
            request = {**json.loads(message), "files": files}
            if request["session"]:
                os.setsid()  # before a signal can be sent to the session's processes
            os.write(says, str(os.getpid()).encode())
            for number in (requests.detach(), said, says, go):
                os.close(number)
            os.read(goes, 1)
            os.close(goes)
            return request
        os.waitpid(between, 0)
        requests.send(os.read(said, 32))
        for number in (said, says, goes, go, *files):
            os.close(number)


def become(request: dict[str, Any], path: list[str]) -> NoReturn:
    """Apply the request to this fork, and run the requested program."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, HIGH) for number in request["files"]]
    for number in request["files"]:
        os.close(number)
    for number, other in zip(request["numbers"], high, strict=True):
        os.dup2(other, number)
        os.close(other)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # of the zygote's environment
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    option = request["arguments"][0]
    set_name("python" if option == "-c" else Path(option).name)
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["" if option == "-c" else str(Path(option).absolute().parent), *added, *path]
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    if added:
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            importlib.import_module("sitecustomize")
    if option != "-c":
        with_zygote(path)
    run(request["arguments"])


def with_zygote(path: list[str]) -> None:
    """Start a zygote for the interpreters that this process starts."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        here.close()
        set_name(NAME)
        become(serve(there), path)
    there.close()
    use(Zygote(here))


class Zygote:
    """A process that serves the requests of this one."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.lock = threading.Lock()

    def start(
        self,
        arguments: list[str],
        files: Mapping[int, int],
        directory: str | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        session: bool = False,
    ) -> int:
        """Start ``python ARGUMENTS`` as a child of this process, and return the process id.

        Args:
            files: The open files of the child: numbers in the child, and numbers in this process.
            session: Whether the child leads a new session.
        """
        request = {
            "arguments": arguments,
            "numbers": [*files],
            "directory": directory or os.getcwd(),  # noqa: PTH109
            "environment": {**(os.environ if environment is None else environment)},
            "mask": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))],
            "session": session,
        }
        with self.lock:
            before = become_subreaper()
            socket.send_fds(self.requests, [json.dumps(request).encode()], [*files.values()])
            pid = int(self.requests.recv(32))
            become_subreaper(before)
        return pid


class Popen(subprocess.Popen[Any]):
    """Popen that starts flytekit's commands and Python scripts by a zygote."""

    zygote: Zygote

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *rest = others
        pipes, session, process_group = rest[:6], rest[-2], rest[-1]
        words = [os.fspath(word) for word in args] if isinstance(args, list) else []
        program = find_program(words, (env or os.environ).get("PATH")) if words and not shell else None
        if program is None or preexec_fn is not None or pass_fds or process_group != -1:
            super()._execute_child(args, executable, preexec_fn, *others)
            return
        sys.stdout.flush()
        files = {number: number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))}
        self.pid = self.zygote.start(program, files, cwd and os.fspath(cwd), env, session=session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def find_program(words: list[str], path: str | None) -> list[str] | None:
    """Return script and arguments of a command of Flyte, ``pyflyte...`` or SCRIPT_NAMES, or of ``python SCRIPT``.

    Returns None for any other command.
    """
    if words[0] == sys.executable:
        return words[1:] if len(words) > 1 and words[1].endswith(".py") else None
    script = shutil.which(words[0], path=path)
    if script is None or Path(script).parent != SCRIPTS:
        return None
    name = Path(script).name
    return [script, *words[1:]] if name.startswith("pyflyte") or name in SCRIPT_NAMES else None


def spawnv_passfds(path: Any, arguments: Any, numbers: Any) -> int:
    """Replace multiprocessing's function of this name."""
    if not any("spawn_main" in str(word) for word in arguments):
        return cold_spawn(path, arguments, numbers)
    code = arguments[arguments.index("-c") :]
    return Popen.zygote.start(code, {number: number for number in {0, 1, 2, *map(int, numbers)}})


def use(zygote: Zygote) -> None:
    """Let the zygote start the interpreters that this process starts, as far as possible."""
    Popen.zygote = zygote
    subprocess.Popen = Popen
    util.spawnv_passfds = spawnv_passfds


@contextmanager
def used() -> Iterator[None]:
    """Start a zygote, and use the zygote in the block. Requests wait some seconds until it is ready."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = f"sys.path.insert(0, {str(HELPERS)!r})"
    code = f"import sys; {path}; import zygote; del sys.path[0]; zygote.main({there.fileno()})"
    process = cold_popen([sys.executable, "-c", code], pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
    there.close()
    try:
        with unused(), here:
            use(Zygote(here))
            yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def unused() -> Iterator[None]:
    """Start interpreters as usual in the block."""
    before = subprocess.Popen, util.spawnv_passfds
    subprocess.Popen, util.spawnv_passfds = cold_popen, cold_spawn
    try:
        yield
    finally:
        subprocess.Popen, util.spawnv_passfds = before


def become_subreaper(wanted: bool = True) -> bool:
    """Make this process the parent of orphaned descendants. Return whether it was the parent before."""
    before = ctypes.c_int()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(wanted))
    return bool(before.value)


def set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
