from prestage.tensor.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_CLOSED: _ClassVar[Phase]
    PHASE_ACCUMULATING: _ClassVar[Phase]
    PHASE_UPDATE_DEFERRED: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]

class Lifecycle(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIFECYCLE_UNSPECIFIED: _ClassVar[Lifecycle]
    LIFECYCLE_STARTING: _ClassVar[Lifecycle]
    LIFECYCLE_COMPILING: _ClassVar[Lifecycle]
    LIFECYCLE_SERVING: _ClassVar[Lifecycle]
    LIFECYCLE_DRAINING: _ClassVar[Lifecycle]
PHASE_UNSPECIFIED: Phase
PHASE_CLOSED: Phase
PHASE_ACCUMULATING: Phase
PHASE_UPDATE_DEFERRED: Phase
PHASE_FAILED: Phase
LIFECYCLE_UNSPECIFIED: Lifecycle
LIFECYCLE_STARTING: Lifecycle
LIFECYCLE_COMPILING: Lifecycle
LIFECYCLE_SERVING: Lifecycle
LIFECYCLE_DRAINING: Lifecycle

class CallKey(_message.Message):
    __slots__ = ("run_id", "incarnation", "epoch", "seq", "payload_digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    epoch: int
    seq: int
    payload_digest: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., payload_digest: _Optional[str] = ...) -> None: ...

class BatchRef(_message.Message):
    __slots__ = ("step", "index", "digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    index: int
    digest: str
    def __init__(self, step: _Optional[int] = ..., index: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("phase", "step", "micro_step", "train_step", "staged", "trained", "parameters_suspect", "failure", "lifecycle", "run_id", "incarnation", "epoch", "last_seq", "durable_step", "compiled", "stored", "stored_bytes", "store_limit_bytes", "background_failure", "running_call", "seconds_since_progress", "backend_compiles", "parameter_digest", "idle_wait_seconds", "in_flight")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICRO_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_SUSPECT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FAILURE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CALL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_COMPILES_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IDLE_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    step: int
    micro_step: int
    train_step: int
    staged: BatchRef
    trained: _containers.RepeatedCompositeFieldContainer[BatchRef]
    parameters_suspect: bool
    failure: str
    lifecycle: Lifecycle
    run_id: str
    incarnation: str
    epoch: int
    last_seq: int
    durable_step: int
    compiled: bool
    stored: _containers.RepeatedCompositeFieldContainer[BatchRef]
    stored_bytes: int
    store_limit_bytes: int
    background_failure: str
    running_call: str
    seconds_since_progress: float
    backend_compiles: int
    parameter_digest: str
    idle_wait_seconds: float
    in_flight: int
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., micro_step: _Optional[int] = ..., train_step: _Optional[int] = ..., staged: _Optional[_Union[BatchRef, _Mapping]] = ..., trained: _Optional[_Iterable[_Union[BatchRef, _Mapping]]] = ..., parameters_suspect: bool = ..., failure: _Optional[str] = ..., lifecycle: _Optional[_Union[Lifecycle, str]] = ..., run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., last_seq: _Optional[int] = ..., durable_step: _Optional[int] = ..., compiled: bool = ..., stored: _Optional[_Iterable[_Union[BatchRef, _Mapping]]] = ..., stored_bytes: _Optional[int] = ..., store_limit_bytes: _Optional[int] = ..., background_failure: _Optional[str] = ..., running_call: _Optional[str] = ..., seconds_since_progress: _Optional[float] = ..., backend_compiles: _Optional[int] = ..., parameter_digest: _Optional[str] = ..., idle_wait_seconds: _Optional[float] = ..., in_flight: _Optional[int] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("with_parameter_digest",)
    WITH_PARAMETER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    with_parameter_digest: bool
    def __init__(self, with_parameter_digest: bool = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("engine", "can_stage", "can_defer_update", "can_checkpoint", "can_export_weights", "can_score", "update_waits_for_device", "optional_fields", "required_fields", "vocab_size", "moe_layers", "top_k", "num_experts", "device_kind", "device_count", "process_count", "row_multiple", "staging_memory_bytes", "payload_planes", "shared_memory_folder", "shared_memory_nonce", "store_limit_bytes", "reports_drop_audit")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CAN_STAGE_FIELD_NUMBER: _ClassVar[int]
    CAN_DEFER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    CAN_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CAN_EXPORT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CAN_SCORE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_WAITS_FOR_DEVICE_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELDS_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    STAGING_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_PLANES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NONCE_FIELD_NUMBER: _ClassVar[int]
    STORE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPORTS_DROP_AUDIT_FIELD_NUMBER: _ClassVar[int]
    engine: str
    can_stage: bool
    can_defer_update: bool
    can_checkpoint: bool
    can_export_weights: bool
    can_score: bool
    update_waits_for_device: bool
    optional_fields: _containers.RepeatedScalarFieldContainer[str]
    required_fields: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    moe_layers: int
    top_k: int
    num_experts: int
    device_kind: str
    device_count: int
    process_count: int
    row_multiple: int
    staging_memory_bytes: int
    payload_planes: _containers.RepeatedScalarFieldContainer[str]
    shared_memory_folder: str
    shared_memory_nonce: str
    store_limit_bytes: int
    reports_drop_audit: bool
    def __init__(self, engine: _Optional[str] = ..., can_stage: bool = ..., can_defer_update: bool = ..., can_checkpoint: bool = ..., can_export_weights: bool = ..., can_score: bool = ..., update_waits_for_device: bool = ..., optional_fields: _Optional[_Iterable[str]] = ..., required_fields: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ..., moe_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., num_experts: _Optional[int] = ..., device_kind: _Optional[str] = ..., device_count: _Optional[int] = ..., process_count: _Optional[int] = ..., row_multiple: _Optional[int] = ..., staging_memory_bytes: _Optional[int] = ..., payload_planes: _Optional[_Iterable[str]] = ..., shared_memory_folder: _Optional[str] = ..., shared_memory_nonce: _Optional[str] = ..., store_limit_bytes: _Optional[int] = ..., reports_drop_audit: bool = ...) -> None: ...

class CompileRequest(_message.Message):
    __slots__ = ("key", "rows", "tokens_per_row", "fields", "routing_shape", "receive_buffers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_SHAPE_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    rows: int
    tokens_per_row: int
    fields: _containers.RepeatedScalarFieldContainer[str]
    routing_shape: _containers.RepeatedScalarFieldContainer[int]
    receive_buffers: int
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ..., rows: _Optional[int] = ..., tokens_per_row: _Optional[int] = ..., fields: _Optional[_Iterable[str]] = ..., routing_shape: _Optional[_Iterable[int]] = ..., receive_buffers: _Optional[int] = ...) -> None: ...

class CompileResponse(_message.Message):
    __slots__ = ("seconds", "programs", "idle_wait_seconds")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    IDLE_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    programs: int
    idle_wait_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seconds: _Optional[float] = ..., programs: _Optional[int] = ..., idle_wait_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class FwdBwdRequest(_message.Message):
    __slots__ = ("key", "batch", "apply_optimizer", "defer_update")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    APPLY_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    DEFER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    batch: BatchRef
    apply_optimizer: bool
    defer_update: bool
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ..., batch: _Optional[_Union[BatchRef, _Mapping]] = ..., apply_optimizer: bool = ..., defer_update: bool = ...) -> None: ...

class FwdBwdResponse(_message.Message):
    __slots__ = ("state", "dispatch_seconds", "used_staged_input", "update")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USED_STAGED_INPUT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    dispatch_seconds: float
    used_staged_input: bool
    update: UpdateOutcome
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ..., dispatch_seconds: _Optional[float] = ..., used_staged_input: bool = ..., update: _Optional[_Union[UpdateOutcome, _Mapping]] = ...) -> None: ...

class UpdateOutcome(_message.Message):
    __slots__ = ("applied", "dropless_replays", "update_seconds", "device_wait_seconds")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    DROPLESS_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    applied: bool
    dropless_replays: int
    update_seconds: float
    device_wait_seconds: float
    def __init__(self, applied: bool = ..., dropless_replays: _Optional[int] = ..., update_seconds: _Optional[float] = ..., device_wait_seconds: _Optional[float] = ...) -> None: ...

class StageFwdBwdRequest(_message.Message):
    __slots__ = ("key", "batch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    batch: BatchRef
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ..., batch: _Optional[_Union[BatchRef, _Mapping]] = ...) -> None: ...

class StageFwdBwdResponse(_message.Message):
    __slots__ = ("state", "stage_seconds", "device_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    stage_seconds: float
    device_bytes: int
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ..., stage_seconds: _Optional[float] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class ApplyDeferredUpdateRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ...) -> None: ...

class UpdateResponse(_message.Message):
    __slots__ = ("state", "update")
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    update: UpdateOutcome
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ..., update: _Optional[_Union[UpdateOutcome, _Mapping]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "from_step", "max_steps")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    from_step: int
    max_steps: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., from_step: _Optional[int] = ..., max_steps: _Optional[int] = ...) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("steps", "next_step")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepMetrics]
    next_step: int
    def __init__(self, steps: _Optional[_Iterable[_Union[StepMetrics, _Mapping]]] = ..., next_step: _Optional[int] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "train_step", "applied", "values", "boundary_idle_seconds", "device_wait_seconds", "stage_seconds", "boundary_idle_before_seconds")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_IDLE_BEFORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    train_step: int
    applied: bool
    values: _containers.ScalarMap[str, float]
    boundary_idle_seconds: float
    device_wait_seconds: float
    stage_seconds: float
    boundary_idle_before_seconds: float
    def __init__(self, step: _Optional[int] = ..., train_step: _Optional[int] = ..., applied: bool = ..., values: _Optional[_Mapping[str, float]] = ..., boundary_idle_seconds: _Optional[float] = ..., device_wait_seconds: _Optional[float] = ..., stage_seconds: _Optional[float] = ..., boundary_idle_before_seconds: _Optional[float] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("key", "data_cursor")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DATA_CURSOR_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    data_cursor: str
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ..., data_cursor: _Optional[str] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("state", "step", "snapshot_seconds")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    step: int
    snapshot_seconds: float
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ..., step: _Optional[int] = ..., snapshot_seconds: _Optional[float] = ...) -> None: ...

