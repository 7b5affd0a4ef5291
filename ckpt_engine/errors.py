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
│   └── PartialError           CKPT404   the shares of some ranks only, the rest is on other nodes
├── LeaseHeldError             CKPT500   another process writes this run
├── ClosedError                CKPT501   this Checkpointer is closed, or a newer one of its process writes the run
├── WriterError                CKPT600   the writer process died or cannot start
│   ├── SnapshotSkippedError   CKPT601   back-pressure: this snapshot was not taken
│   ├── SnapshotFailedError    CKPT602   this snapshot did not become durable
│   └── WaitTimeoutError       CKPT603   also a TimeoutError
├── ResumeError                CKPT700
│   ├── NoUsableSnapshotError  CKPT701   the store is not empty and nothing in it is usable
│   └── OvertakenError         CKPT702   another job made newer snapshots after this one had loaded
├── DivergedError              CKPT800   the loss is not finite, or far above its usual values
│   └── RollbackRequestedError CKPT801   the same; the next start goes back and skips batches
└── RanksError                 CKPT900   the ranks of a run cannot reach each other, or do not agree
```

Codes never change meaning; a message says what, where, and the next command.
"""

from __future__ import annotations

from typing import ClassVar


class CkptError(Exception):
    """Base of every error of this project.

    Args:
        message: what went wrong and where.
        hint: what the user does next; appended to the text.
    """

    code: ClassVar[str] = "CKPT000"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"[{self.code}] {message}" + (f" → {hint}" if hint else ""))


class ConfigError(CkptError, ValueError):
    code = "CKPT100"


class ArgumentError(CkptError, ValueError):
    code = "CKPT101"


class StateError(CkptError):
    code = "CKPT200"


class UnstorableLeafError(StateError, TypeError):
    code = "CKPT201"


class MismatchError(StateError):
    code = "CKPT202"


class StorageError(CkptError):
    code = "CKPT300"


class StorageFullError(StorageError):
    code = "CKPT301"


class StorageReadOnlyError(StorageError):
    code = "CKPT302"


class StorageMissingError(StorageError):
    code = "CKPT303"


class StorageExistsError(StorageError):
    code = "CKPT304"


class NotAFolderError(StorageError):
    code = "CKPT305"


class StorageStalledError(StorageError):
    code = "CKPT306"


class FormatError(CkptError):
    code = "CKPT400"


class CorruptError(FormatError):
    code = "CKPT401"


class ForeignError(FormatError):
    code = "CKPT402"


class NewerFormatError(FormatError):
    code = "CKPT403"


class PartialError(FormatError):
    code = "CKPT404"


class LeaseHeldError(CkptError):
    code = "CKPT500"


class ClosedError(CkptError):
    code = "CKPT501"


class WriterError(CkptError):
    code = "CKPT600"


class SnapshotSkippedError(WriterError):
    code = "CKPT601"


class SnapshotFailedError(WriterError):
    code = "CKPT602"


class WaitTimeoutError(WriterError, TimeoutError):
    code = "CKPT603"


class ResumeError(CkptError):
    code = "CKPT700"


class NoUsableSnapshotError(ResumeError):
    code = "CKPT701"


class OvertakenError(ResumeError):
    code = "CKPT702"


class DivergedError(CkptError):
    code = "CKPT800"


class RollbackRequestedError(DivergedError):
    code = "CKPT801"


class RanksError(CkptError):
    code = "CKPT900"
