"""The colours of an answer, readable on a light and on a dark background.

They are those of the 256 colours with a luminance near 0.18, where the contrast with black and with white is the same.
The sixteen basic colours look different in every terminal, and yellow, white or blue vanish in some. NO_COLOR leaves
bold, dim, italic and underlined.
"""

from __future__ import annotations

from rich.style import Style

CODE = Style(color="color(31)")
LINK = Style(color="color(31)", underline=True)
MARK = Style(color="color(98)")
"""Bullets, numbers and the bars of quotes."""
FAINT = Style(dim=True)
THOUGHT = Style(dim=True, italic=True)
STRONG, EMPHASIS, STRUCK = Style(bold=True), Style(italic=True), Style(strike=True)
HEADING, TITLE = Style(bold=True), Style(bold=True, underline=True)

SYNTAX = {
    "Comment": Style(color="color(244)", italic=True),
    "Keyword": Style(color="color(133)"),
    "Operator.Word": Style(color="color(133)"),
    "Name.Builtin": Style(color="color(31)"),
    "Name.Function": Style(color="color(32)"),
    "Name.Class": Style(color="color(32)"),
    "Name.Decorator": Style(color="color(98)"),
    "Name.Tag": Style(color="color(133)"),
    "Name.Attribute": Style(color="color(32)"),
    "Literal.String": Style(color="color(28)"),
    "Literal.Number": Style(color="color(166)"),
    "Generic.Deleted": Style(color="color(167)"),
    "Generic.Inserted": Style(color="color(28)"),
    "Generic.Heading": Style(bold=True),
}
"""Styles by the name of pygments' token. Other tokens look like the kind of token that they belong to."""
