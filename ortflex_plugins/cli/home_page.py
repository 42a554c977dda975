"""The home page of a distribution."""

from __future__ import annotations

import importlib.metadata


def home_page(distribution: str) -> str:
    """The home page in the metadata of a distribution, or an empty string."""
    try:
        metadata = importlib.metadata.metadata(distribution)
        lines = [line.partition(",") for line in metadata.get_all("Project-URL") or ()]
        home = next(iter(metadata.get_all("Home-page") or ()), "")
    except Exception:  # the file is missing, or not UTF-8
        return ""
    pages = {label.strip().lower(): page.strip() for label, _, page in lines}
    known = (pages.get(n) for n in ("homepage", "home", "documentation", "repository", "source"))
    return next(filter(None, known), "") or home or next(iter(pages.values()), "")
