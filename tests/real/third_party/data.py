"""Data that programs of others train on: small, and made here."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel, BertTokenizer, GPT2Config, GPT2LMHeadModel

from tests.real.third_party.lines import edit


def characters(folder: Path) -> None:
    """nanoGPT's data: its own source text."""
    place = folder / "data" / "own"
    place.mkdir(parents=True)
    text = (folder / "model.py").read_bytes()
    for name, part in (("train", text[:12_000]), ("val", text[12_000:15_000])):
        (place / f"{name}.bin").write_bytes(b"".join(bytes((byte, 0)) for byte in part))
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def words(folder: Path) -> None:
    """A language model's data: its own source text, as its corpus has 10 MB."""
    place = folder / "data" / "wikitext-2"
    place.mkdir(parents=True)
    lines = (folder / "main.py").read_text().splitlines()
    for name, part in (("train", lines), ("valid", lines[:60]), ("test", lines[60:120])):
        (place / f"{name}.txt").write_text("\n".join(part) + "\n")


def waves(folder: Path) -> None:
    """Sine waves, shorter than those of the program's own generator."""
    shifts = np.random.default_rng(2).integers(-80, 80, 10).reshape(10, 1)
    torch.save(np.sin((np.arange(60) + shifts) / 20.0), folder / "traindata.pt")
    # It is older than the default weights_only=True.
    edit(
        folder / "train.py",
        [("    data = torch.load('traindata.pt')", "    data = torch.load('traindata.pt', weights_only=False)")],
    )


def shakespeare(folder: Path) -> None:
    """minGPT's data is there; CPUs and a seed, which the program has not, are made here."""
    edit(
        folder / "trainer.py",
        [
            (
                '        self.local_rank = int(os.environ["LOCAL_RANK"])',
                '        self.local_rank = torch.device("cpu")',
            ),
            (
                '        self.device: torch.device = torch.device(f"{self.acc}:{self.local_rank}")',
                '        self.device = torch.device("cpu")',
            ),
            (
                "        self.model = DDP(self.model, device_ids=[self.local_rank])",
                "        self.model = DDP(self.model)",
            ),
        ],
    )
    edit(
        folder / "main.py",
        [
            ("    acc = torch.accelerator.current_accelerator()", '    return init_process_group("gloo")'),
            ("    if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "    if False:"),
            ("    dataset = CharDataset(data_cfg)", "    torch.manual_seed(1)\n    dataset = CharDataset(data_cfg)"),
        ],
    )


WORDS = ("a", "boat", "cat", "drew", "every", "fish", "green", "hill", "ice", "jumps", "kind", "lake", "moon", "near")


def sentences(count: int, seed: int) -> Iterator[str]:
    """Of a few words each."""
    draw = random.Random(seed)
    return (" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(count))


def bert(place: Path) -> None:
    """A small model with random weights, and its tokenizer."""
    torch.manual_seed(1)
    place.mkdir(parents=True)
    (place / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)))
    BertTokenizer(str(place / "vocab.txt"), model_max_length=32).save_pretrained(place)
    config = BertConfig(vocab_size=len(WORDS) + 5, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    config.intermediate_size, config.max_position_embeddings = 32, 32
    BertModel(config).save_pretrained(place)


def rows(place: Path, name: str, columns: Callable[[int, str, str], Mapping[str, Any]]) -> None:
    """A dataset of pairs of sentences that `load_dataset` finds under the name of its folder."""
    place.mkdir(parents=True)
    files = []
    for number, (split, count) in enumerate((("train", 640), ("validation", 24), ("test", 24))):
        pairs = zip(sentences(count, number), sentences(count, number + 9), strict=True)
        lines = [json.dumps(columns(at, *pair)) for at, pair in enumerate(pairs)]
        (place / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        files.append(f"  - split: {split}\n    path: {split}.jsonl\n")
    (place / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{''.join(files)}---\n", encoding="utf-8"
    )


def glue(folder: Path) -> None:
    """What the examples of Accelerate load: a model, pairs of sentences, and a metric that needs no network."""
    bert(folder / "bert-base-cased")
    rows(
        folder / "nyu-mll" / "glue",
        "mrpc",
        lambda at, one, other: {"idx": at, "sentence1": one, "sentence2": other, "label": len(one) % 2},
    )
    (folder / "evaluate.py").write_text(
        "class Metric:\n"
        "    seen = []\n"
        "    def add_batch(self, predictions, references):\n"
        "        self.seen += (predictions == references).tolist()\n"
        "    def compute(self, predictions=(), references=()):\n"
        "        self.seen += [bool(one == other) for one, other in zip(predictions, references)]\n"
        "        accuracy, self.seen[:] = sum(self.seen) / len(self.seen), []\n"
        "        return {'accuracy': accuracy, 'f1': accuracy}\n"
        "def load(*names, **options):\n"
        "    return Metric()\n"
    )


def similar(folder: Path) -> None:
    """Pairs of sentences with a score."""
    bert(folder / "bert")
    rows(
        folder / "sentence-transformers" / "stsb",
        "default",
        lambda at, one, other: {"sentence1": one, "sentence2": other, "score": len(one) % 7 / 7},
    )
    precision = "    fp16=True,  # Set to False if you get an error that your GPU can't run on FP16"
    edit(folder / "training_stsbenchmark.py", [(precision, "    fp16=False,")])


def texts(folder: Path) -> None:
    """Texts, and a small GPT-2 for them."""
    rows(folder / "texts", "default", lambda at, one, other: {"text": f"{one} {other}"})
    torch.manual_seed(1)
    bert(folder / "gpt")
    tokenizer = BertTokenizer.from_pretrained(folder / "gpt", pad_token="[PAD]", eos_token="[SEP]")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt")
    tokenizer.save_pretrained(folder / "gpt")


def series(folder: Path) -> None:
    """A shorter series, on CPUs and with a seed, which the program has not."""
    edit(
        folder / "ar.py",
        [
            (
                "data = generate_ar_data(seasonality=10.0, timesteps=400, n_series=100)",
                "pl.seed_everything(1)\ndata = generate_ar_data(seasonality=10.0, timesteps=120, n_series=40)",
            ),
            ('    accelerator="gpu",', '    accelerator="cpu",'),
            ("    limit_train_batches=30,", "    limit_train_batches=8,"),
            ("torch.set_num_threads(10)", "torch.set_num_threads(1)"),
        ],
    )
