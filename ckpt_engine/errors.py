"""The one tree of errors this project raises, each class with a stable code.

```
CkptError                      CKPT000
├── ConfigError                CKPT100   bad YAML key, type or value
├── ArgumentError              CKPT101   an argument of a call that means nothing usable; names it
├── StateError                 CKPT200
│   ├── UnstorableLeafError    CKPT201   a leaf that would need pickle
│   └── MismatchError          CKPT202   snapshot and model do not fit together
├── StorageError               CKPT300
│   ├── StorageFullError       CKPT301   no space or quota left
│   ├── StorageReadOnlyError   CKPT302
│   ├── StorageMissingError    CKPT303   root or object does not exist
│   ├── StorageExistsError     CKPT304   create-only write met an existing object
│   ├── NotAFolderError        CKPT305
│   └── StorageStalledError    CKPT306   nothing was accepted for too long; what was asked still hangs
├── FormatError                CKPT400
│   ├── CorruptError           CKPT401   truncated, bit-flipped, digest mismatch
│   ├── ForeignError           CKPT402   not written by ckpt-engine
│   ├── NewerFormatError       CKPT403   written by a later version
│   ├── PartialError           CKPT404   the shares of some ranks only, the rest is on other nodes
│   └── SealError              CKPT405   not sealed or signed as asked for, or there is no key for it
├── LeaseHeldError             CKPT500   another process writes this run
├── ClosedError                CKPT501   this Checkpointer is closed, or a newer one of its process writes the run
├── WriterError                CKPT600   the writer process died or cannot start
│   ├── SnapshotSkippedError   CKPT601   back-pressure: this snapshot was not taken
│   ├── SnapshotFailedError    CKPT602   this snapshot did not become durable
│   ├── WaitTimeoutError       CKPT603   also a TimeoutError
│   └── HookError              CKPT604   a command or webhook of `on` failed
├── ResumeError                CKPT700
│   ├── NoUsableSnapshotError  CKPT701   the store is not empty and nothing in it is usable
│   ├── OvertakenError         CKPT702   another job made newer snapshots after this one had loaded
│   └── ReplayError            CKPT703   a repeated step differs from the one of the earlier process
├── DivergedError              CKPT800   the loss is not finite, or far above its usual values
│   └── RollbackRequestedError CKPT801   the same; the next start goes back and skips batches
└── RanksError                 CKPT900   the ranks of a run cannot reach each other, or do not agree
```

Codes never change meaning; a message says what, where, and the next command. The docstring of a class is its page:
`ckpt explain` prints it, and docs/errors.md has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar


def visible(text: str) -> str:
    """A text that others may have written, as one line: what is not printable in it is an escape, as in `repr`.

    So no name in a store moves the cursor, breaks a line or turns its direction.
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def led_to(error: BaseException) -> Iterator[BaseException]:
    """An error and all that led to it, each once."""
    waiting: list[BaseException | None] = [error]
    seen = set[int]()
    for one in waiting:  # it grows meanwhile
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]


class CkptError(Exception):
    """Base of every error of this project; alone what has no code of its own.

    Usually a version of a trainer lacks what is needed: use one that docs/support.md lists.

    Args:
        message: what went wrong and where, in one line.
        more: further lines of the message.
        hint: what the user does next; appended to the text.

    Examples:
        >>> try:
        ...     state = ckpt.load()
        ... except CkptError as error:
        ...     print(error.code, error.message, error.hint)
    """

    code: ClassVar[str] = "CKPT000"

    def __init__(self, message: str, *more: str, hint: str | None = None) -> None:
        self.message = "\n".join(map(visible, (message, *more)))
        self.hint = hint and visible(hint)
        super().__init__(f"[{self.code}] {self.message}" + (f" → {self.hint}" if hint else ""))


class ConfigError(CkptError, ValueError):
    """An option is unknown, impossible, or does not fit the others; every problem is in the message.

    - A misspelt key: the message names the nearest one, and all that are allowed there.
    - A value of the wrong kind: it names what is allowed; quantities take units (`1%`, `10 min`, `500 GB`).
    - Two options that exclude each other, or something that this trainer cannot do.

    `ckpt schema` prints every option, docs/configuration.md explains them. Nothing was started, written or locked.
    """

    code = "CKPT100"


