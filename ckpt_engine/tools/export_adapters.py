"""Plans and writes the PEFT adapters of a snapshot as the folder that `PeftModel.from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ckpt_engine.errors import MismatchError
from ckpt_engine.interop.formats import fitting
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.choose import Candidate
from ckpt_engine.state.peft_adapters import NOTE
from ckpt_engine.tools.export_snapshot import Exported, Write, planned
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
        rows = [row for row in manifest.notes.get(NOTE, ()) if row["component"] in manifest.tree]
        misfits = [
            *["has no PEFT model"] * (not rows),
            *[f"has several PEFT models, in {', '.join(row['component'] for row in rows)}: see --only"]
            * (len(rows) > 1),
            *(
                f"has the {one['config']['peft_type']} adapter {name!r}, whose weights PEFT computes {one['why']}"
                for row in rows
                for name, one in row["adapters"].items()
                if Path(name).name != name or not all([one["weights"], *one["weights"].values()])
            ),
            *(f"trains weights that no adapter has: {', '.join(row['beside'][:3])}" for row in rows if row["beside"]),
        ]
        if misfits:
            raise MismatchError(f"{manifest.info.id} cannot become peft: it {misfits[0]}", hint=_HINT)
        whole, adapters = select(manifest, rows[0]["component"]), rows[0]["adapters"]
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
