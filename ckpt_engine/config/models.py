"""The options themselves: frozen pydantic models with their defaults, meanings and JSON Schema.

A new option is one field here.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)

from ckpt_engine.config.locations import MEMORY, SCHEME, parse_location
from ckpt_engine.config.option_types import (
    DURATION_SCHEMA,
    Count,
    Duration,
    Flag,
    LostWork,
    Patterns,
    Rate,
    Share,
    checked,
    one_of,
    parse_count,
    parse_duration_seconds,
    parse_wait_seconds,
    refuse,
)
from ckpt_engine.config.reporting import EventCalls, Log, Status
from ckpt_engine.config.sections import (
    Keep,
    KeepRules,
    ParityParts,
    Preemption,
    Protect,
    ResumeChanges,
    Rollback,
    Seal,
    Section,
)
from ckpt_engine.plugins import CODECS, plugin

SECTION = "section"
"""Tells pydantic that an option is a section here, and no word; no user writes it."""
_OF_LIBRARIES = re.compile("(s3|gs|gcs|az|abfss?)://")
"""Whose options other_names.py knows; another file system may have options of these names."""
MEMORY_SLOTS = 3
"""With a memory tier: one snapshot that is complete, one being staged, one being written."""
LEAST_PARITY = 3
"""Machines of a parity group; two take `replicate`."""
_LOSSY = r"lossy|quanti[sz]ed?|(int|uint|q)-?[2-8]|(fp|float)-?(4|8|16)|bf-?16|bfloat16|float8.*|downcast|half"
"""What people call codecs that lose bits."""


def _tier_list(value: object) -> object:
    """One place or a list of places → a list of mappings."""
    places = list(value) if isinstance(value, list | tuple) else [value]
    return [{"url": place} if isinstance(place, str) else place for place in places]


def _options(value: object) -> dict[str, Any]:
    """A mapping for the storage, as it is."""
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of options for the storage")
    return value


def _not_lossy(value: object) -> object:
    """Everything but codecs that lose bits, which resuming exactly does not allow."""
    is_lossy = isinstance(value, str) and re.fullmatch(_LOSSY, value.lower())
    refuse(
        (
            is_lossy,
            f"{value!r} would lose bits, and the run its exactness: all codecs are lossless; delta is the smallest",
        )
    )
    return value


def _of_a_package(codec: str) -> bool:
    """Whether an installed package registers this codec, and it encodes a tensor by itself."""
    made = plugin(CODECS, codec)
    needs_base = made is not None and made.needs_base
    refuse((needs_base, f"the codec {codec!r} needs the bytes of an older snapshot, which only ours are given"))
    return made is not None


class Tier(Section):
    """A place for snapshots."""

    url: Annotated[str, checked(parse_location), WithJsonSchema({"type": "string", "minLength": 1})] = Field(
        description="A folder, relative to the working directory if not absolute, or a storage URL such as "
        "s3://bucket/run, or memory. Environment variables and a leading ~ are replaced."
    )
    every: Duration | None = Field(
        default=None, description="Time between snapshots on this tier; without it as failures and bytes make worth."
    )
    every_n_steps: Count | None = Field(default=None, description="Steps between snapshots on this tier.")
    replicate: Count | None = Field(
        default=None,
        description="Of the memory tier of several machines: so many further machines have each rank's share (1).",
    )
    parity: (
        Annotated[
            Annotated[Count, Tag("count")] | Annotated[ParityParts, Tag(SECTION)],
            Discriminator(lambda value: "count" if isinstance(value, int | float | str) else SECTION),
        ]
        | None
    ) = Field(
        default=None,
        description="Of the memory tier of several machines: so many (3 or more) keep parity of each other's shares. "
        "Of another tier: how many parts of a data file may be lost, such as {data: 8, parity: 2}.",
    )
    keep: KeepRules | None = Field(default=None, description="Retention of this tier, instead of the general one.")
    protect: Protect | None = Field(default=None, description="The same of this tier, instead of the general one.")
    bandwidth: Rate | None = Field(
        default=None,
        description="Bytes per second that go to this tier: while copying to a further one, on average to the nearest.",
    )
    concurrency: Count = Field(default=4, description="Requests to the storage at once.")
    on_failure: Annotated[Literal["degrade", "fail"], one_of("degrade", "fail")] = Field(
        default="degrade",
        description="degrade: report a failure, continue with the other tiers, catch up later; fail: stop training.",
    )
    codec: Annotated[
        Literal["raw", "zstd", "byteplane-zstd", "delta", "auto"] | str,
        one_of("raw", "zstd", "byteplane-zstd", "delta", "auto", also=_of_a_package),
        BeforeValidator(_not_lossy),
    ] = Field(
        default="raw",
        description="How the tier stores snapshots: as they are, compressed, as differences to what it has "
        "(delta), or, on a further tier, compressed where its link is slower than encoding (auto). "
        "Also the name of a codec that an installed package registers.",
    )
    storage_options: Annotated[dict[str, Any], checked(_options), WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict, repr=False, description="For the storage: endpoint_url, key, secret, and so on."
    )

    seal: Seal | None = Field(default=None, description="How this tier is sealed, instead of the general way.")

    @property
    def parts(self) -> tuple[int, int] | None:
        """Of a tier with parity of its data files: into how many ranges, and how many parts of parity."""
        return (self.parity.data, self.parity.parity) if isinstance(self.parity, ParityParts) else None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of this machine, or one that looks so."""
        scheme = SCHEME.match(self.url)
        return scheme is None or scheme[1].lower() == "file"

    def for_storage(self) -> dict[str, Any]:
        """`storage_options` with what else the storage has to know; a local folder takes only how it is sealed."""
        sealed = {"seal": self.seal.model_dump(exclude_unset=True)} if self.seal is not None else {}
        if self.is_folder:
            return {**self.storage_options, **sealed}
        protection = {"protect_days": self.protect.days} if self.protect is not None else {}
        return {"concurrency": self.concurrency, **protection, **self.storage_options, **sealed}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        is_memory, replicate, parity = self.url == MEMORY, self.replicate, self.parity
        is_mirrored = replicate is not None or parity is not None
        taken = {"url", "every", "every_n_steps", "replicate", "parity", *(["bandwidth"] if is_mirrored else [])}
        more = sorted(self.model_fields_set - taken)
        if _OF_LIBRARIES.match(self.url) and self.storage_options.get("transport") != "obstore":
            from ckpt_engine.config.other_names import OTHER_STORAGE_NAMES  # only a store needs it

            called = {name: OTHER_STORAGE_NAMES.get(name) for name in self.storage_options}
            refuse(*((here, f"{name} in storage_options is called {here} here") for name, here in called.items()))
        refuse(
            (self.every is not None and self.every_n_steps is not None, "give either every or every_n_steps"),
            (
                is_memory and more,
                f"the memory tier takes every or every_n_steps: remove its {' and '.join(more)}",
            ),
            (
                replicate is not None and (not is_memory or replicate > 1),
                "replicate is 1, and for the memory tier only",
            ),
            (
                isinstance(parity, int) and (not is_memory or parity < LEAST_PARITY),
                f"parity is a number of machines from {LEAST_PARITY} on, and for the memory tier only; "
                "two machines take replicate: 1, another tier takes {data: 8, parity: 2}",
            ),
            (is_memory and isinstance(parity, ParityParts), "parity of the memory tier is a number of machines"),
            (replicate is not None and parity is not None, "give either replicate or parity"),
        )
        return self


