"""How the site is made of these pages, by Sphinx: `make docs`. The same pages are read on GitHub;
links work in both."""

from __future__ import annotations

import re
from pathlib import Path

_VERSION = (Path(__file__).parent.parent / "src" / "torchwhere" / "core" / "version.py").read_text()

project = "torchwhere"
release = re.findall(r'^__version__ = "(.+)"$', _VERSION, re.MULTILINE)[0]
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["README.md"]  # what GitHub shows of this folder; the site begins with index.md
nitpicky = True
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
highlight_language = "none"

html_theme = "furo"
html_title = f"torchwhere {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
