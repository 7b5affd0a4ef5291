"""What our pages ask for, as changes of single lines in programs of others; ROOT is the folder of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Changes = Sequence[tuple[str, str]]
"""A line (or lines) that a file has once, and what comes in its place; END is the end of the file."""
END = "END"


def edit(path: Path, changes: Changes) -> None:
    """Replace lines, each of which is there once."""
    text = path.read_text() + "\n"
    for old, new in changes:
        if old is END:
            text += f"{new}\n"
            continue
        if text.count(f"\n{old}\n") != 1:
            raise SystemExit(
                f"{path} is not the program we know: {text.count(f'{chr(10)}{old}{chr(10)}')} times {old!r}"
            )
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    path.write_text(text)


NANOGPT: Changes = (
    (
        "running_mfu = -1.0",
        """running_mfu = -1.0
from ckpt_engine import Carry, Checkpointer
ckpt = Checkpointer(ROOT, every_n_steps=1, keep={"last": 1000})
carry = Carry(X=X, Y=Y, best_val_loss=best_val_loss)
run = ckpt.track(model=raw_model, optimizer=optimizer, scaler=scaler, carry=carry)
iter_num, X, Y, best_val_loss = run.global_step, carry.X, carry.Y, carry.best_val_loss""",
    ),
    ("while True:", "while iter_num <= max_iters:"),
    (
        "    local_iter_num += 1",
        """    local_iter_num += 1
    carry.X, carry.Y, carry.best_val_loss = X, Y, best_val_loss
    run.step()""",
    ),
    (END, "ckpt.close()"),
)

WORDS: Changes = (
    (
        "best_val_loss = None",
        """best_val_loss = None
from ckpt_engine import Carry, Checkpointer
ckpt = Checkpointer(ROOT, every_n_steps=1, keep={"last": 1000})
carry = Carry(batch=0, hidden=None, total_loss=0.0, epoch=1, lr=lr, best_val_loss=None)
run = ckpt.track(model=model, optimizer=optimizer, carry=carry)
lr, best_val_loss = carry.lr, carry.best_val_loss""",
    ),
    (
        "        hidden = model.init_hidden(args.batch_size)",
        """        hidden = model.init_hidden(args.batch_size)
    if carry.batch:
        hidden, total_loss = carry.hidden, carry.total_loss""",
    ),
    (
        "    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):",
        """    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        if batch < carry.batch:
            continue""",
    ),
    (
        "        if args.dry_run:",
        """        carry.batch, carry.hidden, carry.total_loss = batch + 1, repackage_hidden(hidden), total_loss
        run.step()
        if args.dry_run:""",
    ),
    ("    for epoch in range(1, args.epochs+1):", "    for epoch in range(carry.epoch, args.epochs+1):"),
    ("        train()", "        train()\n        carry.batch = 0"),
    (
        "            lr /= 4.0",
        """            lr /= 4.0
        carry.epoch, carry.lr, carry.best_val_loss = epoch + 1, lr, best_val_loss""",
    ),
    (END, "ckpt.close()"),
)

WAVES: Changes = (
    (
        "    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)",
        """    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
    from ckpt_engine import Checkpointer
    ckpt = Checkpointer(ROOT, every_n_steps=1, keep={"last": 1000})
    run = ckpt.track(seq=seq, optimizer=optimizer)""",
    ),
    ("    for i in range(opt.steps):", "    for i in range(run.global_step, opt.steps):"),
    ("        plt.close()", "        plt.close()\n        run.step()"),
    (END, "    ckpt.close()"),
)

MINGPT: Changes = (
    (
        "        self.model = DDP(self.model)",
        """        self.model = DDP(self.model)
        from ckpt_engine import Checkpointer
        from ckpt_engine.ranks.process_group import ProcessGroupRanks
        ranks = ProcessGroupRanks()
        self.ckpt = Checkpointer(ROOT, ranks=ranks, every_n_steps=1, keep={"last": 1000})
        self.run = self.ckpt.track(model=self.model, optimizer=self.optimizer, loader=self.train_loader)""",
    ),
    (
        "        for epoch in range(self.epochs_run, self.config.max_epochs):",
        "        for epoch in range(self.run.epoch, self.config.max_epochs):",
    ),
    (
        "        for iter, (source, targets) in enumerate(dataloader):",
        "        for iter, (source, targets) in enumerate(dataloader, self.run.resumed_batches if train else 0):",
    ),
    (END, "        self.ckpt.close()"),
)


def accelerate(epochs: str, indent: int = 4) -> Changes:
    """Our line for a loop of Accelerate that begins with `epochs`."""
    line = " " * indent
    return (
        (
            f"{line}for epoch in range({epochs}):",
            f"""{line}from accelerate_ckpt import AdaptiveCheckpoint
{line}ckpt = AdaptiveCheckpoint(accelerator, ROOT, every_n_steps=1, keep={{"last": 1000}})
{line}for epoch in range(ckpt.epoch, num_epochs):""",
        ),
    )


FOLDS: Changes = (
    *((old, new.replace("ROOT", "ROOT + str(i or '')")) for old, new in accelerate("num_epochs", 8)),
    (
        "        model, optimizer = accelerator.free_memory(model, optimizer)",
        "        ckpt.close()\n        model, optimizer = accelerator.free_memory(model, optimizer)",
    ),
)
"""A run of its own for each fold: `run` has the first one's."""


def transformers(train: str, indent: int = 0) -> Changes:
    """Our lines for a `Trainer` of transformers that trains with the line `train`."""
    line = " " * indent
    return (
        (
            f"{line}{train}",
            f"""{line}from accelerate_ckpt import TransformersCallback
{line}ckpt = TransformersCallback(ROOT, every_n_steps=1, keep={{"last": 1000}})
{line}trainer.add_callback(ckpt)
{line}trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer))""",
        ),
    )


FORECASTING: Changes = (
    (
        "    callbacks=[lr_logger, early_stop_callback],",
        """    callbacks=[
        lr_logger,
        early_stop_callback,
        __import__("lightning_ckpt").AdaptiveCheckpoint(
            ROOT,
            every_n_steps=1,
            keep={"last": 1000},
            pickle=["dataset_parameters*", "hyper_parameters*", "__special*"],
        ),
    ],""",
    ),
    ("    val_dataloaders=val_dataloader,\n)", '    val_dataloaders=val_dataloader,\n    ckpt_path="auto",\n)'),
)
