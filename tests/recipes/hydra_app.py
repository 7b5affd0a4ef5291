"""The recipes' training as an application of Hydra: `python hydra_app.py root=ROOT lines=LINES pace=SECONDS`."""

from __future__ import annotations

from typing import Any

import hydra

from tests.recipes.train import train


@hydra.main(version_base=None, config_path=None)
def main(options: Any) -> None:
    train(options.root, options.lines, float(options.pace))


if __name__ == "__main__":
    main()
