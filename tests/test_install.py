"""What `make install` asks for and refuses, and what `make gpu-check` runs: with a Python and a uv that note calls."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import ROOT

CUDA = re.compile("nvidia-|cuda-|triton$")


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `make install` with an interpreter that claims a version; requirements go to requirements.txt."""
    commands = tmp_path / "venv/bin"
    commands.mkdir(parents=True)

    def run(version: tuple[int, int], *options: str) -> subprocess.CompletedProcess[str]:
        claim = f"import sys; sys.version_info = {(*version, 0)}; exec(sys.argv[2])"
        scripts = {
            "python": f'[ "$1" != -c ] || exec {sys.executable} -c {shlex.quote(claim)} "$@"',
            "uv": f'echo "$@" >> {tmp_path}/uv.txt; case "$*" in *stdin) cat > {tmp_path}/requirements.txt ;; esac',
        }
        for name, script in scripts.items():
            (commands / name).write_text(f"#!/bin/sh\n{script}\n")
            (commands / name).chmod(0o755)
        command = ["make", "--no-print-directory", "install", f"VENV={commands.parent}", *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    return run


def packages(text: str) -> dict[str, str]:
    """Return what a list of requirements has of each package: its version, and in further lines its hashes."""
    blocks = re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE)[1:]
    return {block.partition("==")[0]: block for block in blocks}


def test_another_python_is_refused_in_a_sentence_before_anything_is_downloaded(
    install: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ended = install((3, 13))
    assert ended.returncode != 0
    said = "Python 3.13: flyte-ddp runs on 3.11 and 3.12; for example: make clean train PYTHON="
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "uv.txt").exists()


def test_the_whole_lock_is_installed_by_its_hashes(
    install: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ended = install((3, 12))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "requirements.txt").read_text() == (ROOT / "requirements-dev.lock").read_text()
    assert "--require-hashes" in (tmp_path / "uv.txt").read_text()


def test_for_cpus_it_is_the_lock_without_cuda_and_torch_comes_from_its_own_index(
    install: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    ended = install((3, 11), "CPU=1")
    assert ended.returncode == 0, ended.stderr
    locked = packages((ROOT / "requirements-dev.lock").read_text())
    asked = packages((tmp_path / "requirements.txt").read_text())
    assert len(locked) - len(asked) == len([name for name in locked if CUDA.match(name)]) > 15
    assert {name: text.strip() for name, text in asked.items() if "--hash" not in text} == {
        name: locked[name].split()[0] for name in ("torch", "torchcodec", "torchvision")
    }
    assert all(locked[name] == text for name, text in asked.items() if "--hash" in text)
    assert "--torch-backend cpu" in (tmp_path / "uv.txt").read_text()


def test_gpu_check_takes_the_python_that_is_there_and_installs_nothing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called.txt\n')
    python.chmod(0o755)
    subprocess.run(["make", "gpu-check", f"VENV={tmp_path}/none", f"PYTHON={python}"], cwd=ROOT, check=True)
    calls = ["-m pytest --gpu tests/training/test_gpu.py", "-m benchmarks gpu"]
    assert (tmp_path / "called.txt").read_text().splitlines() == calls
