"""The site: ``make docs`` builds it, offline, with warnings as errors."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import ortflex_core

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "examples")]

importlib.import_module("api_pages").main()

# Pages of examples that were renamed since would be documents without a place.
GALLERY = HERE / "gallery"
for page in GALLERY.rglob("plot_*.rst"):
    if not (HERE / "examples" / page.relative_to(GALLERY).with_suffix(".py")).exists():
        page.unlink()

project = "ortflex"
copyright = "the developers of ortflex"
version = release = ortflex_core.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns = ["_build", "examples", "gallery/**/*.ipynb"]
# Types are written by names that several public modules have: any of them will do.
suppress_warnings = ["config.cache", "ref.python"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_custom_sections = ["Source"]

# Quotes and ellipses, not dashes: `--resume` in a sentence stays as it is typed.
smartquotes_action = "qe"

html_theme = "pydata_sphinx_theme"
html_title = "ortflex"
html_logo = "_static/logo.svg"
html_favicon = "_static/favicon.svg"
copybutton_exclude = ".linenos, .gp, .go"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "navbar_align": "left",
    "show_prev_next": False,
    # None beside the examples: code is wide.
    "secondary_sidebar_items": {
        f"{section}/*": ["page-toc"]
        for section in ("tutorial", "howto", "reference", "explanation")
    }
    # The table of operators needs the room.
    | {"gallery/*": [], "gallery/*/*": [], "index": [], "reference/operators": []},
    "logo": {"text": "ortflex"},
}
# The front page has cards, no sections.
html_sidebars = {"index": []}

INSTALLED = "."
"""What ``pip install`` installs in the commands of all pages: a checkout, or "ortflex" from an index."""


def name_what_is_installed(_app: object, _page: str, source: list[str]) -> None:
    """The install commands of a page, with extras."""
    source[0] = source[0].replace('pip install ".[', f'pip install "{INSTALLED}[')


ORDER = (
    "plot_export_from_torch.py",
    "plot_finetune_convolutional.py",
    "plot_bert.py",
    "plot_lora.py",
    "plot_finetune_pipeline.py",
    "plot_grid_search.py",
    "plot_time_series.py",
    "plot_categories.py",
    "plot_detect_objects.py",
    "plot_teach_a_small_model.py",
    "plot_read_digits.py",
    "plot_torch_layer.py",
    "plot_training_graphs.py",
    "plot_benchmark_backends.py",
    "plot_linear_regression.py",
    "plot_linear_regression_in_detail.py",
    "plot_linear_regression_in_detail_gpu.py",
    "plot_neural_network.py",
    "plot_neural_network_gpu.py",
    "plot_linear_regression_forward_backward.py",
    "plot_neural_network_forward_backward.py",
    "plot_neural_network_nesterov.py",
    "plot_benchmark_forward_backward.py",
    "plot_nesterov_and_penalty.py",
    "plot_log_loss_benchmark.py",
    "plot_torch_benchmark.py",
    "plot_numpy_beside_onnxruntime.py",
)
"""The pages of the gallery; what people come for is first, then the examples of onnxcustom."""


class InOrder:
    """The place of a page."""

    def __init__(self, folder: str) -> None:
        pass

    def __call__(self, name: str) -> int:
        return ORDER.index(name)


sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "within_subsection_order": InOrder,
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"(example_tools|demo|demo_picture|make_digits_classifier)\.py$",
    "capture_repr": ("_repr_html_",),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_signature": False,
    "reset_modules": ("matplotlib",),
}


def setup(app: object) -> None:
    """Connect the substitution."""
    app.connect("source-read", name_what_is_installed)  # type: ignore[attr-defined]
