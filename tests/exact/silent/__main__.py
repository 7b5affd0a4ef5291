"""One process of one script: `python -m tests.exact.silent NAME`, in the folder of its run."""

from __future__ import annotations

import os
import sys
import warnings

import torch

from tests.exact.silent import SCRIPTS
from tests.support.digests import seed_everything

warnings.simplefilter("ignore")
torch.set_num_threads(1)
seed_everything(int(os.environ["SEED"]))
SCRIPTS[sys.argv[1]]()
