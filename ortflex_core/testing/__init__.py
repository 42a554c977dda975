"""Conformance kits: the requirements on each kind of plugin, as tests to inherit.

For example::

    from ortflex_core import LossKit

    class TestMyLoss(LossKit):
        @pytest.fixture
        def component(self):
            return MyLoss(scale=0.5)

        @pytest.fixture
        def reference(self):  # the formula a second time, in numpy
            return lambda predicted, expected: np.log1p(((predicted - expected) / 0.5) ** 2)

Override two fixtures, ``component`` and its reference; the other fixtures of a kit (the data,
say) have defaults. Each check is a separate test, named after its property. ``ortflex new-plugin``
writes a package with such a test. Needs pytest (extra ``testing``).
"""

from __future__ import annotations

try:
    import pytest  # noqa: F401  # imported first, for the message
except ImportError as error:
    from ortflex_core.kernel.install_command import install_command

    raise ImportError(f"ortflex_core.testing needs pytest: {install_command('testing')}") from error

from ortflex_core.kernel.moved import forwarding

__getattr__ = forwarding(__name__)
