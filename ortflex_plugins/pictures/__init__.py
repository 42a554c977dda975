"""Pictures of graphs and of trainings: SVG, HTML and PNG, drawn in plain Python.

- ``reading`` makes boxes of a file's operators, with the colours of ``check_model`` or, for graphs that
  training uses, of ``parts``.
- ``building`` puts them into levels and folds what ``repeats`` finds: runs of operators that are
  equal one by one and wired alike, in the order of the file or of the outputs' needs, whichever
  folds more.
- ``layout`` is Sugiyama's method with isotonic regression for the coordinates. ``page.js`` repeats only
  that last step, so that a box can open in place.
- ``svg``, ``html`` and ``figures`` write the result; ``measure`` listens to a training for what
  ``report`` shows.

Strings of files pass through ``scene.clean`` and are escaped where they are written; pages cannot
load anything.
"""

from ortflex_plugins.pictures.measure import Measures
from ortflex_plugins.pictures.picture import Picture, draw, draw_step

__all__ = ["Measures", "Picture", "draw", "draw_step"]
