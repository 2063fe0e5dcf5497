"""How Sphinx builds these pages: without a network, and with warnings as errors (`make docs`)."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parents[1])]

project = "mrv2"
author = "The mrv2 authors"
copyright = "The mrv2 authors, Apache-2.0"
version = release = version_of("mrv2")

extensions = ["myst_parser", "sphinx.ext.autodoc", "plain_docstrings", "command_line", "report_keys"]
exclude_patterns = ["_ext"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

myst_enable_extensions = ["deflist", "attrs_inline"]
myst_heading_anchors = 3  # [text](page.md#heading) works as it does on a code host

html_theme = "furo"
html_title = "mrv2"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
pygments_style, pygments_dark_style = "friendly", "github-dark"

default_role = "code"  # docstrings quote code as `code`
add_module_names = False
maximum_signature_line_length = 100
python_display_short_literal_types = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
autodoc_inherit_docstrings = False  # torch's own, of methods that override

# Types in signatures that no page is about: other libraries' (their pages would be a fetch from the network), and
# type variables.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|fx|np|numpy|rich|Group|dist|collections|typing|pathlib|Path|enum|abc|contextlib)(\..*)?"),
    (r"py:class", r"piecewise_backend\.dumping\.folder\.DumpFolder"),  # given to `Dump` by `dump`
    (r"py:.*", r"(attention\.base\.)?MetadataT|tuple\[.*"),
    (r"py:class", r"Launch"),  # a tuple of what a kernel is launched with, for backends of Triton kernels
]
