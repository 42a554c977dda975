"""The public names of the core; written by ``python -m tests.core.public_names``."""

from ortflex_core.kernel.batches import Batch as Batch, Block as Block, Lasting as Lasting
from ortflex_core.kernel.binder import (
    Binder as Binder,
    binding_counts as binding_counts,
    HostVector as HostVector,
    value_key as value_key,
)
from ortflex_core.kernel.component import (
    Component as Component,
    expected_count as expected_count,
    hyper as hyper,
    is_count as is_count,
    is_number as is_number,
    MOST as MOST,
    number as number,
    one_of as one_of,
    satisfying as satisfying,
    setting as setting,
)
from ortflex_core.kernel.construct import (
    component_schema as component_schema,
    expected as expected,
    field_types as field_types,
)
from ortflex_core.kernel.engine_protocols import (
    Backend as Backend,
    Engine as Engine,
    LayerBackend as LayerBackend,
    Losses as Losses,
    Passes as Passes,
    DataSource as DataSource,
    Device as Device,
    Value as Value,
    Communicator as Communicator,
    ProcessGroup as ProcessGroup,
)
from ortflex_core.kernel.entries import Entry as Entry, singular as singular
from ortflex_core.kernel.errors import (
    BrokenPlugin as BrokenPlugin,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    error_reason as error_reason,
    GraphError as GraphError,
    MALFORMED as MALFORMED,
    MissingKernel as MissingKernel,
    ModelError as ModelError,
    NoGradientRule as NoGradientRule,
    NotDecomposed as NotDecomposed,
    NotDifferentiable as NotDifferentiable,
    OrtflexError as OrtflexError,
    PluginError as PluginError,
    printable as printable,
    RuntimeUnavailable as RuntimeUnavailable,
    short_repr as short_repr,
    suggest as suggest,
    TrainingDiverged as TrainingDiverged,
    Unsupported as Unsupported,
)
from ortflex_core.kernel.files import (
    make_folder as make_folder,
    no_file as no_file,
    OutputError as OutputError,
    write_bytes as write_bytes,
)
from ortflex_core.kernel.hooks import (
    Callback as Callback,
    hook as hook,
    HookManager as HookManager,
    Hooks as Hooks,
    NAMES as NAMES,
)
from ortflex_core.kernel.host_scalars import Host as Host, HostProgram as HostProgram
from ortflex_core.kernel.install_command import install_command as install_command
from ortflex_core.kernel.kinds import (
    HOOKS as HOOKS,
    KINDS as KINDS,
    Kinds as Kinds,
    TABLES as TABLES,
)
from ortflex_core.kernel.last_good import first_not_finite as first_not_finite
from ortflex_core.kernel.locks import FolderLock as FolderLock, lock_handle as lock_handle
from ortflex_core.kernel.model_protocols import (
    Adapter as Adapter,
    match_products as match_products,
    Product as Product,
    Edit as Edit,
)
from ortflex_core.kernel.registry import Plugins as Plugins, Registry as Registry
from ortflex_core.kernel.regular_files import (
    LINE as LINE,
    lines as lines,
    NotRegular as NotRegular,
    open_regular as open_regular,
    open_text as open_text,
    read_bytes as read_bytes,
    read_json as read_json,
    read_text as read_text,
    reason as reason,
    RegularFile as RegularFile,
    TABLE as TABLE,
    TEXT as TEXT,
    file_size as file_size,
)
from ortflex_core.kernel.step_protocols import (
    Average as Average,
    Constraint as Constraint,
    Loss as Loss,
    Metric as Metric,
    MetricState as MetricState,
    Optimizer as Optimizer,
    Slots as Slots,
    Updated as Updated,
    Penalty as Penalty,
    Growth as Growth,
    Place as Place,
    Precision as Precision,
    Schedule as Schedule,
    ScheduleContext as ScheduleContext,
    Unit as Unit,
    Transform as Transform,
    TransformContext as TransformContext,
)
from ortflex_core.kernel.synonyms import (
    names_elsewhere as names_elsewhere,
    translate_key as translate_key,
)
from ortflex_core.kernel.tracebacks import (
    short_traceback as short_traceback,
    short_tracebacks as short_tracebacks,
)
from ortflex_core.kernel.types import (
    Array as Array,
    dtype_name as dtype_name,
    numpy_dtype as numpy_dtype,
    onnx_dtype as onnx_dtype,
    Progress as Progress,
    same_shape as same_shape,
    Shape as Shape,
    shape_text as shape_text,
    TensorSpec as TensorSpec,
)
from ortflex_core.compiler.graph.control_flow import (
    captured_names as captured_names,
    prefix_names as prefix_names,
    replay as replay,
    Sub as Sub,
)
from ortflex_core.compiler.graph.counter_rng import dropout as dropout, normal as normal
from ortflex_core.compiler.graph.nodes import (
    ancestor_nodes as ancestor_nodes,
    find_nodes as find_nodes,
    reads as reads,
    split_nodes as split_nodes,
)
from ortflex_core.compiler.graph.ops import (
    FLOATS as FLOATS,
    Ops as Ops,
    RANDOM as RANDOM,
    Tensor as Tensor,
    Trace as Trace,
)
from ortflex_core.compiler.graph.ports import (
    COLUMNS as COLUMNS,
    Key as Key,
    PARTS as PARTS,
    Port as Port,
    ports_of as ports_of,
)
from ortflex_core.compiler.graph.program import (
    ancestors as ancestors,
    build as build,
    HostInput as HostInput,
    Program as Program,
)
from ortflex_core.compiler.graph.protos import opsets_of as opsets_of
from ortflex_core.compiler.graph.schemas import changed_attributes as changed_attributes
from ortflex_core.compiler.graph.sequences import SEQUENCE_OPERATORS as SEQUENCE_OPERATORS
from ortflex_core.compiler.graph.sizes import (
    count_to as count_to,
    dims as dims,
    known_size as known_size,
    known_sizes as known_sizes,
    size_of as size_of,
    size_vector as size_vector,
)
from ortflex_core.compiler.model.adapted_model import (
    adapt as adapt,
    AdaptedModel as AdaptedModel,
    frozen_values as frozen_values,
    with_values as with_values,
)
from ortflex_core.compiler.model.adapter_files import (
    write_adapter as write_adapter,
    write_base as write_base,
)
from ortflex_core.compiler.model.changes import Changes as Changes, find_changes as find_changes
from ortflex_core.compiler.model.editor import apply_edits as apply_edits, Editor as Editor
from ortflex_core.compiler.model.heads import Head as Head, Layer as Layer
from ortflex_core.compiler.model.model import (
    as_model as as_model,
    Model as Model,
    OLDEST_OPSET as OLDEST_OPSET,
    Rewrite as Rewrite,
)
from ortflex_core.compiler.model.products import find_products as find_products
from ortflex_core.compiler.model.quantizer import Quantizer as Quantizer
from ortflex_core.compiler.model.shape_probe import (
    complete_shapes as complete_shapes,
    explain_unknown as explain_unknown,
)
from ortflex_core.compiler.model.targets import (
    check_tensor as check_tensor,
    default_output as default_output,
    file_classes as file_classes,
    has_normalized_scores as has_normalized_scores,
    raw_scores as raw_scores,
)
from ortflex_core.compiler.model.training_mode import (
    buffer_spec as buffer_spec,
    buffer_value as buffer_value,
    inactive_dropout as inactive_dropout,
    Modes as Modes,
    rewrite_for_inference as rewrite_for_inference,
    running_statistics as running_statistics,
    share_port as share_port,
    statistics_moves as statistics_moves,
    trains_statistics as trains_statistics,
)
from ortflex_core.compiler.onnx_files.model_file import read_model as read_model
from ortflex_core.compiler.operators.cotangents import (
    add_at as add_at,
    full as full,
    passed as passed,
    positions as positions,
    put_back as put_back,
    ranked as ranked,
    reshape_like as reshape_like,
    unbroadcast as unbroadcast,
    zeros_like as zeros_like,
)
from ortflex_core.compiler.operators.decomposition_table import (
    Call as Call,
    Decomposition as Decomposition,
    Decompositions as Decompositions,
)
from ortflex_core.compiler.operators.function_bodies import body_of as body_of, has_body as has_body
from ortflex_core.compiler.operators.gradient_families import load_rules as load_rules
from ortflex_core.compiler.operators.gradient_rules import (
    Gradient as Gradient,
    Rules as Rules,
    RuleTable as RuleTable,
)
from ortflex_core.compiler.operators.reverse_mode import (
    gradients as gradients,
    NodeView as NodeView,
)
from ortflex_core.compiler.problem.labels import (
    float_labels as float_labels,
    float_scores as float_scores,
    integer_labels as integer_labels,
    require_range as require_range,
    shape_mismatch as shape_mismatch,
    shapes_compatible as shapes_compatible,
)
from ortflex_core.compiler.problem.losses import (
    bind_terms as bind_terms,
    expected_labels as expected_labels,
    loss_tables as loss_tables,
    LossRequest as LossRequest,
    tensors_of as tensors_of,
)
from ortflex_core.compiler.problem.parameters import (
    choose_parameters as choose_parameters,
    trainable_model as trainable_model,
)
from ortflex_core.compiler.problem.problem import LossTerm as LossTerm, Problem as Problem
from ortflex_core.compiler.problem.pruning import Pruning as Pruning
from ortflex_core.compiler.problem.teachers import TeacherTensor as TeacherTensor
from ortflex_core.compiler.problem.updating import AVERAGE as AVERAGE
from ortflex_core.compiler.programs.cache_key import problem_key as problem_key
from ortflex_core.compiler.programs.formulas import Formula as Formula
from ortflex_core.compiler.programs.gradient_model import gradient_model as gradient_model
from ortflex_core.compiler.programs.rebuild import optimize as optimize
from ortflex_core.compiler.programs.stages import (
    forward_program as forward_program,
    loss_ports as loss_ports,
    loss_program as loss_program,
    stops_gradients as stops_gradients,
    training_program as training_program,
)
from ortflex_core.compiler.programs.step import (
    gradient_program as gradient_program,
    NORM as NORM,
    step_program as step_program,
    update_program as update_program,
)
from ortflex_core.compiler.programs.updates import (
    adding_program as adding_program,
    batch_gradient as batch_gradient,
    global_norm as global_norm,
)
from ortflex_core.compiler.runtime.host_memory import array_at as array_at
from ortflex_core.compiler.runtime.installation import (
    diagnose as diagnose,
    find_distributions as find_distributions,
    require_runtime as require_runtime,
    Runtime as Runtime,
)
from ortflex_core.compiler.runtime.missing_kernels import missing_kernel as missing_kernel
from ortflex_core.compiler.runtime.recompute import (
    AGAIN as AGAIN,
    is_copy as is_copy,
    repeat_forward as repeat_forward,
)
from ortflex_core.compiler.runtime.session import (
    get_program as get_program,
    get_session as get_session,
    keep_alive as keep_alive,
    new_session as new_session,
    open_session as open_session,
    plans_memory as plans_memory,
    rounds_short_types as rounds_short_types,
    run_arrays as run_arrays,
    run_once as run_once,
    session_options as session_options,
    use_library as use_library,
    Workspace as Workspace,
)
from ortflex_core.training.artifacts.array_file import (
    ArrayFile as ArrayFile,
    dump_arrays as dump_arrays,
)
from ortflex_core.training.artifacts.checkpoint import (
    list_checkpoints as list_checkpoints,
    Saved as Saved,
)
from ortflex_core.training.artifacts.step_application import apply_state as apply_state
from ortflex_core.training.artifacts.step_export import export_step as export_step
from ortflex_core.training.artifacts.step_folder import (
    open_step as open_step,
    PortableStep as PortableStep,
)
from ortflex_core.training.config.arguments import (
    Arguments as Arguments,
    device_spec as device_spec,
    kinds_of_plugins as kinds_of_plugins,
    plain_help as plain_help,
    takes_several as takes_several,
)
from ortflex_core.training.config.components import (
    Parts as Parts,
    read_head as read_head,
    to_plain as to_plain,
)
from ortflex_core.training.config.functions import AllRows as AllRows
from ortflex_core.training.config.recipe import key_choices as key_choices, Recipe as Recipe
from ortflex_core.training.config.toml import to_toml as to_toml
from ortflex_core.training.data.columns import Columns as Columns, fit_to as fit_to, split as split
from ortflex_core.training.data.iterables import Batches as Batches
from ortflex_core.training.data.pieces import (
    Pieces as Pieces,
    files_digest as files_digest,
    read_if_small as read_if_small,
    usual_buffer as usual_buffer,
)
from ortflex_core.training.engines.array_engine import HostEngine as HostEngine
from ortflex_core.training.engines.backend_choice import (
    missing_types as missing_types,
    refusals as refusals,
)
from ortflex_core.training.engines.buffers import (
    averaged as averaged,
    check_state as check_state,
    DataBuffers as DataBuffers,
    PlanCache as PlanCache,
    read_into as read_into,
    ReadLosses as ReadLosses,
    Scalar as Scalar,
    Scales as Scales,
    start_average as start_average,
    Twins as Twins,
)
from ortflex_core.training.engines.device_engine import (
    DeviceEngine as DeviceEngine,
    TwinEngine as TwinEngine,
)
from ortflex_core.training.engines.evaluator import Evaluator as Evaluator
from ortflex_core.training.engines.gradient_sum import GradientExchange as GradientExchange
from ortflex_core.training.engines.host_updates import (
    host_formulas as host_formulas,
    HostUpdates as HostUpdates,
)
from ortflex_core.training.engines.peers import (
    Peers as Peers,
    RankFailed as RankFailed,
    RanksDiffer as RanksDiffer,
)
from ortflex_core.training.engines.state_shards import StateShards as StateShards
from ortflex_core.training.internals import Internals as Internals, internals_of as internals_of
from ortflex_core.training.receipt import Receipt as Receipt
from ortflex_core.training.trainer import Trainer as Trainer
from ortflex_core.training.views.history import History as History
from ortflex_core.training.views.progress import epoch_summary as epoch_summary
from ortflex_core.training.views.rate_sweep import RateSweep as RateSweep
from ortflex_core.training.views.summary import Summary as Summary, text_table as text_table
from ortflex_core.tools.check import check_model as check_model, edited_model as edited_model
from ortflex_core.tools.comparison import (
    compare as compare,
    Comparison as Comparison,
    Result as Result,
)
from ortflex_core.tools.memory import (
    estimate_memory as estimate_memory,
    mebibytes as mebibytes,
    MemoryReport as MemoryReport,
)
from ortflex_core.tools.report import ModelReport as ModelReport, NodeReport as NodeReport
from ortflex_core.tools.shrinking import (
    Shrunk as Shrunk,
    ShrunkLayer as ShrunkLayer,
    shrink as shrink,
)
from ortflex_core.tools.times import time_backends as time_backends, Times as Times
from ortflex_core.tools.verification import (
    TensorDifference as TensorDifference,
    Verdict as Verdict,
    verify as verify,
)
from ortflex_core.testing.adapter import AdapterKit as AdapterKit
from ortflex_core.testing.average import AverageKit as AverageKit
from ortflex_core.testing.backend import BackendKit as BackendKit
from ortflex_core.testing.callback import CallbackKit as CallbackKit
from ortflex_core.testing.component import ComponentKit as ComponentKit
from ortflex_core.testing.constraint import ConstraintKit as ConstraintKit
from ortflex_core.testing.decomposition import (
    DecompositionCase as DecompositionCase,
    DecompositionKit as DecompositionKit,
)
from ortflex_core.testing.device import DeviceKit as DeviceKit
from ortflex_core.testing.edit import EditKit as EditKit
from ortflex_core.testing.gradient import GradientCase as GradientCase, GradientKit as GradientKit
from ortflex_core.testing.loss import LossKit as LossKit
from ortflex_core.testing.metric import MetricKit as MetricKit
from ortflex_core.testing.optimizer import OptimizerKit as OptimizerKit
from ortflex_core.testing.penalty import PenaltyKit as PenaltyKit
from ortflex_core.testing.precision import Emulated as Emulated, PrecisionKit as PrecisionKit
from ortflex_core.testing.process_group import ProcessGroupKit as ProcessGroupKit
from ortflex_core.testing.quantizer import QuantizerKit as QuantizerKit
from ortflex_core.testing.schedule import ScheduleKit as ScheduleKit
from ortflex_core.testing.source import DataSourceKit as DataSourceKit
from ortflex_core.testing.threads import run_ranks as run_ranks, ThreadGroup as ThreadGroup
from ortflex_core.testing.transform import TransformKit as TransformKit

PUBLIC: dict[str, str]
__version__: str
