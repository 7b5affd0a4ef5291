"""How objects of a run show themselves: in a shell by their `repr`, in a notebook as a table."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


class WithFacts:
    """An object that shows where its run is and how far that is."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What is shown, by name; nothing is asked of a storage for it."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name} {value}' for name, value in self.facts.items())})"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.facts.items())
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"