class ArgumentError(CkptError, ValueError):
    """An argument of a call means nothing that could be stored or waited for; the message names it and its value.

    Steps are whole numbers from 0 on, `metrics` are numbers, timeouts are seconds or None. Numbers of numpy and torch
    count as numbers; a tensor of several elements does not. Nothing was saved.
    """

    code = "CKPT101"


class StateError(CkptError):
    """The state could not be taken or put back as it is.

    - *changed while it was copied*: something wrote weights on a GPU without an optimizer step while they were copied
      behind training. That snapshot does not exist; all later ones are copied before training continues. To copy behind
      training all the same, call `before_update()` right before the code that writes.
    - *cannot reserve host memory*: a snapshot needs room for `slots` copies of the state. Lower `slots`, or give the
      job more memory.

    Earlier snapshots are whole, and training continues unless `on_error: raise`.
    """

    code = "CKPT200"


class UnstorableLeafError(StateError, TypeError):
    """Something in the state could only be stored with pickle; the message says where it is.

    Give it `state_dict` and `load_state_dict`, store what it is made of (numbers, texts, lists, dicts, tensors,
    dataclasses), or leave it out. `pickle: [path]` stores this one path with pickle after all; loading that can run
    code.

    At `ckpt import` it is an object in a file of others that is not loaded, because that can run code: save the file
    again without it.
    """

    code = "CKPT201"


class MismatchError(StateError):
    """The snapshot does not fit the live model, optimizer or loader; the message names the keys that differ.

    - The model was changed since: start in another folder, or load the weights with `strict=False` from `ckpt export
      ROOT out.safetensors --to safetensors`.
    - The folder belongs to another run: each run needs its own.
    - The script makes its parts in another order, or by other names than the saved run did.

    `ckpt show ROOT` lists what the snapshot has. Nothing of the live state was changed.
    """

    code = "CKPT202"


class StorageError(CkptError):
    """A disk, mount, bucket or URL does not do what was asked of it; the message has its own words.

    - A package is missing: `pip install "ckpt-engine[s3]"` for `s3://`, else what the message names.
    - Credentials are missing or wrong: give them in `storage_options` or where the storage's own tools look, never in
      the URL.
    - The network or the service is down: a further tier is tried again automatically, and training continues.

    `ckpt doctor ROOT` tries the place step by step and says what works there.
    """

    code = "CKPT300"


class StorageFullError(StorageError):
    """There is no room for a snapshot: the disk, its quota, or the limits `keep.quota` and `keep.min_free`.

    `ckpt prune ROOT --dry-run` shows what stays and why, `ckpt prune ROOT --keep last=1` makes room now, and `ckpt ls
    ROOT` shows the sizes. Pinned snapshots stay: `ckpt unpin ROOT SNAPSHOT`. Older snapshots are whole, and training
    continues; as soon as there is room snapshots become durable again.
    """

    code = "CKPT301"


class StorageReadOnlyError(StorageError):
    """The place cannot be written by this user: the mount is read-only, or its permissions forbid it.

    `ckpt doctor ROOT` says which. Reading verbs (`ckpt ls`, `ckpt show`, `ckpt verify`, `ckpt export`) work there all
    the same.
    """

    code = "CKPT302"


class StorageMissingError(StorageError):
    """Something that was named, or that a manifest refers to, is not there.

    A root: look at the spelling, and whether the disk is mounted. A part of a snapshot: it was removed by something
    else than this project; `ckpt verify ROOT` names every snapshot that is hit, and a resume takes the next older whole
    one, or another tier.
    """

    code = "CKPT303"


class StorageExistsError(StorageError):
    """A file or object of that name is there already, and is not replaced silently.

    Verbs that write a file replace it with `--force`. In a run it means that a second writer works there: see CKPT500.
    """

    code = "CKPT304"


