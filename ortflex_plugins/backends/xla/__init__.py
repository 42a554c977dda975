"""The backend ``xla``: the step program as a function over arrays, many steps in one ``lax.scan``.

:mod:`.calls` defines the form of an operator, the other modules the operators by family,
:mod:`.translation` runs a program through them, :mod:`.engine` trains, :mod:`.backend` is the plugin.
"""
