"""Docstrings are prose that is mostly Markdown: what would be read as a link is made plain."""

from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """`cost[i][k]` is no link to a heading k."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("][", "]\\[")
