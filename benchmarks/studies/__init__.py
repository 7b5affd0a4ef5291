"""One file per study: what others have published, measured with this engine. As bars: `TITLE` and `run(bench)`."""
