"""Configuration of the documentation site, which Sphinx builds: `make docs`.

The pages are also readable on GitHub; links work in both. Only the pages of `reference/` need the
site: Sphinx makes them from the docstrings and from the argument parser.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))

_VERSION = (DOCS.parent / "src" / "torchwhere" / "core" / "version.py").read_text()

project = "torchwhere"
release = re.findall(r'^__version__ = "(.+)"$', _VERSION, re.MULTILINE)[0]
extensions = [
    "command_reference",
    "docstring_code",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["README.md"]  # GitHub shows it for this folder; the site starts at index.md
nitpicky = True
# Types in signatures (torch.nn.Module, Iterator) are not pages of this site.
nitpick_ignore_regex = [("py:.*", ".*")]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
highlight_language = "none"
smartquotes = False  # quotes around patterns and names stay as typed

default_role = "code"  # `x` in a docstring is code
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["accelerate", "lightning", "ray", "transformers"]  # not needed for this
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # one list of attributes, not a heading for each
napoleon_use_rtype = False
python_use_unqualified_type_names = True
strip_signature_backslash = True  # napoleon then escapes names like `pass_`
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"torchwhere {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
