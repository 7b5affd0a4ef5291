"""Going back after a divergence, as options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ckpt_engine.config.fields import Count, Section, one_of


class Rollback(Section):
    """What a restart does about a run whose loss has diverged."""

    on: Annotated[Literal["nan", "loss_spike"], one_of("nan", "loss_spike")] = Field(
        description="What ends training and makes the next start go back: as for guard."
    )
    skip_batches: Count = Field(
        default=100, description="Batches that each rank leaves out from there on; whole optimizer steps."
    )
    at_most: Count = Field(default=3, description="Rollbacks in a run; one more divergence ends it for good.")
