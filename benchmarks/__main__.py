"""Runs benchmarks by name, or all of them: ``python -m benchmarks [NAME ...]``."""

import argparse
import ast
import importlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks import measuring, rendering
from flyte_ddp.core.errors import StoppedError

NAMES = ["images", "items", "feed", "overhead", "startup", "launchers", "ranks", "rounding", "epoch"]
NAMES += ["flyte2_startup", "table", "gpt", "preset", "cost", "gate", "drift"]
LONG = ["sweep", "published", "chaos", "recovery", "growth", "gpu"]  # run when they are named
CHECKS = ["same_bits"]  # so are these, which have no figures: the exit code says what they found
ALL = [*NAMES, *LONG, *CHECKS]
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the benchmarks named on the command line, and return the exit code.

    If a benchmark fails, the next benchmarks still run.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    named = ", ".join((*LONG, *CHECKS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(NAMES)}; also: {named}")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parser.add_argument("--quick", action="store_true", help="tiny settings for a test; results go to build/")
    parser.add_argument("--repeats", type=int, default=0, help="number of measurements of each side")
    parser.add_argument("--output", type=Path, help="folder of results (benchmarks/results)")
    parser.add_argument("--against", metavar="REV", help="git revision for same_bits (HEAD) and startup (none)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in ALL]:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(ALL)}")
    if arguments.list:
        for name in ALL:
            print(f"{name:<15} {description(name).splitlines()[0]}")
        return 0
    output = arguments.output or (HERE.parent / "build" / "benchmarks" if arguments.quick else HERE / "results")
    names = arguments.names or NAMES
    failed = [
        name for name in names if not (check(name, arguments) if name in CHECKS else run(name, arguments, output))
    ]
    if not {*names} <= {*CHECKS}:
        print(f"results: {os.path.relpath(output / 'README.md')}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def description(name: str) -> str:
    return ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""


def check(name: str, arguments: argparse.Namespace) -> bool:
    """Run a check, and return whether it passed. The check prints the findings.

    Errors of the check are raised.
    """
    print(f"{name}: {description(name).splitlines()[0]}", flush=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-bench-") as folder:
        module = importlib.import_module(f"benchmarks.{name}")
        passed: bool = module.check(Path(folder), arguments.against or "HEAD", quick=arguments.quick)
    print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    return passed


def run(name: str, arguments: argparse.Namespace, output: Path) -> bool:
    """Run a benchmark and write the results. Return whether the benchmark succeeded."""
    print(f"{name}: {description(name).splitlines()[0]}", flush=True)
    load, begin = os.getloadavg()[0], time.perf_counter()
    partial = output / f"{name}.json.partial"  # what there is, until that is all

    def keep(result: measuring.Result) -> None:
        seconds = time.perf_counter() - begin
        measuring.write(partial, description(name), result, quick=arguments.quick, load=load, seconds=seconds)

    try:
        with tempfile.TemporaryDirectory(prefix="flyte-ddp-bench-") as folder:
            against = arguments.against or ""
            options = measuring.Options(arguments.repeats, arguments.quick, Path(folder), output, against, keep)
            result = importlib.import_module(f"benchmarks.{name}").measure(options)
    except StoppedError as error:
        raise SystemExit(f"{name}: {error}") from None
    except Exception:  # one that fails must not stop the others
        traceback.print_exc()
        if partial.exists():
            print(f"  the measurements so far are in {os.path.relpath(partial)}", flush=True)
        return False
    keep(result)
    partial.replace(output / f"{name}.json")
    rendering.render(output)
    for target in result.targets:
        row = {"at_least": target.at_least, "at_most": target.at_most, "unit": target.unit}
        measured = rendering.shown(target.value, target.unit)
        print(f"  {target.what}: {measured} ({rendering.bound(row)}) {rendering.verdict(target.met)}", flush=True)
    print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