class NotAFolderError(StorageError):
    """A part of the path is a file where a folder is needed. Name the folder of the run, not a file in it."""

    code = "CKPT305"


class StorageStalledError(StorageError):
    """A storage has accepted or given nothing for so long that it counts as hanging; what was asked of it still hangs.

    Look at the disk, the mount (`dmesg`, a stale NFS handle) or the network. Training continues: the tier is left out,
    `ckpt status` says so, and it is used again as soon as it answers.
    """

    code = "CKPT306"


class FormatError(CkptError):
    """What was read is not what the format says; the message says what is wrong with it.

    A resume passes such a snapshot over for the next older whole one. `ckpt verify ROOT` reads everything and names
    what is hit.
    """

    code = "CKPT400"


class CorruptError(FormatError):
    """Bytes are not those that were written: a file was cut off, changed, or its disk returns others.

    A resume takes what is damaged from another tier, or the next older whole snapshot, and its report says so. `ckpt
    verify ROOT` names the tensors that are hit, and `ckpt repair ROOT` puts back their bytes from another tier.
    Damage that comes back is a disk or memory that fails: replace it.
    """

    code = "CKPT401"


class ForeignError(FormatError):
    """The folder, bucket or file was not written by ckpt-engine.

    Give the run a folder of its own, such as `DIR/ckpt`, if the one that was named has other files. A checkpoint of
    Lightning, torch, Accelerate or transformers becomes a snapshot by `ckpt import SRC ROOT`.
    """

    code = "CKPT402"


class NewerFormatError(FormatError):
    """It was written by a later version, or with a codec that is not installed here.

    `pip install -U ckpt-engine`, or the package of that codec. Older snapshots of the same run may be readable.
    """

    code = "CKPT403"


class PartialError(FormatError):
    """This folder has the shares of some ranks only; the others are on the disks of other nodes.

    Start with the same nodes, or `ckpt cp` the folders of all nodes to one place, one after another: with the last one
    the snapshots are whole there. A tier that all nodes share avoids this.
    """

    code = "CKPT404"


class SealError(FormatError):
    """Something is not sealed, or not signed by those that `seal.signed_by` accepts, or there is no key to open it.

    - No key, or another one: give `seal.key` or set `$CKPT_KEY_FILE`. Who has only public keys can write a run and
      not continue it.
    - Not signed by one of `seal.signed_by`: add the signer if you trust it. Else somebody else wrote this.
    - Not sealed: `ckpt cp --seal` seals an existing run. If it was sealed, somebody has put something else there.

    A resume passes such a snapshot over for the next older one. docs/seal.md says what sealing protects from.
    """

    code = "CKPT405"


class LeaseHeldError(CkptError):
    """Another process writes this run, and two writers would overwrite each other; the message names it.

    - The job runs twice: stop one of them. `ckpt status ROOT` says who writes and where.
    - A trainer died a moment ago: its writer finishes its last snapshots, and a new start waits for that automatically.
    - A machine died: its lease on object storage ends within minutes.
    - Two runs on purpose: they need two folders.
    - The folder is a copy by hard links (`cp -al`): the message says which file of it to remove.
    """

    code = "CKPT500"


class ClosedError(CkptError):
    """This Checkpointer, callback or tracker was closed, or a newer one of the same process writes the run now.

    In a notebook that is the cell that was run again: continue with the newer object.
    """

    code = "CKPT501"


class WriterError(CkptError):
    """The writer process died or cannot start, or a run cannot be asked.

    The next writer takes what the one before it left, so a snapshot fails with this only where that one dies with it as
    well or does not start, or where several ranks take it.

    The message, or the lines before it, have the cause: no memory left (look for an OOM kill in `dmesg`), no right to
    start a process, or a program that replaced Python's own. Snapshots that were durable stay so. `writer: thread`
    works without a process, and does not outlive the trainer.
    """

    code = "CKPT600"


