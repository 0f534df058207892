"""The verdict for the terminal, for programs and for a browser."""

from .html import as_html
from .sarif import as_sarif
from .text import as_json, show

__all__ = ["as_html", "as_json", "as_sarif", "show"]
