"""Where objects lie: disks, object stores, anything that fsspec reaches."""
