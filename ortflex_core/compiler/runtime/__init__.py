"""The installed onnxruntime: its distribution, its sessions, and the caching binder.

Owns: everything that differs between versions of onnxruntime.

Add here: a work-around for a version (:mod:`~ortflex_core.compiler.runtime.session`), a new distribution
(:mod:`~ortflex_core.compiler.runtime.installation`).
"""
