"""Serves the newest weights of a run with vLLM while it trains. Not run here: it needs vLLM, which needs a GPU.

    python examples/follow_vllm.py RUN MODEL     # MODEL: the base, as vLLM takes it; RUN trains it under the same names

Written for vLLM's `worker_extension_cls` and `LLM.collective_rpc`. Each worker reads the new weights from a file in
memory: only its path goes through the call, and every worker of a model that is divided takes its part.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))  # and in the workers, which import this file by its name:
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


class WeightLoader:
    """What each worker of vLLM gets besides its own methods."""

    model_runner: Any

    def load_changed(self, path: str) -> None:
        """Take the weights of a file, under the names of the checkpoint that the model was loaded from."""
        self.model_runner.model.load_weights(weights=load_file(path).items())


def main() -> None:
    from vllm import LLM, SamplingParams

    from ckpt_engine import follow

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("model")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()

    llm = LLM(args.model, worker_extension_cls="follow_vllm.WeightLoader")
    for step, changed in follow(args.root, component="model"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            save_file({name: one.contiguous().clone() for name, one in changed.items()}, f"{folder}/changed")
            llm.collective_rpc("load_changed", args=(f"{folder}/changed",))
        llm.reset_prefix_cache()  # it was computed with the weights before
        (answer,) = llm.generate([args.prompt], SamplingParams(temperature=0.0, max_tokens=16))
        print(f"step {step}: {len(changed)} tensors are new: {answer.outputs[0].text!r}", flush=True)


if __name__ == "__main__":
    main()