class SnapshotSkippedError(WriterError):
    """This snapshot was not taken: earlier ones still fill the host memory, and training does not wait for storage.

    The next one comes at the usual interval. If it happens all the time the storage is slower than what it is asked
    for: a longer interval, a nearer first tier, or more `slots`. `ckpt status ROOT` shows how fast each tier is.
    """

    code = "CKPT601"


class SnapshotFailedError(WriterError):
    """A snapshot did not become durable; the message has the cause. Older ones are whole.

    Training continues, and the next snapshot tries again; `on_failure: fail` of a tier and `on_error: raise` end it.
    `close()`, or the end of `fit` or `train`, raises this if the last state that was to be saved is durable nowhere, so
    that the job does not end with status 0: save the state that is still in memory elsewhere, or set `on_error: warn`
    to end without it. `ckpt doctor ROOT` tries the place.
    """

    code = "CKPT602"


class WaitTimeoutError(WriterError, TimeoutError):
    """Something was waited for as long as the call allows, and is not done; it continues in the background.

    After `close()` the writer process finishes what is left alone, also when the trainer is gone; the next start
    waits for it. `wait_at_end` says how long the end waits for copies to further tiers.
    """

    code = "CKPT603"


class HookError(WriterError):
    """A command or webhook of the option `on` has failed; training and snapshots are as without it.

    The message says which, and how: the status and the last line of a command, or the answer of a server. It is a
    warning, given once until that hook works again. A command runs in the folder where training was started, for at
    most `on.timeout`. docs/monitoring.md has its environment, to try it by hand.
    """

    code = "CKPT604"


class ResumeError(CkptError):
    """The run cannot resume from what was chosen; the message says why and what to do.

    - No snapshot of the step that was named: `ckpt ls ROOT` lists those that exist.
    - The snapshot is of another kind of run: give this one a folder of its own.
    - The data loader has changed in the middle of an epoch: use the old one, or set `data: restart_epoch` or `data:
      continue`.
    """

    code = "CKPT700"


class NoUsableSnapshotError(ResumeError):
    """The store is not empty, and nothing in it can be used; the message says why of each snapshot.

    A start from scratch would hide that, so it is refused. `ckpt verify ROOT` reads everything. If a tier was away,
    start again when it answers. If the run is lost, start in another folder, or move this one away.
    """

    code = "CKPT701"


class OvertakenError(ResumeError):
    """After this job had loaded its snapshot, another job made newer ones: to continue would fork the run.

    Usually a job that was thought dead was not. Stop one of them and start again: it resumes from the newest snapshot.
    """

    code = "CKPT702"


class ReplayError(ResumeError):
    """A resumed run repeats a step otherwise than the earlier process did it, and `replay: stop` is set.

    Nothing was saved or removed since the resume. The message says which step, and what differs first.
    docs/exactness.md has the usual causes. `replay: warn` trains on, and the report says the same.
    """

    code = "CKPT703"


class DivergedError(CkptError):
    """The loss is not finite, or stays far above its usual values, and `guard` or `rollback` is set.

    No snapshot was taken since. Start again with a change (learning rate, data): it resumes at the last good step.
    `rollback: {on: loss_spike}` lets the next start go back and skip the batches that did it. docs/diverging.md
    says how.
    """

    code = "CKPT800"


class RollbackRequestedError(DivergedError):
    """As CKPT800, and `rollback` is set: start the same command again, and it goes back and skips batches.

    A launcher that restarts failed jobs does so automatically. After `rollback.at_most` times it is CKPT800, for good.
    """

    code = "CKPT801"


class RanksError(CkptError):
    """The ranks of a run cannot reach each other, or do not agree on what they do.

    - One of them is gone: the end of *its* log has the cause, not this one.
    - They were started with other options or other folders: give all of them the same.
    - They call `load` and `save` in another order: every rank must make the same calls.

    Earlier snapshots are whole. Start all ranks again.
    """

    code = "CKPT900"


BY_CODE: Mapping[str, type[CkptError]] = {
    one.code: one for one in tuple(globals().values()) if isinstance(one, type) and issubclass(one, CkptError)
}
"""The tree above; errors that other files derive from it have the code of one of these."""
