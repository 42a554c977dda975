"""The backend ``openvino``: the step program compiled by OpenVINO, with its state inside.

:mod:`.draws` separates random draws from a program, :mod:`.differences` lists what OpenVINO
computes differently, :mod:`.compiled` compiles the rest, :mod:`.engine` trains, :mod:`.backend` is
the plugin.
"""
