"""What of a run's sources is sent to workers on other hosts."""

import pickle
import sys
import zlib
from pathlib import Path

import pytest

from flyte_ddp.core.launch.remote.sources import LIBRARY, pack_sources, unpack_sources
from flyte_ddp.core.user_code.digest import list_package_files


def test_only_what_the_cache_key_covers_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither data nor secrets nor other modules that lie beside it; on the same host it is not even written."""
    sent = {
        "sources_mine.py": "import sources_kit",
        "sources_kit/__init__.py": "",
        "sources_kit/deep.py": "",
        "sources_set.py": "x = 1",
    }
    kept = [".env", "secrets.yaml", "data/images.npy", "wandb/run-1/files.json", "other.py", "sources_kit/weights.bin"]
    for name, text in {**sent, **dict.fromkeys(kept, "content")}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sources = pack_sources("sources_mine:model", "sources_set:make")
    library = {path.relative_to(LIBRARY.parent).as_posix() for path in list_package_files(LIBRARY)}
    assert {name for _, name, _ in pickle.loads(zlib.decompress(sources))} == {*sent, *library}
    with unpack_sources(sources, str(tmp_path)) as (folder, path):
        assert (folder, {*path}) == (None, {str(tmp_path), str(LIBRARY.parent)})
    (tmp_path / "sources_set.py").write_text("x = 2")
    with unpack_sources(sources, str(tmp_path)) as (folder, path):
        assert path == [folder]
        assert Path(str(folder), "sources_set.py").read_text() == "x = 1"
        there = {p.relative_to(str(folder)).as_posix() for p in Path(str(folder)).rglob("*") if p.is_file()}
        assert there == {*sent, *library}
    assert not Path(str(folder)).exists()
