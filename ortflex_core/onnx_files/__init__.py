"""Files as users have them: read, vetted and written, whatever their size.

Owns: everything between a path and a ModelProto that can be trusted, external data included, and the
way back to a file.

May import: the packages before it in the order of the core, graph and opsets among them.

Add here: a check of untrusted files (:mod:`~ortflex_core.onnx_files.vetting`), how a file is written
(:mod:`~ortflex_core.onnx_files.export`). What a file means is in :mod:`ortflex_core.model`.
"""
