"""A small language model on Python's own source text with `transformers.Trainer`; nothing is downloaded."""

from __future__ import annotations

import argparse
import string
import textwrap
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH = 64


def get_dataset() -> list[dict[str, torch.Tensor]]:
    source = b"".join(Path(module.__file__).read_bytes() for module in (string, textwrap, argparse))
    pieces = [source[at : at + LENGTH] for at in range(0, len(source) - LENGTH, LENGTH)]
    return [{"input_ids": torch.tensor(list(piece)), "labels": torch.tensor(list(piece))} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    set_seed(42)

    arguments = TrainingArguments(
        "transformers-out",
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=args.cpu,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4)),
        args=arguments,
        train_dataset=get_dataset(),
    )
    trainer.train()
    print(f"step {trainer.state.global_step}: {trainer.state.log_history[-2]}")


if __name__ == "__main__":
    main()
