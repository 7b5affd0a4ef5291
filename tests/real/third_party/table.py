"""Which programs and test suites of others are run, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.real.third_party import data, lines
from tests.real.third_party.lines import Changes


@dataclass(frozen=True, slots=True)
class Program:
    """A program of others.

    Args:
        repository, commit: on GitHub.
        folder: of the program in it.
        file: that is run.
        changes: lines of a file, and what our pages ask for in their place; ROOT is the run's folder.
        arguments: of the program, so that it is small.
        prepare: makes its data, called in its folder.
        spoken: what of its output counts: times do not.
        ranks: processes, each with the variables that torchrun sets.
        named: what resume reports may say was not restored: texts in it, each of something that the program does
            change and that decides nothing. Any other one is a false alarm.
    """

    repository: str
    commit: str
    folder: str
    file: str
    changes: Mapping[str, Changes]
    arguments: Sequence[str]
    prepare: Callable[[Path], None]
    spoken: str
    ranks: int = 1
    named: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """A test suite of others, run by `suite.py`.

    Args:
        folder: where it is run; `paths` are in it.
        options: of pytest.
        expected: tests that can only fail with us, and why.
    """

    repository: str
    commit: str
    folder: str
    paths: Sequence[str]
    options: Sequence[str]
    expected: Mapping[str, str] = field(default_factory=dict)


_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
_SMALL_GPT = (
    *("--dataset=own", "--device=cpu", "--compile=False", "--dtype=float32", "--eval_interval=7", "--eval_iters=2"),
    *("--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=32", "--batch_size=4", "--dropout=0.1"),
    *("--gradient_accumulation_steps=2", "--max_iters=120", "--warmup_iters=5", "--lr_decay_iters=120"),
)
_SMALL_LSTM = (
    *("--emsize=16", "--nhid=16", "--epochs=2", "--batch_size=4", "--log-interval=5", "--use-optimizer", "--lr=0.01"),
)
_LIGHTNING = ("Lightning-AI/pytorch-lightning", "be98784a1a03581b7051a355ae1084fd352d7cea", "tests")
_ALONE = ("-p", "no:cacheprovider", "-o", "addopts=", "--timeout", "100", "-k", "not ddp and not spawn")
_SMALL_MINGPT = (
    *("data_config.path=data/input.txt", "data_config.truncate=0.002", "data_config.block_size=16"),
    *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=16", "trainer_config.max_epochs=3"),
    *("trainer_config.batch_size=48", "trainer_config.data_loader_workers=1", "trainer_config.use_amp=False"),
)
_SMALL_SFT = (
    *("--model_name_or_path=gpt", "--dataset_name=texts", "--output_dir=out", "--use_cpu", "--bf16=False"),
    *("--num_train_epochs=2", "--per_device_train_batch_size=8", "--logging_steps=5", "--report_to=none"),
)
_ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
_COUNTS = "the loop: enumerate around 'loader'"
_BY_FEATURE: Sequence[tuple[str, Changes, tuple[str, ...], tuple[str, ...]]] = (
    ("automatic_gradient_accumulation", lines.accelerate("num_epochs", 8), (), ()),
    (
        "checkpointing",
        lines.accelerate("starting_epoch, num_epochs"),
        ("--checkpointing_steps=5", "--output_dir=out"),
        (_COUNTS, "the loop: overall_step was", "local variables: overall_step is"),
    ),
    ("cross_validation", lines.FOLDS, ("--num_folds=2",), (_COUNTS,)),
    ("ddp_comm_hook", lines.accelerate("num_epochs"), ("--ddp_comm_hook=no",), ()),
    ("early_stopping", lines.accelerate("num_epochs"), (), (_COUNTS,)),
    ("gradient_accumulation", lines.accelerate("num_epochs"), ("--gradient_accumulation_steps=2",), ()),
    ("local_sgd", lines.accelerate("num_epochs"), (), ()),
    ("memory", lines.accelerate("num_epochs", 8), (), ()),
    ("multi_process_metrics", lines.accelerate("num_epochs"), (), (_COUNTS,)),
    ("profiler", lines.accelerate("num_epochs"), (), ()),
    ("schedule_free", lines.accelerate("num_epochs"), (), (_COUNTS,)),
    ("tracking", lines.accelerate("num_epochs"), ("--with_tracking",), (_COUNTS, "local variables: total_loss is")),
)
_TRAINERS = ("-p", "in_every_trainer")
_REFUSED = {
    "test_auto_batch_size_with_resume_from_checkpoint": "auto_find_batch_size has no exact resume",
}
_LISTS = dict.fromkeys(
    (
        *("test_checkpoint_callbacks_are_last", "test_attach_model_callbacks", "test_configure_external_callbacks"),
        *("test_callbacks_state_fit_ckpt_path", "test_model_checkpoint_no_extraneous_invocations"),
    ),
    "it asserts which callbacks a Trainer has, how many, or how often their state is taken",
)
PROGRAMS: Mapping[str, Program | Suite] = {
    "nanogpt": Program(
        *("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "", "train.py"),
        changes={"train.py": lines.NANOGPT},
        arguments=_SMALL_GPT,
        prepare=data.characters,
        spoken=r"(?:iter|step) \d+: .*?loss [\d.]+",
        named=["local variables: t0"],
    ),
    "word_language_model": Program(
        *(*_EXAMPLES, "word_language_model", "main.py"),
        changes={"main.py": lines.WORDS},
        arguments=_SMALL_LSTM,
        prepare=data.words,
        spoken=r"(?:test |valid )?loss +[\d.]+",
        named=["local variables: start_time is"],
    ),
    "time_sequence_prediction": Program(
        *(*_EXAMPLES, "time_sequence_prediction", "train.py"),
        changes={"train.py": lines.WAVES},
        arguments=("--steps=12",),
        prepare=data.waves,
        spoken=r"(?:test )?loss: [\d.e-]+",
    ),
    "mingpt-ddp": Program(
        *(*_EXAMPLES, "distributed/minGPT-ddp/mingpt", "main.py"),
        changes={"trainer.py": lines.MINGPT},
        arguments=_SMALL_MINGPT,
        prepare=data.shakespeare,
        spoken=r"Epoch \d+ \| Iter \d+ \| \w+ Loss [\d.]+",
        ranks=2,
    ),
    **{
        f"accelerate-{name.replace('_', '-')}": Program(
            *(*_ACCELERATE, "examples/by_feature", f"{name}.py"),
            changes={f"{name}.py": changes},
            arguments=("--cpu", *arguments),
            prepare=data.glue,
            spoken=r"epoch \d+: .*",
            named=named,
        )
        for name, changes, arguments, named in _BY_FEATURE
    },
    "sentence-transformers": Program(
        *("huggingface/sentence-transformers", "cad211983f36ce458e9b3360f3e11b29fc54cbd8"),
        *("examples/sentence_transformer/training/sts", "training_stsbenchmark.py"),
        changes={"training_stsbenchmark.py": lines.transformers("trainer.train()")},
        arguments=("bert",),
        prepare=data.similar,
        spoken=r"'train_loss': '?[\d.e-]+",
        named=["hidden state model.model_card_data.eval_results_dict:"],
    ),
    "trl-sft": Program(
        *("huggingface/trl", "35def3ee000a87f6839e66f4b7749b06274ed1b3", "trl/scripts", "sft.py"),
        changes={"sft.py": lines.transformers("trainer.train()", 4)},
        arguments=_SMALL_SFT,
        prepare=data.texts,
        spoken=r"'loss': '?[\d.e-]+",
    ),
    "pytorch-forecasting": Program(
        *("sktime/pytorch-forecasting", "4d8d97cd3e85a15a9b90a38dfb0afc819d8e8aa4", "examples", "ar.py"),
        changes={"ar.py": lines.FORECASTING},
        arguments=(),
        prepare=data.series,
        spoken=r"Mean absolute error of model: [\d.]+",
    ),
    "lightning-restore": Suite(*_LIGHTNING, ("tests_pytorch/models/test_restore.py",), _ALONE, _LISTS),
    "lightning-loops": Suite(*_LIGHTNING, ("tests_pytorch/loops",), _ALONE),
    "lightning-checkpointing": Suite(*_LIGHTNING, ("tests_pytorch/checkpointing",), _ALONE, _LISTS),
    "lightning-connectors": Suite(*_LIGHTNING, ("tests_pytorch/trainer/connectors",), _ALONE, _LISTS),
    "accelerate-state": Suite(*_ACCELERATE, "tests", ("test_state_checkpointing.py",), (*_ALONE, *_TRAINERS)),
    "transformers-checkpointing": Suite(
        *("huggingface/transformers", "e2372ffabdf6da99364d3d053da7783acf5f623c", ""),
        ("tests/trainer/test_trainer.py",),
        (*_ALONE[:-1], "resume or checkpoint or save or best", *_TRAINERS),
        expected=_REFUSED,
    ),
}
