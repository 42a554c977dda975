"""Federated training with Flower: a Trainer as a ClientApp, a model as a ServerApp.

- ``client`` trains and evaluates on a client's rows, ``server`` runs a strategy and writes the
  model;
- ``shared`` chooses the tensors that travel and checks those that arrive; ``client_state`` has
  the state that stays on a client between rounds;
- ``data`` divides rows among the clients of a simulation, and opens the data of a recipe.

The apps use Flower's Message API. Flower itself is imported when an app is made, so that this
package can be imported without it.

>>> from ortflex_plugins.flower import client_app, server_app
"""

from ortflex_plugins.flower.client import client_app
from ortflex_plugins.flower.data import partition_rows, recipe_data
from ortflex_plugins.flower.server import server_app
from ortflex_plugins.flower.shared import load_shared, pack_shared

__all__ = [
    "client_app",
    "load_shared",
    "pack_shared",
    "partition_rows",
    "recipe_data",
    "server_app",
]
