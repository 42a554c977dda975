"""Symbolic tensors, and the conversion of formulas over them to ONNX graphs.

Owns: the operators (``op.Abs(x)``), the :class:`Trace` that records them, host scalars, the
simplification of the recorded graph, the :class:`Program`, a serialized graph whose values are
found by their :class:`Port`, and the inference of types and shapes.

Add here: a simplification (:mod:`~ortflex_core.compiler.graph.simplify`),
a control-flow operator (:mod:`~ortflex_core.compiler.graph.control_flow`).
"""
