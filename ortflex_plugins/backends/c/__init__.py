"""The backend ``c``: the step program as one file of C, compiled once, many steps in one call.

:mod:`ortflex_plugins.c` writes and compiles the file; :mod:`.steps` has the compiled functions,
:mod:`.engine` trains, :mod:`.backend` is the plugin.
"""