class RestoreCheckpointRequest(_message.Message):
    __slots__ = ("key", "step")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    step: int
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class RestoreCheckpointResponse(_message.Message):
    __slots__ = ("state", "data_cursor", "saved_run_id", "saved_epoch", "saved_last_seq")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DATA_CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAVED_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SAVED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAVED_LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    data_cursor: str
    saved_run_id: str
    saved_epoch: int
    saved_last_seq: int
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ..., data_cursor: _Optional[str] = ..., saved_run_id: _Optional[str] = ..., saved_epoch: _Optional[int] = ..., saved_last_seq: _Optional[int] = ...) -> None: ...

class AbortStepRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ...) -> None: ...

class AbortStepResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ...) -> None: ...

class PrepareWeightSyncRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ...) -> None: ...

class PrepareWeightSyncResponse(_message.Message):
    __slots__ = ("state", "version", "pinned_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    version: int
    pinned_bytes: int
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ..., version: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class ExportWeightsRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "version", "chunk_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    version: int
    chunk_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class ExportWeightsResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "end")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightManifest
    chunk: bytes
    end: WeightsEnd
    def __init__(self, manifest: _Optional[_Union[WeightManifest, _Mapping]] = ..., chunk: _Optional[bytes] = ..., end: _Optional[_Union[WeightsEnd, _Mapping]] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("version", "tensors", "total_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[WeightTensor]
    total_bytes: int
    def __init__(self, version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[WeightTensor, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class WeightTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "digest", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _tensor_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class WeightsEnd(_message.Message):
    __slots__ = ("total_bytes",)
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    def __init__(self, total_bytes: _Optional[int] = ...) -> None: ...

class ReleaseWeightSyncRequest(_message.Message):
    __slots__ = ("key", "version")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    key: CallKey
    version: int
    def __init__(self, key: _Optional[_Union[CallKey, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class ReleaseWeightSyncResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    def __init__(self, state: _Optional[_Union[WorkerState, _Mapping]] = ...) -> None: ...

class ComputeLogprobsRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "batch", "release")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    batch: BatchRef
    release: bool
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., batch: _Optional[_Union[BatchRef, _Mapping]] = ..., release: bool = ...) -> None: ...

class ComputeLogprobsResponse(_message.Message):
    __slots__ = ("logprobs", "rows", "tokens_per_row", "train_step")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    rows: int
    tokens_per_row: int
    train_step: int
    def __init__(self, logprobs: _Optional[bytes] = ..., rows: _Optional[int] = ..., tokens_per_row: _Optional[int] = ..., train_step: _Optional[int] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("run_id", "epoch", "batch", "release")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    epoch: int
    batch: BatchRef
    release: bool
    def __init__(self, run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., batch: _Optional[_Union[BatchRef, _Mapping]] = ..., release: bool = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("values", "train_step")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEP_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    train_step: int
    def __init__(self, values: _Optional[_Mapping[str, float]] = ..., train_step: _Optional[int] = ...) -> None: ...
