"""The backend ``openvino``: the step program compiled by OpenVINO, with its state inside.

:mod:`.draws` takes random draws out of a program, :mod:`.differences` is what OpenVINO computes otherwise,
:mod:`.compiled` compiles the rest, :mod:`.engine` trains, :mod:`.backend` is the plugin.
"""
