"""The site: ``make docs`` builds it, offline, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

import ortflex_core

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "examples"))

project = "ortflex"
copyright = "the developers of ortflex"
version = release = ortflex_core.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns = ["_build", "examples", "gallery/**/*.ipynb"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_custom_sections = ["Source"]

html_theme = "pydata_sphinx_theme"
html_title = "ortflex"
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
}

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"(example_tools|demo|demo_picture|make_digits_classifier)\.py$",
    "capture_repr": ("_repr_html_",),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_signature": False,
    "reset_modules": ("matplotlib",),
}
