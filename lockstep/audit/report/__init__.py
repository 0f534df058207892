"""The verdict for the terminal, for programs and for a browser."""

from .html import as_html
from .text import as_json, show

__all__ = ["as_html", "as_json", "show"]
