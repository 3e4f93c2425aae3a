"""Makes Markdown of docstrings: it would take an example's ``>>>`` for a quotation."""

import re

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # a doctest ends at an empty line
_LITERAL = re.compile(r"^::\n", re.MULTILINE)  # announces indented text, which is code in Markdown anyway


class Doctests(griffe.Extension):
    """Fences every doctest of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            text = _LITERAL.sub("", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
