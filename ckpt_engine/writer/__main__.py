"""Entry point of the writer process: `python -P .../ckpt_engine/writer/__main__.py <socket fd>`.

Run by its path, so that neither the working directory nor the user's script decide which `ckpt_engine` it gets: it is
the one this file belongs to.
"""

import importlib.util
import os
import sys
from pathlib import Path


def _load_package(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[folder.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    package = Path(__file__).resolve().parents[1]
    if package.name not in sys.modules:
        _load_package(package)
    from ckpt_engine.writer.server import main

    # No interpreter shutdown: what must be on disk is, and a thread stuck in a dead file system cannot hold us back.
    os._exit(main(sys.argv[1:]))
