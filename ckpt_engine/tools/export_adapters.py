"""Plans and writes the PEFT adapters of a snapshot as the folder that `PeftModel.from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_engine.errors import MismatchError
from ckpt_engine.interop.formats import fitting
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate
from ckpt_engine.state.peft_adapters import NOTE
from ckpt_engine.tools.export_snapshot import MODELS, Exported, Write, planned
from ckpt_engine.tools.new_files import new_folder
from ckpt_engine.tools.selection import select
from ckpt_engine.tools.write_arrays import write_arrays

_HINT = "load the snapshot into the model, and model.save_pretrained(OUT) writes what PEFT makes of it"


def plan_adapters(snapshot: Candidate, out: Path) -> tuple[Exported, Write]:
    """What the folder gets, and what writes it.

    Raises:
        MismatchError: there is no PEFT model, or several, or its adapters are not all that it trains.
    """
    manifest = snapshot.manifest
    with fitting("peft", manifest.info.id):
        rows = [(row, name) for row in manifest.notes.get(NOTE, ()) for name in _names(row) if name in manifest.tree]
        if why := next(_misfits(rows), None):
            raise MismatchError(f"{manifest.info.id} cannot become peft: it {why}", hint=_HINT)
        (row, component), *_ = rows
        whole, adapters = select(manifest, component), row["adapters"]
        alone = len(adapters) == 1
        files = {"" if alone or key == "default" else key: whole.named(one["weights"]) for key, one in adapters.items()}

    def write(sources: Sources, force: bool, advance: Callable[[int], object]) -> tuple[str, ...]:
        with new_folder(out, replace=force) as folder:
            for (place, chosen), one in zip(files.items(), adapters.values(), strict=True):
                (folder / place).mkdir(exist_ok=True)
                text = json.dumps({**one["config"], "inference_mode": True}, indent=2, sort_keys=True)
                (folder / place / "adapter_config.json").write_text(text)
                with (folder / place / "adapter_model.safetensors").open("wb") as file:
                    write_arrays(sources, manifest, chosen, file, advance)
        return ()

    arrays = [one for chosen in files.values() for one in chosen.arrays]
    return planned(snapshot, out, "peft", len(arrays), sum(one.nbytes for one in arrays)), write


def _names(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What the component of a PEFT model may be called: Lightning has its model under another name."""
    return (row["component"], MODELS[0]) if row["component"] in MODELS else (row["component"],)


def _misfits(rows: list[tuple[Mapping[str, Any], str]]) -> Iterator[str]:
    """Why the PEFT models of a snapshot cannot be exported."""
    if len(rows) != 1:
        names = ", ".join(name for _, name in rows)
        yield f"has several PEFT models, in {names}: name one with --only" if rows else "has no PEFT model"
    for row, _ in rows:
        for name, one in row["adapters"].items():
            if Path(name).name != name or not all([one["weights"], *one["weights"].values()]):
                yield f"has the {one['config']['peft_type']} adapter {name!r}, whose weights PEFT computes {one['why']}"
        if row["beside"]:
            yield f"trains weights that no adapter has: {', '.join(row['beside'][:3])}"
