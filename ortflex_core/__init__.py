"""ortflex: train ONNX models with onnxruntime. The public names of the core, for authors of plugins.

>>> from ortflex_core import Loss, Ops, hyper

Each name is imported from its module when it is first used: ``import ortflex_core`` imports neither
numpy nor onnx. Users import from ``ortflex``. The modules are in four storeys, each of which imports
only itself and those before it: ``kernel`` (the training loop, the caching binder, the protocols of
plugins), ``compiler`` (ONNX graphs), ``training`` (the Trainer), ``tools``; ``testing`` has the
conformance kits.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ortflex_core.kernel.version import __version__

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

PUBLIC = {
    "kernel.batches": "Batch Block Lasting",
    "kernel.binder": "Binder binding_counts HostVector value_key",
    "kernel.component": (
        "Component expected_count hyper is_count is_number MOST number one_of satisfying setting"
    ),
    "kernel.construct": "component_schema expected field_types",
    "kernel.engine_protocols": (
        "Backend Engine LayerBackend Losses Passes DataSource Device Value Communicator "
        "ProcessGroup"
    ),
    "kernel.entries": "Entry singular",
    "kernel.errors": (
        "BrokenPlugin CheckpointError ConfigError DataError error_reason GraphError MALFORMED "
        "MissingKernel ModelError NoGradientRule NotDecomposed NotDifferentiable OrtflexError "
        "PluginError printable RuntimeUnavailable short_repr suggest TrainingDiverged Unsupported"
    ),
    "kernel.files": "make_folder no_file OutputError write_bytes",
    "kernel.hooks": "Callback hook HookManager Hooks NAMES",
    "kernel.host_scalars": "Host HostProgram",
    "kernel.install_command": "install_command",
    "kernel.kinds": "HOOKS KINDS Kinds TABLES",
    "kernel.last_good": "first_not_finite",
    "kernel.locks": "FolderLock lock_handle",
    "kernel.model_protocols": "Adapter match_products Product Edit",
    "kernel.registry": "Plugins Registry",
    "kernel.regular_files": (
        "LINE lines NotRegular open_regular open_text read_bytes read_json read_text reason "
        "RegularFile TABLE TEXT file_size"
    ),
    "kernel.step_protocols": (
        "Average Constraint Loss Metric MetricState Optimizer Slots Updated Penalty Growth Place "
        "Precision Schedule ScheduleContext Unit Transform TransformContext"
    ),
    "kernel.synonyms": "names_elsewhere translate_key",
    "kernel.tracebacks": "short_traceback short_tracebacks",
    "kernel.types": (
        "Array dtype_name numpy_dtype onnx_dtype Progress same_shape Shape shape_text TensorSpec"
    ),
    "compiler.graph.control_flow": "captured_names prefix_names replay Sub",
    "compiler.graph.counter_rng": "dropout normal",
    "compiler.graph.nodes": "ancestor_nodes find_nodes reads split_nodes",
    "compiler.graph.ops": "FLOATS Ops RANDOM Tensor Trace",
    "compiler.graph.ports": "COLUMNS Key PARTS Port ports_of",
    "compiler.graph.program": "ancestors build HostInput Program",
    "compiler.graph.protos": "opsets_of",
    "compiler.graph.schemas": "changed_attributes",
    "compiler.graph.sequences": "SEQUENCE_OPERATORS",
    "compiler.graph.sizes": "count_to dims known_size known_sizes size_of size_vector",
    "compiler.model.adapted_model": "adapt AdaptedModel frozen_values with_values",
    "compiler.model.adapter_files": "write_adapter write_base",
    "compiler.model.changes": "Changes find_changes",
    "compiler.model.editor": "apply_edits Editor",
    "compiler.model.heads": "Head Layer",
    "compiler.model.model": "as_model Model OLDEST_OPSET Rewrite",
    "compiler.model.products": "find_products",
    "compiler.model.quantizer": "Quantizer",
    "compiler.model.shape_probe": "complete_shapes explain_unknown",
    "compiler.model.targets": (
        "check_tensor default_output file_classes has_normalized_scores raw_scores"
    ),
    "compiler.model.training_mode": (
        "buffer_spec buffer_value inactive_dropout Modes rewrite_for_inference running_statistics "
        "share_port statistics_moves trains_statistics"
    ),
    "compiler.onnx_files.model_file": "read_model",
    "compiler.operators.cotangents": (
        "add_at full passed positions put_back ranked reshape_like unbroadcast zeros_like"
    ),
    "compiler.operators.decomposition_table": "Call Decomposition Decompositions",
    "compiler.operators.function_bodies": "body_of has_body",
    "compiler.operators.gradient_families": "load_rules",
    "compiler.operators.gradient_rules": "Gradient Rules RuleTable",
    "compiler.operators.reverse_mode": "gradients NodeView",
    "compiler.problem.labels": (
        "float_labels float_scores integer_labels require_range shape_mismatch shapes_compatible"
    ),
    "compiler.problem.losses": "bind_terms expected_labels loss_tables LossRequest tensors_of",
    "compiler.problem.parameters": "choose_parameters trainable_model",
    "compiler.problem.problem": "LossTerm Problem",
    "compiler.problem.pruning": "Pruning",
    "compiler.problem.teachers": "TeacherTensor",
    "compiler.problem.updating": "AVERAGE",
    "compiler.programs.cache_key": "problem_key",
    "compiler.programs.formulas": "Formula",
    "compiler.programs.gradient_model": "gradient_model",
    "compiler.programs.rebuild": "optimize",
    "compiler.programs.stages": (
        "forward_program loss_ports loss_program stops_gradients training_program"
    ),
    "compiler.programs.step": "gradient_program NORM step_program update_program",
    "compiler.programs.updates": "adding_program batch_gradient global_norm",
    "compiler.runtime.host_memory": "array_at",
    "compiler.runtime.installation": "diagnose find_distributions require_runtime Runtime",
    "compiler.runtime.missing_kernels": "missing_kernel",
    "compiler.runtime.recompute": "AGAIN is_copy repeat_forward",
    "compiler.runtime.session": (
        "get_program get_session keep_alive new_session open_session plans_memory "
        "rounds_short_types run_arrays run_once session_options use_library Workspace"
    ),
    "training.artifacts.array_file": "ArrayFile dump_arrays",
    "training.artifacts.checkpoint": "list_checkpoints Saved",
    "training.artifacts.step_application": "apply_state",
    "training.artifacts.step_export": "export_step",
    "training.artifacts.step_folder": "open_step PortableStep",
    "training.config.arguments": "Arguments device_spec kinds_of_plugins plain_help takes_several",
    "training.config.components": "Parts read_head to_plain",
    "training.config.functions": "AllRows",
    "training.config.recipe": "key_choices Recipe",
    "training.config.toml": "to_toml",
    "training.data.columns": "Columns fit_to split",
    "training.data.iterables": "Batches",
    "training.data.pieces": "Pieces files_digest read_if_small usual_buffer",
    "training.engines.array_engine": "HostEngine",
    "training.engines.backend_choice": "missing_types refusals",
    "training.engines.buffers": (
        "averaged check_state DataBuffers PlanCache read_into ReadLosses Scalar Scales "
        "start_average Twins"
    ),
    "training.engines.device_engine": "DeviceEngine TwinEngine",
    "training.engines.evaluator": "Evaluator",
    "training.engines.gradient_sum": "GradientExchange",
    "training.engines.host_updates": "host_formulas HostUpdates",
    "training.engines.peers": "Peers RankFailed RanksDiffer",
    "training.engines.state_shards": "StateShards",
    "training.internals": "Internals internals_of",
    "training.receipt": "Receipt",
    "training.trainer": "Trainer",
    "training.views.history": "History",
    "training.views.progress": "epoch_summary",
    "training.views.rate_sweep": "RateSweep",
    "training.views.summary": "Summary text_table",
    "tools.check": "check_model edited_model",
    "tools.comparison": "compare Comparison Result",
    "tools.memory": "estimate_memory mebibytes MemoryReport",
    "tools.report": "ModelReport NodeReport",
    "tools.shrinking": "Shrunk ShrunkLayer shrink",
    "tools.times": "time_backends Times",
    "tools.verification": "TensorDifference Verdict verify",
    "testing.adapter": "AdapterKit",
    "testing.average": "AverageKit",
    "testing.backend": "BackendKit",
    "testing.callback": "CallbackKit",
    "testing.component": "ComponentKit",
    "testing.constraint": "ConstraintKit",
    "testing.decomposition": "DecompositionCase DecompositionKit",
    "testing.device": "DeviceKit",
    "testing.edit": "EditKit",
    "testing.gradient": "GradientCase GradientKit",
    "testing.loss": "LossKit",
    "testing.metric": "MetricKit",
    "testing.optimizer": "OptimizerKit",
    "testing.penalty": "PenaltyKit",
    "testing.precision": "Emulated PrecisionKit",
    "testing.process_group": "ProcessGroupKit",
    "testing.quantizer": "QuantizerKit",
    "testing.schedule": "ScheduleKit",
    "testing.source": "DataSourceKit",
    "testing.threads": "run_ranks ThreadGroup",
    "testing.transform": "TransformKit",
}
"""The public names by their modules; ``__init__.pyi`` has them for type checkers and editors."""

_PLACES = {name: module for module, names in PUBLIC.items() for name in names.split()}
__all__ = ["__version__", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: there is no such name.
    """
    if name in _PLACES:
        module = importlib.import_module(f"ortflex_core.{_PLACES[name]}")
        value = globals()[name] = getattr(module, name)
        return value
    if name[:1] != "_" and _Moved.find_spec(f"ortflex_core.{name}"):
        return importlib.import_module(f"ortflex_core.{name}")
    raise AttributeError(f"module 'ortflex_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


_FOLDERS = frozenset(("kernel", "compiler", "training", "tools", "testing"))


class _Moved:
    """Finds the import paths of 0.2; their list is imported only when a module is not found."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        core, _, rest = name.partition(".")
        if core != __name__ or rest.partition(".")[0] in _FOLDERS:
            return None
        from ortflex_core.kernel.moved import find_spec

        return find_spec(name)


# First: a folder that an older checkout left, with bytecode alone, would be found as a package.
sys.meta_path.insert(0, _Moved)
