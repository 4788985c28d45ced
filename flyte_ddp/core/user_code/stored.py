"""Import modules from sources in a saved model, beside today's modules of the same names."""

import builtins
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Self


class StoredSpec(str):
    """A ``package.module:callable`` whose modules are imported from ``sources``, also after pickling."""

    __slots__ = ("sources",)
    sources: Mapping[str, str]  # by path, for example package/module.py

    def __new__(cls, spec: str, sources: Mapping[str, str]) -> Self:
        self = super().__new__(cls, spec)
        self.sources = sources
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredSpec, (str.__str__(self), self.sources)

    def __str__(self) -> str:  # str(), which readers of a sidecar call, must keep the sources
        return self


def find_sources(spec: str) -> Mapping[str, str] | None:
    """Return the sources of a StoredSpec, or None for a name whose module is imported as usual."""
    sources: Mapping[str, str] | None = getattr(spec, "sources", None)
    return sources


def import_stored_module(sources: Mapping[str, str], name: str) -> ModuleType:
    """Import the module ``name`` from ``sources`` (texts by relative path), beside today's module of this name.

    Adds an importer to ``sys.meta_path``. Later calls with equal sources return the same module, without running the
    code again.
    """
    importer = StoredImporter(sources)  # importlib.import_module in stored code still finds today's modules
    if not any(getattr(finder, "prefix", "") == importer.prefix for finder in sys.meta_path):
        sys.meta_path.insert(0, importer)
    return importlib.import_module(f"{importer.prefix}.{name}")


class StoredImporter(MetaPathFinder, ExecutionLoader):
    """Finds and loads the modules of a set of sources, below a package whose name contains the sources' digest."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        self.prefix = f"stored_{digest[:12]}"
        self.tops = {PurePosixPath(path).parts[0].removesuffix(".py") for path in sources}
        self.files = {f"{self.prefix}/{path}": source for path, source in sources.items()}
        for path in [*self.files]:  # namespace packages get an empty __init__.py
            for folder in [*PurePosixPath(path).parents][:-1]:
                self.files.setdefault(f"{folder}/__init__.py", "")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if self.get_filename(fullname) in self.files else None

    def is_package(self, fullname: str) -> bool:
        return f"{fullname.replace('.', '/')}/__init__.py" in self.files

    def get_filename(self, fullname: str) -> str:
        """Return the path of a module below the package of the sources. The file does not exist on disk."""
        return fullname.replace(".", "/") + ("/__init__.py" if self.is_package(fullname) else ".py")

    def get_source(self, fullname: str) -> str:
        return self.files[self.get_filename(fullname)]

    def exec_module(self, module: ModuleType) -> None:
        """Run a stored module, whose import statements find the stored sources first.

        Sets ``__file__`` to the path of today's module, so that the module finds data files.
        """
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self.import_module}
        path = PurePosixPath(self.get_filename(module.__name__)).relative_to(self.prefix)
        with suppress(ImportError, ValueError):
            found = importlib.util.find_spec(path.parts[0].removesuffix(".py"))
            if found is not None and found.origin:
                top = Path(found.origin).parents[1 if found.submodule_search_locations else 0]
                module.__file__ = str(top / path)
        super().exec_module(module)

    def import_module(
        self,
        name: str,
        namespace: Mapping[str, object] | None = None,
        variables: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import like ``builtins.__import__``, with the stored sources in place of today's modules."""
        if level or name.partition(".")[0] not in self.tops:
            return builtins.__import__(name, namespace, variables, fromlist or (), level)
        found = builtins.__import__(f"{self.prefix}.{name}", namespace, variables, fromlist or (), 0)
        return found if fromlist else getattr(found, name.partition(".")[0])