class Tiers(tuple[Tier, ...]):
    """The durable tiers, nearest first; `memory` is the tier before them, if there is one."""

    memory: Tier | None = None

    @classmethod
    def of(cls, listed: tuple[Tier, ...]) -> Self:
        """The tiers as they are written, `memory` first among them or not there at all."""
        tiers = cls(tier for tier in listed if tier.url != MEMORY)
        tiers.memory = next((tier for tier in listed if tier.url == MEMORY), None)
        return tiers

    @property
    def listed(self) -> tuple[Tier, ...]:
        """As they are written."""
        return (self.memory, *self) if self.memory is not None else tuple(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiers) and self.listed == other.listed

    def __ne__(self, other: object) -> bool:
        return not self == other  # the one of tuple would not see `memory`


class Config(Section):
    """Options of a run. Durations are in seconds once loaded.

    Examples:
        >>> config = Checkpointer("ckpt.yaml").config
        >>> config.overhead, [tier.url for tier in config.tiers]
    """

    overhead: Share = Field(
        default=0.01, description="Share of training time that snapshots may cost; the frequency follows."
    )
    max_lost_work: LostWork | None = Field(
        default=None,
        description="Work that a failure of the process or the machine may cost at worst; or one limit for each of "
        "process, machine and site (the nearest tier is lost too).",
    )
    mtbf: Annotated[
        Literal["auto"] | float,
        checked(parse_duration_seconds, also="auto"),
        WithJsonSchema({"anyOf": [{"const": "auto"}, *DURATION_SCHEMA["anyOf"]]}),
    ] = Field(
        default="auto",
        description="Mean time between failures of the job, as far as it is known; auto assumes 12 h, less with many "
        "ranks. Either way the run's own attempts correct it.",
    )
    every_n_steps: Count | None = Field(
        default=None,
        description="A snapshot at every multiple of N steps; without overhead or max_lost_work at no other interval.",
    )
    every_seconds: Duration | None = Field(
        default=None,
        description="A snapshot when the last one is that old; without overhead or max_lost_work at no other interval.",
    )
    at_steps: tuple[Count, ...] = Field(default=(), description="Also a snapshot at each of these steps.")
    on_validation_end: Flag = Field(default=False, description="Also a snapshot after each validation.")
    at_end: Flag = Field(default=True, description="A snapshot of the final state when training ends.")
    wait_at_end: Annotated[
        float,
        checked(parse_wait_seconds),
        WithJsonSchema({**DURATION_SCHEMA, "anyOf": [{"type": "number", "minimum": 0}, DURATION_SCHEMA["anyOf"][1]]}),
    ] = Field(
        default=600,
        description="How long a training that ends waits for the copies to further tiers; 0: not at all. What is "
        "missing then the writer process copies, or the next run.",
    )
    keep: KeepRules = Field(default_factory=Keep, description="Which snapshots are kept.")
    protect: Protect | None = Field(default=None, description="How long every snapshot stays, whatever retention says.")
    seal: Seal | None = Field(default=None, description="Encrypt and sign all that is written; see docs/seal.md.")
    tiers: Annotated[
        tuple[Tier, ...],
        BeforeValidator(_tier_list, json_schema_input_type=str | Tier | Annotated[list[str | Tier], MinLen(1)]),
    ] = Field(description="Where snapshots go: a folder or storage URL, or a list of these, nearest first.")
    preemption: Preemption = Field(
        default_factory=Preemption, description="Who may stop the run, and how long it then has."
    )
    status: Status = Field(default_factory=Status, description="Where the run says how it stands.")
    log: Log = Field(default_factory=Log, description="What the run shows of its snapshots.")
    on: EventCalls = Field(default_factory=EventCalls, description="What is called when something happens.")
    guard: Annotated[Literal["off", "nan", "loss_spike"], one_of("off", "nan", "loss_spike")] = Field(
        default="off",
        description="Training ends, and no snapshot is taken of it, when the loss is not finite (nan), or also when it "
        "stays far above its usual values (loss_spike).",
    )
    rollback: Rollback | None = Field(
        default=None,
        description="As guard, and the next start goes back to the newest snapshot from before, and skips batches.",
    )
    resume: (
        Annotated[
            Annotated[Literal["auto", "off"], one_of("auto", "off"), Tag("word")]
            | Annotated[ResumeChanges, Tag(SECTION)],
            Discriminator(lambda value: SECTION if isinstance(value, dict | ResumeChanges) else "word"),
        ]
        | None
    ) = Field(
        default=None,
        description="auto: a start resumes from the newest snapshot, without a word in the script; off: it never does, "
        "and what is there stays. Not given: Lightning's ckpt_path and transformers' resume_from_checkpoint say it; "
        "Accelerate and track resume. A section: auto, with changes that are made once.",
    )
    on_error: Annotated[Literal["raise_at_end", "raise", "warn"], one_of("raise_at_end", "raise", "warn")] = Field(
        default="raise_at_end",
        description="A snapshot that fails in the background is reported, and the end of training raises an error if "
        "its last state is durable nowhere; raise: the first failure stops training at the next step; warn: all "
        "failures are only reported.",
    )
    writer: Annotated[Literal["process", "thread"], one_of("process", "thread")] = Field(
        default="process", description="What writes snapshots: a process that outlives the trainer, or a thread of it."
    )
    linger: Duration = Field(
        default=300,
        description="How long the writer of a trainer that died keeps its last snapshot in memory for a restarted one; "
        "only with the memory tier.",
    )
    slots: Annotated[
        int, checked(partial(parse_count, most=64)), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 64})
    ] = Field(
        default=2,
        description="Snapshots that fit in host memory at once: one staged while one is written; with the memory tier "
        "at least 2, and 3 unless given, as one is always complete.",
    )
    lazy: Annotated[Literal["auto", "on", "off"], one_of("auto", "on", "off")] = Field(
        default="auto",
        description="auto, on: copy tensors on a GPU while the next forward and backward run, and prove each copy; "
        "off: copy them before training continues. Host memory is always copied before training continues.",
    )

    rng: Annotated[Literal["derive", "warn", "strict"], one_of("derive", "warn", "strict")] = Field(
        default="derive",
        description="Random streams when another number of ranks resumes: derive makes those of new ranks from the "
        "saved ones; warn gives rank r those of saved rank r mod their number, and says so; strict refuses.",
    )

    data: Annotated[Literal["refuse", "restart_epoch", "continue"], one_of("refuse", "restart_epoch", "continue")] = (
        Field(
            default="refuse",
            description="When a run resumes in the middle of an epoch and its loader has changed: refuse; "
            "restart_epoch starts that epoch again at its first sample; continue uses the samples that are "
            "left, in batches of the new loader, as far as that is known. Between epochs a changed loader is taken and "
            "reported.",
        )
    )
    hidden: Annotated[Literal["auto", "report", "off"], one_of("auto", "report", "off")] = Field(
        default="auto",
        description="Attributes that training changes and no state_dict has: auto saves them, and restores them where "
        "the new process begins with the same values; report only names them; off does not look.",
    )

    replay: Annotated[Literal["warn", "stop", "off"], one_of("warn", "stop", "off")] = Field(
        default="warn",
        description="When a resumed run repeats a step otherwise than the earlier process did it: warn says so; stop "
        "ends the run before anything is saved or removed; off records no steps.",
    )
    pickle: Patterns = Field(
        default=(),
        description="Paths in the state (* and ? match) that may be stored with pickle. Loading these can run code.",
    )

    @field_validator("tiers", mode="after")
    @classmethod
    def _tiers_fit_together(cls, listed: tuple[Tier, ...], info: ValidationInfo) -> Tiers:
        general = {name: info.data[name] for name in ("protect", "seal") if info.data.get(name) is not None}
        listed = tuple(
            tier.model_copy(update={name: given for name, given in general.items() if getattr(tier, name) is None})
            if tier.url != MEMORY
            else tier
            for tier in listed
        )
        tiers = Tiers.of(listed)
        more = ", too: memory does not outlive the machine" if listed else ""
        refuse(
            (
                any(tier.url == MEMORY for tier in listed[1:]),
                "the memory tier is the nearest one: it comes first, and once",
            ),
            (not tiers, f"must name a folder or storage URL{more}"),
        )
        first, places = tiers[0], {tier.url.removeprefix("file://").rstrip("/") for tier in tiers}
        given = [name for name in ("every", "every_n_steps") if getattr(first, name) is not None]
        refuse(
            (given, f"the nearest tier takes every durable snapshot: remove its {' and '.join(given)}"),
            (
                first.codec == "auto",
                "auto weighs the link of a further tier: give the nearest one a codec by name, or none",
            ),
            (
                first.codec == "delta" and not first.is_folder,
                "delta reads back what is there: the nearest tier has to be a folder for it",
            ),
            (len(places) < len(tiers), "two tiers are the same place"),
        )
        return tiers

    @field_serializer("tiers", mode="wrap")
    def _tiers_as_written(self, tiers: tuple[Tier, ...], serialize: SerializerFunctionWrapHandler) -> Any:
        return serialize(tiers.listed if isinstance(tiers, Tiers) else tiers)

    @field_validator("rollback", "writer", "slots", mode="after")
    @classmethod
    def _fits_the_options_before(cls, value: Any, info: ValidationInfo) -> Any:
        has_memory = getattr(info.data.get("tiers"), "memory", None) is not None
        rules: dict[str | None, tuple[object, str]] = {
            "rollback": (
                value is not None and info.data.get("guard", "off") != "off",
                "is a guard itself: remove guard",
            ),
            "writer": (
                has_memory and value == "thread",
                "the memory tier needs a writer that outlives the trainer: must be 'process'",
            ),
            "slots": (
                has_memory and value == 1,
                "must be at least 2 with the memory tier: one snapshot in it is always complete",
            ),
        }
        refuse(rules[info.field_name])
        return value

    @property
    def memory(self) -> Tier | None:
        """The memory tier; only its rhythm is of use."""
        return self.tiers.memory if isinstance(self.tiers, Tiers) else None

    @property
    def resume_word(self) -> Literal["auto", "off"] | None:
        """The option `resume`, in which a section of changes counts as auto."""
        return "auto" if isinstance(self.resume, ResumeChanges) else self.resume

    @property
    def arena_slots(self) -> int:
        """Snapshots that are to fit in host memory at once."""
        given = "slots" in self.model_fields_set
        return self.slots if given or self.memory is None else max(self.slots, MEMORY_SLOTS)

    @property
    def root_url(self) -> str:
        """The run's root: an absolute folder path, or the URL as given."""
        return self.tiers[0].url

    @property
    def root_keep(self) -> Keep:
        """The retention that holds at the run's root."""
        return self.tiers[0].keep or self.keep

    def keep_rules(self, tier: Tier) -> dict[str, Any]:
        """The retention that holds on a tier as plain JSON: only the rules that are set, and `protect_days`.

        Args:
            tier: one of `tiers`.
        """
        rules = (tier.keep or self.keep).model_dump(mode="json", exclude_none=True)
        return {**rules, "protect_days": tier.protect.days} if tier.protect is not None else rules

    def options(self) -> dict[str, Any]:
        """The options that were given, as JSON values; `load_config` makes an equal `Config` of them."""
        return self.model_dump(mode="json", exclude_unset=True)


OPTION_NAMES: tuple[str, ...] = tuple(Config.model_fields)
"""Names of the top-level options, which are also the keywords of `Checkpointer` and of both `AdaptiveCheckpoint`s."""
