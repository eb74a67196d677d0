"""Examples in docstrings as code blocks of the API page; Markdown alone would take `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<code>>>> .*(?:\n(?!\s*$).*)*)", re.M)


class Doctests(griffe.Extension):
    """Fences every paragraph that begins with a prompt."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever has one."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                "```pycon\n\\g<code>\n```", obj.docstring.value
            )
