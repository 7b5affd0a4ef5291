"""`TransformersCallback`: snapshots of a transformers `Trainer`, with the engine imported when one is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from transformers import TrainerCallback

from accelerate_ckpt.lazy import becomes

if TYPE_CHECKING:
    from transformers import Trainer

    from accelerate_ckpt.transformers_events import TrainerEvents
    from ckpt_engine.adapter import Options
else:
    TrainerEvents = becomes("accelerate_ckpt.transformers_events", "TrainerEvents", TrainerCallback)


class TransformersCallback(TrainerEvents):
    """Exact, asynchronous snapshots of a transformers `Trainer`.

    ```python
    ckpt = TransformersCallback("ckpt.yaml")
    trainer = Trainer(..., callbacks=[ckpt])
    trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer))     # None on a fresh start
    ```

    With `resume="auto"` a plain `trainer.train()` does the same. Without either, training starts fresh, and the
    snapshots that are there stay.

    The trainer's own checkpoints, `load_best_model_at_end` included, stay as they are. With several ranks (`torchrun`)
    each of them makes the callback and calls `resume_from`.

    Args:
        config: a YAML file, a folder or storage URL, or a mapping; see docs/configuration.md.
        options: the same options as keywords; they win over `config`.

    Raises:
        ConfigError: an option is unknown or impossible.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(config, **options)

    def resume_from(self, trainer: Trainer) -> str | None:
        """What to pass as `trainer.train(resume_from_checkpoint=...)`: None if there is no snapshot yet.

        The folder holds the trainer's counters only and is gone once training begins; everything else comes from the
        snapshot.

        Of several ranks each one calls it, and gets a folder of its own.

        Args:
            trainer: the one that has this callback.

        Raises:
            ConfigError: this callback is not one of the trainer's, or the trainer is set up in a way that has no exact
                resume, or the ranks do not all call this for the same run.
            CkptError: this version of transformers lacks something that is needed; names it.
            NoUsableSnapshotError: there are snapshots, and none is usable.
            ResumeError: the newest snapshot is not of a `Trainer`.
            LeaseHeldError, StorageError, WriterError: as `Engine.start`.
        """
        return super().resume_from(trainer)
