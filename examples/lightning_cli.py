"""LightningCLI: the same training as `lightning_fit.py`, with the callback in YAML.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from lightning_fit import Digits, DigitsData


def main() -> None:
    LightningCLI(Digits, DigitsData)


if __name__ == "__main__":
    main()
