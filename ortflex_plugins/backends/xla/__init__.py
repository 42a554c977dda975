"""The backend ``xla``: the step program as a function over arrays, many steps in one ``lax.scan``.

:mod:`.namespaces` has the functions of JAX that the table of operators needs, :mod:`.engine` trains,
:mod:`.backend` is the plugin.
"""
