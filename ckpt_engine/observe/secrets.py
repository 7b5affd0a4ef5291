"""What must not be shown: credentials inside of URLs."""

from __future__ import annotations

import re

LOGIN = re.compile(r"[^/@:]*:(?!\d+/)[^@]*@")
"""After `scheme://`: a name and a password before a host, also where the password has slashes; no port of a host."""
