"""Users' files of any size: reading, vetting and writing.

Owns: everything between a path and a ModelProto that can be trusted, external data included, and
writing it to a file.

Add here: a check of untrusted files (:mod:`~ortflex_core.compiler.onnx_files.vetting`), the way a file is
written (:mod:`~ortflex_core.compiler.onnx_files.export`). The analysis of a model is in
:mod:`ortflex_core.compiler.model`.
"""
