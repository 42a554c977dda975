"""The backend ``xla``: the step program as a function over arrays, many steps in one ``lax.scan``.

:mod:`.calls` is how an operator is written, the families of operators are next to it,
:mod:`.translation` runs a program through them, :mod:`.engine` trains, :mod:`.backend` is the plugin.
"""
