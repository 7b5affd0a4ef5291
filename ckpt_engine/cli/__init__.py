"""The `ckpt` command: one module per verb; nothing here imports torch unless the verb needs it."""

import signal


def command() -> None:
    """The console script. Ctrl-C while its modules are imported ends it at once, as an unhandled signal does."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ckpt_engine.cli.main import main

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
