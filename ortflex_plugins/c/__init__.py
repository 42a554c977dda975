"""Programs as C: what compiles them, and what they are used for.

A library without a kind of its own, which kinds of plugins may import.
"""
