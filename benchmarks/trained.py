"""A small transformer really trained on Python's own library, and its states a few steps apart.

Random numbers say nothing about compression: exponents, moments and updates of a real run are what codecs meet.
"""

from __future__ import annotations

import collections
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Arrays = Mapping[str, NDArray[np.generic]]
_TOKEN = re.compile(r"\w+|[^\w\s]|\n[ ]*|[ ]+")


@dataclass(frozen=True, slots=True)
class Model:
    """How large the model is, and how long it is trained before the first state is taken.

    Args:
        late_lr: the learning rate from three quarters of these steps on; None: as before.
    """

    width: int
    layers: int
    vocabulary: int
    context: int
    batch: int
    steps: int
    lr: float = 1e-3
    late_lr: float | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after one step: arrays by role (`p`, `m`, `v`), then by parameter, and the optimizer's settings."""

    step: int
    roles: Mapping[str, Arrays]
    hyper: Mapping[str, float]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64 or 1
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class _Transformer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.places = nn.Embedding(model.context, model.width)
        self.blocks = nn.Sequential(*(_Block(model.width) for _ in range(model.layers)))
        self.norm = nn.LayerNorm(model.width)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        for weights in (self.tokens.weight, self.places.weight, self.head.weight):
            nn.init.normal_(weights, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def train(
    model: Model,
    lags: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, object] | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[Moment]:
    """The states after `model.steps` steps and after so many more as each lag says.

    Args:
        lags: ascending numbers of steps.
        dtype: of weights and moments; float32 is trained under bfloat16 autocast.
        options: further arguments of AdamW (`fused`, `foreach`, ...).
    """
    torch.manual_seed(7)
    text = _corpus(model.vocabulary)
    network = _Transformer(model).to(dtype)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=model.lr, betas=(0.9, 0.95), weight_decay=0.1, **(options or {})
    )
    wanted = {model.steps, *(model.steps + lag for lag in lags)}
    generator = torch.Generator().manual_seed(11)
    for step in range(1, max(wanted) + 1):
        lr = model.lr if model.late_lr is None or step <= 3 * model.steps / 4 else model.late_lr
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / (model.steps / 4))
        starts = torch.randint(len(text) - model.context - 1, (model.batch,), generator=generator)
        rows = torch.stack([text[s : s + model.context + 1] for s in starts.tolist()]).long()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
            logits = network(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            say(f"training: step {step} of {max(wanted)}, loss {loss.item():.2f}")
        if step in wanted:
            yield _moment(network, optimizer, step)


def _moment(network: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Moment:
    roles: dict[str, dict[str, NDArray[np.generic]]] = {"p": {}, "m": {}, "v": {}}
    for name, parameter in network.named_parameters():
        state = optimizer.state[parameter]
        for role, tensor in (("p", parameter.detach()), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
            roles[role][name] = bits(tensor).copy()
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    hyper = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    return Moment(step, roles, {**hyper, "weight_decay": group["weight_decay"], "step": step})


def bits(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The numbers of a tensor as numpy sees them; bfloat16 as 16-bit integers."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.contiguous().numpy()  # type: ignore[no-any-return]


def _corpus(vocabulary: int) -> torch.Tensor:
    """The standard library as numbers of its most frequent tokens; the last number is any other token."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))[:300]
    tokens = [token for file in files for token in _TOKEN.findall(file.read_text(errors="replace"))]
    common = {token: i for i, (token, _) in enumerate(collections.Counter(tokens).most_common(vocabulary - 1))}
    return torch.tensor([common.get(token, vocabulary - 1) for token in tokens], dtype=torch.int32)
