"""Pictures of graphs and reports of runs: SVG, HTML and PNG, drawn in plain Python.

- ``reading`` makes boxes of the operators in a file, with the colors of ``check_model`` or, for graphs
  that training uses, of ``step_parts``.
- ``building`` puts the boxes into levels and folds the repeated blocks that ``repeats`` finds: operators
  that are equal and connected in the same way. It tries the order of the file and the order in which
  the outputs need the operators, and takes the order that folds more.
- ``layout`` computes the positions: Sugiyama's method, with isotonic regression for the coordinates.
  ``page.js`` repeats only this last step, so that a box can open in place.
- ``svg``, ``html`` and ``figures`` write the picture.
- ``pages`` writes the page about a run (``report``); ``measure`` is a callback that takes its measurements;
  ``several`` compares runs.

Strings from files pass through ``scene.clean`` and are escaped when they are written; pages load nothing.
"""

from ortflex_plugins.pictures.measure import Measures
from ortflex_plugins.pictures.pages import Page, report
from ortflex_plugins.pictures.picture import Picture, draw, draw_step

__all__ = ["Measures", "Page", "Picture", "draw", "draw_step", "report"]
