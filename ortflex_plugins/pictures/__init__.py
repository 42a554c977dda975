"""Pictures of graphs and of trainings: SVG, HTML and PNG, laid out by ourselves."""

from ortflex_plugins.pictures.picture import Picture, draw, draw_step

__all__ = ["Picture", "draw", "draw_step"]
